"""`gradveil reproduce`: a paper's table, run here, beside the published numbers."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import Field

from gradveil.cli import loading
from gradveil.cli.layout import hanging
from gradveil.cli.list import print_kind
from gradveil.cli.options import Quiet
from gradveil.core.errors import UserError
from gradveil.core.settings import settings
from gradveil.core.text import plural

if TYPE_CHECKING:
    from rich.console import Console

    from gradveil.recipes import Recipe, Scale  # which load torch
    from gradveil.recipes.result import RecipeResult


@settings
class Reproduction:
    """At which scale recipes run, and where."""

    scale: Literal["cpu", "paper"] = Field(default="cpu", description="cpu (small), or paper (its settings).")
    out: Path = Field(default=Path("runs/papers"), description="Folder of all cells; resumes.")
    docs: Path | None = Field(default=None, description="Keep results and write the pages of all there.")
    minutes: float | None = Field(default=None, gt=0, description="Begin no recipe after so long; the same command goes on.")
    device: str = Field(default="cpu", description="cpu, cuda, cuda:1 or mps.")
    workers: int = Field(default=0, ge=0, description="Processes; 0: this one alone.")


def command(
    name: Annotated[list[str] | None, typer.Argument(help="Recipes (precode/table1), papers (precode), or all.")] = None,
    *,
    reproduction: Reproduction,
    listed: Annotated[bool, typer.Option("--list", help="Show every recipe with its time and data, and stop.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Show the work and an estimate, and stop.")] = False,
    quiet: Quiet = False,
) -> int:
    """Run a table or figure of a paper, and say which of its claims hold here.

    Cells are kept in --out and shared by all recipes, so none is computed twice, and a stopped run goes on.

    Example: gradveil reproduce precode/table1 --scale cpu --plan
    """
    if listed:
        print_kind("recipes")
        return 0
    with loading("reproduce", quiet):
        from rich.console import Console

        from gradveil.auditing.limits import find_device
        from gradveil.auditing.progress import display_on
        from gradveil.auditing.run import Stopped
        from gradveil.recipes import pages
        from gradveil.recipes.run import run_recipe

    find_device(reproduction.device)
    recipes = _chosen(name or [])
    if not recipes and reproduction.docs is None:
        raise UserError("name a recipe, a paper or all; `gradveil reproduce --list` shows them.")
    if plan:
        for recipe in recipes:
            _show_plan(recipe, reproduction.scale)
        return 0
    errors, console, began = Console(stderr=True), Console(), time.monotonic()

    def say(text: str) -> None:
        if not quiet:
            errors.print(text, highlight=False)

    try:
        for done, recipe in enumerate(recipes):
            if reproduction.minutes is not None and time.monotonic() - began > 60 * reproduction.minutes:
                say(f"{done} of {plural(len(recipes), 'recipe')} in {reproduction.minutes:g} min; the same command goes on.")
                break
            result = run_recipe(
                recipe,
                reproduction.scale,
                reproduction.out,
                workers=reproduction.workers,
                device=reproduction.device,
                display=lambda: display_on(errors, quiet),
                say=say,
            )
            if not quiet:
                show_result(recipe, result, console)
    except Stopped as stopped:
        typer.echo(f"gradveil: {stopped}", err=True)
        return 130
    if reproduction.docs is not None:
        for file in pages.write_pages(reproduction.out / "results", reproduction.docs):
            say(f"written: {file}")
    return 0


def _chosen(wanted: list[str]) -> "list[Recipe]":
    from gradveil.recipes.recipe import PAPERS, all_names, load

    chosen: list[str] = []
    for name in wanted:
        if name == "all":
            chosen += all_names()
        elif name in PAPERS:
            chosen += [entry for entry in all_names() if entry.startswith(f"{name}/")]
        else:
            chosen.append(name)
    return [load(name) for name in dict.fromkeys(chosen)]


def show_result(recipe: "Recipe", result: "RecipeResult", console: "Console") -> None:
    """The table beside the published one, and what became of the claims."""
    from gradveil.recipes.pages import NOT_RUN, entry_text, printed_text, scaled_down
    from gradveil.report.fitted_table import FittedColumn, FittedTable
    from gradveil.report.words import seconds_text

    typer.echo("\n" + hanging("", f"{recipe.name}: {recipe.title}, at scale {result.scale}") + "\n")
    numbers = [FittedColumn("here", "right"), *([FittedColumn("published", "right")] if recipe.published else [])]
    table = FittedTable([FittedColumn("row"), FittedColumn("column"), *numbers])
    for row in recipe.rows:
        for number, column in enumerate(recipe.columns):
            published = [printed_text(recipe.published[row][number])] if recipe.published else []
            table.add_row("" if number else row, column, entry_text(result.rows.get(row, {}).get(column, NOT_RUN)), *published)
        table.add_section()
    console.print(table)
    typer.echo()
    if result.claims:
        claims = FittedTable([FittedColumn("claim"), FittedColumn("here"), FittedColumn("figures", left_out=1)])
        for claim in result.claims:
            claims.add_row(claim.claim, claim.verdict, claim.figures)
        console.print(claims)
        typer.echo()
    notes = {"Published": " ".join(recipe.source.split()), "Note": " ".join((recipe.comment or "").split())}
    notes["Scaled down"] = "; ".join(scaled_down(recipe)) if result.scale == "cpu" else ""
    notes["Work in all its cells"] = seconds_text(result.seconds)
    for title, text in notes.items():
        if text:
            typer.echo(hanging(f"{title}: ", text))


def _show_plan(recipe: "Recipe", scale: "Scale") -> None:
    from rich.console import Console

    from gradveil.recipes.plan import make_plan
    from gradveil.report.fitted_table import FittedColumn, FittedTable
    from gradveil.report.words import seconds_text

    lines = make_plan(recipe.at(scale))
    numbers = [FittedColumn(name, "right") for name in ("cells", "iterations or images", "time")]
    table = FittedTable([FittedColumn("work"), *numbers])
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
