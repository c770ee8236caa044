"""Small choices written as text, `name` or `name:key=value`: partitions of the data, schedules of the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from gradveil.core.errors import unknown
from gradveil.core.settings import build, parse_settings

T = TypeVar("T")


def choose(kind: str, text: str, choices: Mapping[str, type[T]]) -> T:
    """The one of `choices` that `text` names, with its settings."""
    name, _, values = text.strip().partition(":")
    if name not in choices:
        raise unknown(kind, name, choices, hint=f"There are: {', '.join(choices)}.")
    return build(choices[name], parse_settings(values, of=text), of=text)
