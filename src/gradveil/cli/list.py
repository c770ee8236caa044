"""`gradveil list [KIND]`: what there is, one line each; without a kind, all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer


def command(
    kind: Annotated[str, typer.Argument(help="attacks, defenses, models, data or recipes. [all]", metavar="KIND")] = "",
) -> None:
    """List attacks, defenses, models, data sets or recipes; without a kind, all of them."""
    from gradveil.cli.catalogue import KINDS
    from gradveil.core.errors import unknown

    if not kind:
        for number, name in enumerate(KINDS):
            typer.echo(("\n" if number else "") + name)
            _show(KINDS[name](), "  ")
        return
    if kind not in KINDS:
        raise unknown("list of", kind, KINDS, hint=f"There are: {', '.join(KINDS)}.")
    _show(KINDS[kind]())


def _show(entries: Sequence[tuple[str, str]], indent: str = "") -> None:
    width = max((len(name) for name, _ in entries), default=0)
    for name, text in entries:
        typer.echo(f"{indent}{name:<{width}}  {text}".rstrip())
