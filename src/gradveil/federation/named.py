"""Small choices written as text, `name` or `name:key=value`: how data is shared out, how the learning rate moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from gradveil.core.errors import unknown
from gradveil.core.settings import build, parse_settings

T = TypeVar("T")


def choose(kind: str, text: str, known: Mapping[str, type[T]]) -> T:
    """The one of `known` that `text` writes, with its settings."""
    name, _, given = text.strip().partition(":")
    if name not in known:
        raise unknown(kind, name, known, hint=f"There are: {', '.join(known)}.")
    return build(known[name], parse_settings(given, of=text), of=text)
