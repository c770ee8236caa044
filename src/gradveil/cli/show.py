"""`gradveil show NAME`: what a method is, whose idea it is, its settings with bounds and defaults, and an example."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gradveil import attacks, defenses, models
from gradveil.attacks import Attack
from gradveil.cli.list import KINDS, stages_of
from gradveil.core.errors import unknown
from gradveil.core.options import types_of
from gradveil.core.settings import Registry, default_of, fields_of
from gradveil.defenses import Defense

_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def command(name: Annotated[str, typer.Argument(help="A defense, attack, model or data set.", metavar="NAME")]) -> None:
    """Show what a method is, whose idea it is, its settings with bounds and defaults, and an example."""
    cards = [
        *_cards("defense", defenses.registry, name),
        *_cards("attack", attacks.registry, name),
        *_cards("model", models.MODELS, name),
    ]
    cards += [
        f"{entry} (data set)\n\n{text}\n\n{_example('data', entry)}" for entry, text in KINDS["data"]() if entry == name
    ]
    if not cards:
        names = [entry for kind in ("defenses", "attacks", "models", "data") for entry, _ in KINDS[kind]()]
        raise unknown("method", name, names, hint="`gradveil list defenses` shows one kind of them.")
    typer.echo("\n\n".join(cards))


def _cards(kind: str, registry: Registry[Any], name: str) -> Iterator[str]:
    if name not in registry:
        return
    cls = registry[name]
    blocks = [f"{name} ({kind})", inspect.getdoc(cls) or "", inspect.getdoc(sys.modules[cls.__module__]) or ""]
    blocks.append("\n".join(_facts(cls)))
    settings = [_setting(key, field) for key, field in fields_of(cls).items()]
    blocks += ["\n".join(["settings:", *settings]) if settings else "no settings", _example(kind, name)]
    yield "\n\n".join(block for block in blocks if block)


def _facts(cls: type) -> Iterator[str]:
    if issubclass(cls, Defense):
        yield f"stage: {stages_of(cls)}"
        yield "countered by: " + (", ".join(cls.counters) or "no attack of this project")
        if cls.random:
            yield "random: two updates of one batch differ"
    if issubclass(cls, Attack):
        yield "needs: " + (", ".join(sorted(cls.needs)) or "nothing but the update")
        if cls.adaptive:
            yield "adaptive: knows the defense it is built against"


def _setting(name: str, field: FieldInfo) -> str:
    """`std: float = 0.01 (> 0)  Standard deviation of the noise.`"""
    types = " | ".join(_type_text(kind) for kind in types_of(field))
    limits = [(symbol, getattr(m, key)) for m in field.metadata for key, symbol in _BOUNDS.items() if hasattr(m, key)]
    bounds = ", ".join(f"{symbol} {limit:g}" for symbol, limit in limits)
    default = default_of(field)
    text = f"  {name}: {types}" + (", required" if default is PydanticUndefined else f" = {default}")
    return text + (f" ({bounds})" if bounds else "") + (f"  {field.description}" if field.description else "")


def _type_text(kind: object) -> str:
    if get_origin(kind) is Literal:
        return " | ".join(str(value) for value in get_args(kind))
    return kind.__name__ if type(kind) is type else str(kind)


def _example(kind: str, name: str) -> str:
    return f"example: gradveil audit --{kind} {name}"
