"""`gradveil card RUN`: what a stored audit measured, as result cards that others can check."""

from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli.options import Quiet
from gradveil.core.errors import UserError
from gradveil.core.text import plain


def command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished audit with the standard suite.", metavar="RUN")],
    defense: Annotated[list[str] | None, typer.Option(help="Only this one; repeat. [all]")] = None,
    claim: Annotated[str | None, typer.Option(help="What is claimed of the defense, with its numbers.")] = None,
    by: Annotated[str | None, typer.Option(help="Who claims it.")] = None,
    source: Annotated[str | None, typer.Option(help="Where the claim can be read.")] = None,
    unreliable: Annotated[str | None, typer.Option(help="Why the numbers should not be relied on.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the cards.")] = Path("cards"),
    quiet: Quiet = False,
) -> None:
    """Write a result card for each defense of a stored audit: claim, measurements, and the evidence to run it again.

    The cards are marked `external` until the project has run their audits again.

    Example: gradveil card runs/mine --defense prune:ratio=0.9 --out cards
    """
    from gradveil.report.cards import CardClaim, cards_of
    from gradveil.storage.files import check_replaceable

    stated = [text for text in (claim, by, source) if text is not None]
    if len(stated) not in (0, 3) or (stated and len(defense or ()) != 1):
        raise UserError("a claim needs --claim, --by and --source, and one --defense that it is about.")
    cards = cards_of(run, defenses=defense or (), unreliable=unreliable)
    if claim and by and source:
        cards = [card.model_copy(update={"claim": CardClaim(text=claim, by=by, source=source)}) for card in cards]
    for card in cards:
        check_replaceable(out / card.file_name, '"summary_sha256"')
    for card in cards:
        file = card.write(out)
        if not quiet:
            typer.echo(plain(f"{file}: {card.defense}, {card.measured.verdict}"))
