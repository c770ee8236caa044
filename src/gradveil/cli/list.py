"""`gradveil list [KIND]`: what there is, one line each; without a kind, all of it."""

import inspect
from collections.abc import Callable
from typing import Annotated

import typer

from gradveil import attacks, data, defenses, models, recipes
from gradveil.auditing.presets import PRESETS
from gradveil.core.errors import unknown
from gradveil.defenses import STAGES, Defense

Entry = tuple[str, str]  # a name, and one line about it


def command(
    kind: Annotated[str, typer.Argument(help="attacks, defenses, models, data, presets, recipes. [all]", metavar="KIND")] = "",
) -> None:
    """List attacks, defenses, models, data sets, presets or recipes; without a kind, all of them."""
    if not kind:
        for number, name in enumerate(KINDS):
            typer.echo(("\n" if number else "") + name)
            _print(KINDS[name](), "  ")
        return
    if kind not in KINDS:
        raise unknown("list of", kind, KINDS, hint=f"There are: {', '.join(KINDS)}.")
    _print(KINDS[kind]())


def _print(entries: list[Entry], indent: str = "") -> None:
    width = max((len(name) for name, _ in entries), default=0)
    for name, text in entries:
        typer.echo(f"{indent}{name:<{width}}  {text}".rstrip())


KINDS: dict[str, Callable[[], list[Entry]]] = {
    "attacks": lambda: [(cls.name, first_line(cls)) for cls in attacks.registry],
    "defenses": lambda: [(cls.name, f"{stages_of(cls):<8}  {first_line(cls)}") for cls in defenses.registry],
    "models": lambda: [(cls.name, first_line(cls)) for cls in models.MODELS],
    "data": lambda: [(d.name, d.description + ("" if d.available else " (files not here)")) for d in data.names()],
    "presets": lambda: [(name, preset.description) for name, preset in PRESETS.items()],
    "recipes": lambda: [(name, title) for name, title, *_ in recipes.names()],
}


def stages_of(cls: type[Defense]) -> str:
    """The stages of an update at which a defense acts."""
    return ", ".join(s for s in STAGES if getattr(cls, s) is not getattr(Defense, s)) or "none"


def first_line(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]
