"""`gradveil compare A B`: what changed between two audits, and what is only noise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from gradveil.report.compare import Comparison

# typer reads these at run time, on Python 3.10 too: hence Optional.
File = Optional[Path]  # noqa: UP045
Texts = Optional[list[str]]  # noqa: UP045

_STYLES = {"leaks more": "bold red", "leaks less": "bold"}


def command(
    a: Annotated[Path, typer.Argument(help="Folder of a finished audit.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="Folder of the audit to compare it with.", metavar="B")],
    across: Annotated[Texts, typer.Option(help="Term in which the cases may differ, such as budget; repeat.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Also attacks without a clear change.")] = False,
    out: Annotated[File, typer.Option(help="Write a page with all of it to this file; only our own is replaced.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Show what changed from audit A to audit B, for every defense and attack, and what is within noise.

    Example: gradveil compare runs/before runs/after --out compare.html
    """
    from gradveil.api import compare

    comparison = compare(a, b, across or ())
    if not quiet:
        _show(comparison, every)
    if out is not None:
        page = comparison.save(out)
        if not quiet:
            typer.echo(f"\nPage: {page}")


def _show(comparison: Comparison, every: bool) -> None:
    from gradveil.core.text import plain
    from gradveil.report.compare import METRICS
    from gradveil.report.fitted_table import FittedColumn, FittedTable

    console = Console()
    console.print(Text(f"{plain(comparison.scopes[0])}; {comparison.method}", "dim"))
    columns = [FittedColumn("defense"), FittedColumn("attack"), FittedColumn("metric"), FittedColumn("first", "right")]
    columns += [FittedColumn("second", "right"), FittedColumn("change (95%)", "right", 1), FittedColumn("reading")]
    table = FittedTable(columns)
    for defense in comparison.defenses:
        name = shown = plain(defense.spec)
        for i, row in enumerate(defense.rows):
            if i and not (every or row.clear):
                continue
            for change in row.changes:
                reading = Text(change.reading, _STYLES.get(change.reading, ""))
                attack = plain(row.attack) if change is row.changes[0] else ""
                cells = (shown, attack, METRICS[change.metric], *change.texts)
                table.add_row(*cells, reading)
                shown = ""  # said once
        if defense.accuracy.difference is not None:
            cells = (shown, "", "accuracy", *defense.accuracy.texts)
            table.add_row(*cells, defense.accuracy.reading)
        if not defense.rows:
            table.add_row(name, "no attack ran in both")
        table.add_section()
    console.print()
    console.print(table)
    console.print()
    for defense in comparison.defenses:
        console.print(Text(f"{plain(defense.spec)}: {defense.verdict}"))
        for note in defense.notes:
            console.print(Text(f"Warning ({plain(defense.spec)}): {plain(note)}", "yellow"))
    for note in comparison.notes:
        console.print(Text(f"Warning: {plain(note)}", "yellow"))
    console.print(Text(plain(comparison.headline), "bold"))
    hidden = sum(not row.clear for d in comparison.defenses for row in d.rows[1:])
    if hidden and not every:
        console.print(Text(f"{hidden} more rows without a clear change: --all shows them.", "dim"))
