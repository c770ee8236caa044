"""`gradveil report RUN`: the table and the page of a stored run made anew, its PDF, and whether page and run agree."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field
from rich.console import Console

from gradveil.cli.options import Quiet
from gradveil.core.settings import settings

DISAGREE = 2  # exit code


@settings
class CoverNames:
    """Who audited what, for the first page."""

    organisation: str | None = Field(default=None, description="For the first page: who is responsible for the system.")
    auditor: str | None = Field(default=None, description="For the first page: who audited.")
    system: str | None = Field(default=None, description="For the first page: what the model is trained for.")
    system_version: str | None = Field(default=None, description="For the first page: its version.")
    about: Path | None = Field(default=None, description="YAML or JSON file with these names; options replace them.")


def command(
    names: CoverNames,
    run: Annotated[Path, typer.Argument(help="Folder of a finished audit.", metavar="RUN")],
    file: Annotated[Path | None, typer.Argument(help="With --pdf: its file. [report.pdf in RUN]", metavar="[FILE]")] = None,
    *,
    pdf: Annotated[bool, typer.Option("--pdf", help="Print the page to a PDF by the browser at hand.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Only say whether page and run agree; exit code 2 if not.")] = False,
    pictures: Annotated[str | None, typer.Option(help="In the page: none, blurred or shown. [as the audit had it]")] = None,
    quiet: Quiet = False,
) -> int:
    """Write the page of a stored run again, and print its table.

    Names for the first page are kept in the run's folder.

    Example: gradveil report runs/mine --organisation 'City Hospital' --auditor 'A. Lee' --pdf
    """
    from gradveil.core.errors import UserError
    from gradveil.report import print_summary, write_report
    from gradveil.report.about import About
    from gradveil.report.pdf import check_pdf, write_pdf
    from gradveil.report.tune_report import write_tune_page
    from gradveil.summary import Summary

    if verify:
        return _verify(run, quiet)
    if file is not None and not pdf:
        raise UserError(f"{file}: a file is named only with --pdf; the page is always RUN/report.html.")
    summary, target = Summary.read(run), file or run / "report.pdf"
    if pdf:
        check_pdf(target)
    stored = About.of_run(run)
    if (stated := stored.changed(names.about, {name: getattr(names, name) for name in About.model_fields})) != stored:
        stated.store(run)
    page = write_report(run, pictures)
    write_tune_page(run, summary)
    problem = write_pdf(page, target) if pdf else None
    if not quiet:
        print_summary(summary, Console())
        typer.echo(f"\nReport: {page}")
        if pdf and problem is None:
            typer.echo(f"PDF: {target}")
    if problem is not None:
        typer.echo(f"gradveil: no PDF was written: {problem}. {page} is ready for print (A4) in any browser.", err=True)
    return 0


def _verify(run: Path, quiet: bool) -> int:
    from gradveil.core.text import plain
    from gradveil.report.evidence import disagreement, evidence_hash
    from gradveil.report.html import render
    from gradveil.storage.run_folder import RunFolder
    from gradveil.summary import Summary

    Summary.read(run)  # a folder without a finished run is an error of its own
    folder = RunFolder(run)
    if (difference := disagreement(folder, render)) is not None:
        typer.echo(plain(f"gradveil: page and run do not agree: {difference}."), err=True)
        return DISAGREE
    if not quiet:
        typer.echo(f"Page and run agree. SHA-256 of the evidence: {evidence_hash(folder)}")
    return 0
