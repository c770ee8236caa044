"""What there is, by kind: a name and a line on each. `list` shows it, `show` looks names up in it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

Entry = tuple[str, str]


def _methods(kind: str) -> list[Entry]:
    registry = importlib.import_module(f"gradveil.{kind}").registry
    return [(cls.name, first_line(cls)) for cls in registry]


def _models() -> list[Entry]:
    from gradveil.models import MODELS

    return [(cls.name, first_line(cls)) for cls in MODELS]


def _data() -> list[Entry]:
    from gradveil import data

    return [(d.name, d.description + ("" if d.available else " (files not here)")) for d in data.names()]


def _recipes() -> list[Entry]:
    names: Callable[[], Iterable[Any]] = getattr(importlib.import_module("gradveil.recipes"), "names", list)
    return [(name, text) for name, text, *_ in names()]


KINDS: dict[str, Callable[[], list[Entry]]] = {
    "attacks": lambda: _methods("attacks"),
    "defenses": lambda: _methods("defenses"),
    "models": _models,
    "data": _data,
    "recipes": _recipes,
}


def first_line(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]
