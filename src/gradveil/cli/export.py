"""`gradveil export RUN`: an audited defense as a file, and the lines that use it."""

from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli.layout import hanging
from gradveil.cli.options import Quiet
from gradveil.core.text import plain


def command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished audit.", metavar="RUN")],
    defense: Annotated[str | None, typer.Option(help="Which one. [the recommended or only one]")] = None,
    out: Annotated[Path, typer.Option(help="The file; only an exported one is replaced.")] = Path("protection.json"),
    accept_leak: Annotated[bool, typer.Option("--accept-leak", help="Also where updates leak under it.")] = False,
    quiet: Quiet = False,
) -> None:
    """Write an audited defense to a file, with the task, the local training and the units of the audit.

    Shields, Flower guards and Flower mods read the file, and refuse to act in other units.
    """
    from gradveil.auditing.export import choose_defense, export, requirement, usage
    from gradveil.storage.run_folder import RunFolder
    from gradveil.summary import Summary

    summary = Summary.read(run)
    row = choose_defense(summary, defense)
    protection = export(RunFolder(run), summary, row, accept_leak)
    file = protection.save(out)
    if quiet:
        return
    typer.echo(hanging("", plain(f"{file}: {protection.defense} ({protection.verdict}), {protection.units}.")))
    typer.echo(hanging("", plain(requirement(summary.case))))
    for use in usage(row, summary.case, str(file)):
        typer.echo(f"\n{use.title}:\n")
        typer.echo("\n".join(f"    {plain(line)}" if line else "" for line in use.code.splitlines()))
