"""`gradveil compare A B`: what changed between two audits, or two settings of a defense, and what is only noise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from gradveil.report.comparison import Comparison

_STYLES = {"more": "bold red", "less": "bold"}


def command(
    a: Annotated[Path, typer.Argument(help="Folder of a finished audit.", metavar="A")],
    b: Annotated[Path | None, typer.Argument(help="Folder of the audit to compare it with. [A]", metavar="B")] = None,
    defense: Annotated[
        list[str] | None, typer.Option(help="Only this one; two: the first of A with the second of B, or of A.")
    ] = None,
    across: Annotated[
        list[str] | None, typer.Option(help="Term in which the cases may differ, such as budget; repeat.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Also attacks without a clear change.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write a page with all of it to this file; only ours is replaced.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Show what changed from audit A to audit B, for every defense and attack, and what is within noise.

    With one audit, two of its defenses are compared, such as two settings of one.

    Example: gradveil compare runs/before runs/after --out compare.html

    Example: gradveil compare runs/mine --defense prune:ratio=0.9 --defense prune:ratio=0.99
    """
    from gradveil.api import compare

    comparison = compare(a, b, defense or (), across or ())
    if not quiet:
        _show(comparison, every)
    if out is not None:
        page = comparison.save(out)
        if not quiet:
            typer.echo(f"\nPage: {page}")


def _show(comparison: Comparison, every: bool) -> None:
    from gradveil.core.text import plain
    from gradveil.report.comparison import BESIDE, NAMES, WORST
    from gradveil.report.fitted_table import FittedColumn, FittedTable

    console = Console()
    console.print(Text(f"{plain(comparison.scopes[0])}; {comparison.method}", "dim"))
    columns = [FittedColumn("attack"), FittedColumn("metric"), FittedColumn("first", "right")]
    columns += [FittedColumn("second", "right"), FittedColumn("change (95%)", "right", 1), FittedColumn("reading")]
    hidden = 0
    for defense in comparison.defenses:
        console.print()
        console.print(Text(f"{plain(defense.spec)}: {defense.verdict}", "bold"))
        table = FittedTable(columns)
        for row in defense.rows:
            if row.attack not in (WORST, BESIDE) and not (every or row.clear):
                hidden += 1
                continue
            for change in row.changes:
                attack = plain(row.attack) if change is row.changes[0] else ""
                reading = next((Text(change.reading, _STYLES[w]) for w in _STYLES if w in change.reading), change.reading)
                table.add_row(attack, NAMES[change.metric], *change.texts, reading)
        console.print(table if defense.rows else "No attack ran on both sides.")
        for note in defense.notes:
            console.print(Text(f"Warning ({plain(defense.spec)}): {plain(note)}", "yellow"))
    console.print()
    for note in comparison.notes:
        console.print(Text(f"Warning: {plain(note)}", "yellow"))
    console.print(Text(plain(comparison.headline), "bold"))
    if hidden:
        console.print(Text(f"{hidden} more attacks without a clear change: --all shows them.", "dim"))
