"""`gradveil check CARD`: the audit of a result card, run again, and whether it agrees."""

import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.progress import display_on
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import CONTROL, AuditSpec, make_spec
from gradveil.cli import audit
from gradveil.cli.options import Quiet, fields_in
from gradveil.core.errors import UserError
from gradveil.core.text import listing, plain
from gradveil.processes.temporary import TemporaryFolder
from gradveil.report.card_check import Agreement, agreements
from gradveil.report.cards import Card, cards_of
from gradveil.report.fitted_table import FittedColumn, FittedTable

_WORDS = {True: Text("yes"), False: Text("no", "bold red"), None: Text("not compared", "dim")}


def command(
    card: Annotated[Path, typer.Argument(help="File of a result card.", metavar="CARD")],
    victims: Annotated[
        int | None, typer.Option(help="Only the first so many: faster, and says less. [all]", metavar="N", min=1)
    ] = None,
    accept: Annotated[
        bool, typer.Option("--accept", help="Where all agrees, mark the card as checked by the project.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Keep the run here; the same command resumes. [a temporary folder]")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes; 0: this one alone. [one per core]", metavar="N", min=0)
    ] = None,
    quiet: Quiet = False,
) -> int:
    """Run the audit of a result card again, and say for each value whether it agrees within its interval.

    Exit code 1 if a value does not agree. Code that the card names (pkg.mod:Class) is imported, as an audit does it.

    Example: gradveil check docs/results/cards/prune-ratio-0.9--lenet--mnist-5k.json --victims 4
    """
    stored = Card.read(card)
    spec = audit_of(stored)
    if victims is not None:
        if accept or victims > spec.victims:
            raise UserError(f"--victims takes at most the {spec.victims} of the card, and --accept needs all of them.")
        spec = spec.model_copy(update={"victims": victims})
    with ExitStack() as stack:
        folder = out or stack.enter_context(TemporaryFolder())
        run = run_audit(Case(spec), Execution(out=folder, workers=workers), display_on(Console(stderr=True), quiet))
        (again,) = cards_of(run.folder, defenses=[stored.defense])
    values = agreements(stored, again)
    if not quiet:
        _show(stored, again, values)
    differing = any(value.agrees is False for value in values)
    if accept and not differing:
        stored.model_copy(update={"external": False}).write(card.parent)
    return int(differing)


def audit_of(card: Card) -> AuditSpec:
    """The audit of a card, from its command. It must say the same as the rest of the card."""
    evidence = card.evidence
    try:
        words = shlex.split(evidence.command)
    except ValueError as error:
        raise UserError(f"the command of the card cannot be read ({str(error).lower()}).") from None
    spec = make_spec(fields_in(audit.command, AuditSpec, words[2:]))
    defenses = (CONTROL,) if card.defense == CONTROL else (CONTROL, card.defense)
    said = {"defense": (spec.defenses, defenses), "attack": (spec.attacks, (evidence.suite,))}
    said |= {name: (getattr(spec, name), getattr(evidence, name)) for name in ("seed", "victims", "data", "model")}
    if wrong := [name for name, (command_value, value) in said.items() if command_value != value]:
        raise UserError(f"the command of the card does not say the same as its other fields: {listing(wrong)}.")
    return spec


def _show(card: Card, again: Card, values: list[Agreement]) -> None:
    console, old, new = Console(), card.evidence, again.evidence
    reduced = "" if new.victims == old.victims else f" Reduced: {new.victims} of {old.victims} victims, so intervals are wide."
    console.print(Text(f"{plain(card.defense)}: {plain(old.scope)}.{reduced}", "dim"))
    versions = {"gradveil": (old.gradveil, new.gradveil), "torch": (old.packages.get("torch"), new.packages.get("torch"))}
    for name, (before, after) in versions.items():
        if before != after:
            console.print(Text(f"Other version of {name}: {before} on the card, {after} here.", "yellow"))
    table = FittedTable([FittedColumn("value"), FittedColumn("card"), FittedColumn("again"), FittedColumn("agrees")])
    for value in values:
        table.add_row(value.value, value.card, value.again, _WORDS[value.agrees])
    console.print()
    console.print(table)
    console.print()
    compared = [value for value in values if value.agrees is not None]
    wrong = [value.value for value in compared if not value.agrees]
    text = (
        f"Does not agree with the card: {listing(wrong)}." if wrong else f"All {len(compared)} values that were compared agree."
    )
    console.print(Text(text, "bold"))
