"""`gradveil report RUN`: the table and the page of a stored run, made anew."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished audit.", metavar="RUN")],
    pictures: Annotated[str, typer.Option(help="In the page: none, blurred or shown.")] = "blurred",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Write the page of a stored run again, and print its table."""
    from gradveil.report import print_summary, write_report
    from gradveil.report.tune_report import write_tune_page
    from gradveil.summary import Summary

    summary = Summary.read(run)
    page = write_report(run, pictures)
    write_tune_page(run, summary)
    if not quiet:
        print_summary(summary, Console())
        typer.echo(f"\nReport: {page}")
