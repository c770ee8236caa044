"""`gradveil show NAME`: a method's card: what it is, whose idea, its settings and their defaults."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer


def command(name: Annotated[str, typer.Argument(help="A defense, attack, model or data set.", metavar="NAME")]) -> None:
    """Show what a method is, whose idea it is, and its settings."""
    from gradveil import attacks, defenses, models
    from gradveil.cli.catalogue import KINDS
    from gradveil.core.errors import unknown

    registries: dict[str, Any] = {"defense": defenses.registry, "attack": attacks.registry, "model": models.MODELS}
    cards = [_card(kind, registry[name]) for kind, registry in registries.items() if name in registry]
    cards += [[f"{entry} (data set)", "", text] for entry, text in KINDS["data"]() if entry == name]
    if not cards:
        known = [entry for kind in ("defenses", "attacks", "models", "data") for entry, _ in KINDS[kind]()]
        raise unknown("method", name, known, hint="`gradveil list defenses` shows one kind of them.")
    typer.echo("\n\n".join("\n".join(card) for card in cards))


def _card(kind: str, cls: Any) -> list[str]:
    about = inspect.getdoc(sys.modules[cls.__module__]) or ""
    lines = [f"{cls.name} ({kind})", "", inspect.getdoc(cls) or "", "", about]
    facts = list(_facts(kind, cls))
    fields = [f for f in dataclasses.fields(cls) if f.init]
    settings = [f"  {f.name}: {_type(f)} = {_default(f)}" for f in fields]
    return [*lines, *([""] if facts else []), *facts, "", "settings:" if settings else "no settings", *settings]


def _facts(kind: str, cls: Any) -> Iterator[str]:
    if kind == "defense":
        from gradveil.defenses import STAGES, Defense

        yield "stage: " + ", ".join(s for s in STAGES if getattr(cls, s) is not getattr(Defense, s))
        yield "countered by: " + (", ".join(cls.counters) or "nothing known")
        if cls.random:
            yield "random: two updates of one batch differ"
    if kind == "attack":
        yield "needs: " + (", ".join(sorted(cls.needs)) or "nothing but the update")
        if cls.adaptive:
            yield "adaptive: knows the defense it is built against"


def _type(field: dataclasses.Field[Any]) -> str:
    return field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))


def _default(field: dataclasses.Field[Any]) -> str:
    value: Any = field.default
    if hasattr(value, "get_default"):  # with bounds beside it
        value = value.get_default(call_default_factory=True, validated_data={})
    return "required" if value is dataclasses.MISSING else str(value)
