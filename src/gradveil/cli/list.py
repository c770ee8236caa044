"""`gradveil list KIND`: what there is, one line each."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    kind: Annotated[str, typer.Argument(help="attacks, defenses, models, data or recipes.", metavar="KIND")],
) -> None:
    """List attacks, defenses, models, data sets or recipes."""
    from gradveil.cli.catalogue import KINDS
    from gradveil.errors import unknown

    if kind not in KINDS:
        raise unknown("list of", kind, KINDS, hint=f"There are: {', '.join(KINDS)}.")
    entries = KINDS[kind]()
    width = max((len(name) for name, _ in entries), default=0)
    for name, text in entries:
        typer.echo(f"{name:<{width}}  {text}".rstrip())
