"""`gradveil show NAME`: what a method is, whose idea it is, its settings with bounds and defaults, and an example."""

import inspect
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gradveil import attacks, defenses, models
from gradveil.attacks import Attack
from gradveil.attacks.suite import accepted_counters
from gradveil.cli.list import KINDS, stages_of
from gradveil.core.errors import unknown
from gradveil.core.options import types_of
from gradveil.core.settings import Registry, default_of, fields_of
from gradveil.defenses import Defense

_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def command(name: Annotated[str, typer.Argument(help="A defense, attack, model or data set.", metavar="NAME")]) -> None:
    """Show what a method is, whose idea it is, its settings with bounds and defaults, and an example."""
    kinds: dict[str, Registry[Any]] = {"defense": defenses.registry, "attack": attacks.registry, "model": models.MODELS}
    cards = [_card(kind, registry[name]) for kind, registry in kinds.items() if name in registry]
    cards += [[f"{entry} (data set)", text] for entry, text in KINDS["data"]() if entry == name]
    if not cards:
        names = [entry for kind in ("defenses", "attacks", "models", "data") for entry, _ in KINDS[kind]()]
        raise unknown("method", name, names, hint="`gradveil list defenses` shows one kind of them.")
    typer.echo("\n\n".join(block for card in cards for block in card if block))


def _card(kind: str, cls: Any) -> list[str]:
    settings = "\n".join(["settings:", *(_setting(name, field) for name, field in fields_of(cls).items())])
    about = [inspect.getdoc(cls) or "", inspect.getdoc(sys.modules[cls.__module__]) or "", "\n".join(_facts(cls))]
    example = f"example: gradveil audit --{kind} {cls.name}"
    return [f"{cls.name} ({kind})", *about, settings if fields_of(cls) else "no settings", example]


def _facts(cls: type) -> Iterator[str]:
    if issubclass(cls, Defense):
        yield f"stage: {stages_of(cls)}"
        yield "countered by: " + (", ".join(accepted_counters(cls)) or "no attack of this project")
        if cls.counters:
            yield f"claimed counters: {', '.join(cls.counters)}"
        if cls.random:
            yield "random: two updates of one batch differ"
    if issubclass(cls, Attack):
        yield "needs: " + (", ".join(sorted(cls.needs)) or "nothing but the update")
        if cls.against:
            yield f"built against: {', '.join(defense.name for defense in cls.against)}"


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
