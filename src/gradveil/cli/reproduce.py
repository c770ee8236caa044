"""`gradveil reproduce`: a paper's table, run here, beside the published numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from gradveil.recipes.recipe import Recipe, Scale

Names = Optional[list[str]]  # noqa: UP045 - typer reads it on Python 3.10 too
Folder = Optional[Path]  # noqa: UP045


def command(
    name: Annotated[Names, typer.Argument(help="Recipes, as precode/table1; a paper, as precode; or all.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show every recipe and stop.")] = False,
    scale: Annotated[str, typer.Option(help="cpu: small nets, few images; paper: the published settings.")] = "cpu",
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be done and about how long, and stop.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of all cells; the same command resumes.")] = Path("runs/papers"),
    docs: Annotated[Folder, typer.Option(help="Write the pages of all results in --out there.")] = None,
    device: Annotated[str, typer.Option(help="Where attacks run: cpu, cuda, cuda:1 or mps.")] = "cpu",
    workers: Annotated[int, typer.Option(help="Processes; 0: this one alone.", min=0)] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> int:
    """Run a table or figure of a paper, and say which of its claims hold here.

    Cells are kept in --out and shared by all recipes, so none is computed twice.

    Example: gradveil reproduce precode/table1 --scale cpu --plan
    """
    from rich.console import Console

    from gradveil.auditing.limits import find_device
    from gradveil.auditing.progress import display_on
    from gradveil.auditing.run import Stopped
    from gradveil.core.errors import UserError, unknown
    from gradveil.recipes import pages
    from gradveil.recipes.recipe import SCALES, names
    from gradveil.recipes.run import run_recipe

    if listed:
        for entry, title in names():
            typer.echo(f"{entry:<18} {title}")
        return 0
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES, hint="There are: cpu, paper.")
    find_device(device)
    recipes = _chosen(name or [])
    if not recipes and docs is None:
        raise UserError("name a recipe, a paper or all; `gradveil reproduce --list` shows them.")
    chosen: Scale = "paper" if scale == "paper" else "cpu"
    if plan:
        for recipe in recipes:
            _show_plan(recipe, chosen)
        return 0
    errors, console = Console(stderr=True), Console()

    def say(text: str) -> None:
        if not quiet:
            errors.print(text, highlight=False)

    try:
        for recipe in recipes:
            result = run_recipe(
                recipe,
                chosen,
                out,
                workers=workers,
                device=device,
                display=lambda: display_on(errors, quiet),
                say=say,
            )
            if not quiet:
                console.print("\n".join(pages.section(recipe, result)), markup=False, highlight=False, soft_wrap=True)
    except Stopped as stopped:
        typer.echo(f"gradveil: {stopped}", err=True)
        return 130
    if docs is not None:
        for file in pages.write_pages(out / "results", docs):
            say(f"written: {file}")
    return 0


def _chosen(wanted: list[str]) -> list[Recipe]:
    from gradveil.recipes.recipe import PAPERS, all_names, load

    found: list[str] = []
    for name in wanted:
        if name == "all":
            found += all_names()
        elif name in PAPERS:
            found += [entry for entry in all_names() if entry.startswith(f"{name}/")]
        else:
            found.append(name)
    return [load(name) for name in dict.fromkeys(found)]


def _show_plan(recipe: Recipe, scale: Scale) -> None:
    from rich.console import Console
    from rich.table import Table

    from gradveil.core.text import plural
    from gradveil.recipes.plan import make_plan
    from gradveil.report.words import seconds_text

    lines = make_plan(recipe.at(scale))
    table = Table("work", "cells", "iterations or images", "time", box=None, pad_edge=False)
    for line in lines:
        count = f"{line.iterations:,}" if line.iterations else ""
        table.add_row(line.text, str(line.cells), count, seconds_text(line.seconds))
    console = Console()
    console.print(f"{recipe.name} ({recipe.title}) at scale {scale}", highlight=False)
    console.print(table)
    whole = sum(line.seconds for line in lines)
    console.print(
        f"{plural(sum(line.cells for line in lines), 'cell')}, "
        f"{sum(line.iterations for line in lines):,} iterations or images; "
        f"about {seconds_text(whole)} on one core like this one, an estimate. Cells that other recipes left in --out are "
        "not done again.\n",
        highlight=False,
    )
