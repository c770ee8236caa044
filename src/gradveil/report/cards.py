"""Result cards: what is claimed of one setting of a defense, what an audit with a standard suite measured, and the evidence.

A card is a JSON file that holds a `Card`. A stored run gives one per defense; all cards together make the page of results.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from markupsafe import Markup
from pydantic import ConfigDict, Field, StringConstraints, model_validator

from gradveil.attacks.suite import suite_named
from gradveil.auditing.spec import CONTROL, AuditSpec, read_spec
from gradveil.certification.line_up import LineUpRisk
from gradveil.core.errors import UserError
from gradveil.core.results import Rate, Record, Statistic
from gradveil.core.text import listing
from gradveil.report.page import page
from gradveil.storage.files import write_text
from gradveil.storage.reading import read_bytes
from gradveil.storage.run_folder import RunFolder, read_record
from gradveil.summary import CANNOT_TELL, DefenseRow, NoticeCode, Summary, Verdict

CARD_SCHEMA: Final = 1
MAX_CARDS = 5000  # in a folder
DAMAGING: tuple[NoticeCode, ...] = ("attacks-failed", "images-failed", "broken-updates")  # the numbers rest on less than all

Line = Annotated[str, StringConstraints(min_length=1, max_length=2000, pattern=r"^[^\x00-\x1f\x7f]+$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class CardPart(Record):
    """A part of a card. Other fields than these are refused."""

    model_config = ConfigDict(extra="forbid")


class CardClaim(CardPart):
    """What is said of the defense elsewhere."""

    text: Line
    by: Line
    source: Line  # where it can be read


class CardCost(CardPart):
    """What the defense costs, where it was measured."""

    cosine: float | None  # between what is sent and the undefended update
    accuracy: float | None = None  # on test images, after training under the defense
    loss: float | None = None  # percent of the undefended accuracy, with its 95% interval
    low: float | None = None
    high: float | None = None
    overhead: float | None = None  # time of a round against the undefended one
    scope: Line | None = None  # how it was trained


class CardNumbers(CardPart):
    """What the audit says. Scores take, for every image, the attack that got most of it."""

    verdict: Verdict
    p: float | None  # of the test behind the verdict
    worst_attack: Line | None  # the single attack that got most; None: no attack ran
    attacks: tuple[Line, ...]  # that ran
    psnr: Statistic | None
    ssim: Statistic | None
    identified: Rate | None
    line_up: LineUpRisk | None  # with the certificate, where the defense has a proof
    cost: CardCost


class CardEvidence(CardPart):
    """Enough to run the audit again, and to know the run that the numbers are from."""

    command: Line  # audits this defense alone, with the suite by its name
    suite: Line
    seed: int
    victims: int = Field(ge=1)
    scope: Line
    data: Line
    model: Line
    gradveil: Line
    python: Line
    packages: dict[str, Line]
    data_sha256: Sha256
    model_sha256: Sha256
    summary_sha256: Sha256  # of the run's summary.json

    @model_validator(mode="after")
    def _consistent(self) -> CardEvidence:
        if (suite := suite_named(self.suite)) is None or suite.name != self.suite:
            raise ValueError(f"no suite is named '{self.suite}'")
        if not self.command.startswith("gradveil audit "):
            raise ValueError("the command is `gradveil audit` with its options")
        return self


class Card(CardPart):
    """One setting of one defense."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    schema_version: Literal[1] = Field(default=CARD_SCHEMA, alias="schema")
    defense: Line
    stage: tuple[Line, ...]
    counters: tuple[Line, ...]  # attacks that are built to break it
    claim: CardClaim | None
    measured: CardNumbers
    external: bool  # the numbers were sent by others, and the project has not run the audit again
    unreliable: Line | None  # why the numbers should not be relied on
    evidence: CardEvidence

    @model_validator(mode="after")
    def _consistent(self) -> Card:
        risk = self.measured.line_up
        if self.unreliable is None and self.measured.verdict == CANNOT_TELL:
            raise ValueError("an audit that cannot tell is unreliable; say why")
        if self.unreliable is None and risk is not None and risk.contradicts:
            raise ValueError("the line-up contradicts the certificate, so the card is unreliable; say why")
        return self

    @classmethod
    def read(cls, file: Path) -> Card:
        """The card in a file, or one clear line."""
        card = read_record(file, cls, "compare it with docs/how-to/submit-a-card.md")
        if file.name != card.file_name:
            raise UserError(f"{file}: a card of this defense, network and data is named {card.file_name}; rename it.")
        return card

    def write(self, folder: Path) -> Path:
        file = folder / self.file_name
        write_text(file, self.model_dump_json(indent=1) + "\n")
        return file

    @property
    def file_name(self) -> str:
        parts = (self.defense, self.evidence.model, self.evidence.data)
        return "--".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-.") for part in parts)[:200] + ".json"


def read_cards(folder: Path) -> list[Card]:
    """All cards of a folder, by defense, network and data."""
    files = sorted(folder.glob("*.json"))
    if len(files) > MAX_CARDS:
        raise UserError(f"{folder}: {len(files):,} cards; at most {MAX_CARDS:,} are read.")
    return [Card.read(file) for file in files]


# -- from a run --------------------------------------------------------------------------------------------------------


def cards_of(
    folder: Path,
    claims: Mapping[str, CardClaim] | None = None,
    *,
    defenses: Sequence[str] = (),
    external: bool = True,
    unreliable: str | None = None,
) -> list[Card]:
    """A card for each defense of a finished run, or for those named. A claim is looked up by spec, then by name."""
    summary, environment = Summary.read(folder), RunFolder(folder).environment
    if summary.command is None or environment is None:
        raise UserError(f"{folder} was made of Python objects; a card needs names, or pkg.mod:Class, to be run again.")
    spec = read_spec(folder / "audit.yaml")
    if spec.suite is None or len(spec.attacks) > 1 or spec.without:
        raise UserError(
            f"{folder} did not run the standard suite alone; a card needs it whole: leave --attack and --without out."
        )
    rows = {row.spec: row for row in summary.defenses}
    if missing := [text for text in defenses if text not in rows]:
        raise UserError(f"{folder} has no defense {missing[0]}; it has {listing(rows)}.")
    digest = hashlib.sha256(read_bytes(folder / "summary.json")).hexdigest()
    cards = []
    for row in (rows[text] for text in defenses or rows):
        evidence = CardEvidence(
            command=_command(spec, row.spec, summary.suite),
            suite=summary.suite,
            seed=summary.case.seed,
            victims=summary.case.victims,
            scope=summary.scope,
            data=summary.case.data,
            model=summary.case.model,
            gradveil=environment.gradveil,
            python=environment.python,
            packages=environment.packages,
            data_sha256=environment.data_sha256,
            model_sha256=environment.model_sha256,
            summary_sha256=digest,
        )
        claim = (claims or {}).get(row.spec) or (claims or {}).get(row.spec.partition(":")[0])
        cards.append(
            Card(
                defense=row.spec,
                stage=row.stage,
                counters=row.counter,
                claim=claim,
                measured=_measured(row),
                external=external,
                unreliable=unreliable or _doubt(row),
                evidence=evidence,
            )
        )
    return cards


def _command(spec: AuditSpec, defense: str, suite: str) -> str:
    """The audit of one defense. Cells do not depend on each other, so its numbers are those of the run."""
    chosen = (CONTROL,) if defense == CONTROL else (CONTROL, defense)
    command = spec.model_copy(update={"defenses": chosen, "attacks": (suite,), "pictures": None}).command()
    assert command is not None  # the run has one
    return command


def _measured(row: DefenseRow) -> CardNumbers:
    worst, best, cost = row.worst, row.best, row.utility
    return CardNumbers(
        verdict=row.verdict,
        p=row.test.p if row.test else None,
        worst_attack=best.spec if best else None,
        attacks=tuple(dict.fromkeys(attack.spec for attack in row.attacks if attack.ok)),
        psnr=worst.psnr if worst else None,
        ssim=worst.ssim if worst else None,
        identified=worst.identified if worst else None,
        line_up=row.line_up,
        cost=CardCost(
            cosine=row.cosine,
            accuracy=row.accuracy,
            loss=row.loss,
            low=cost.low if cost else None,
            high=cost.high if cost else None,
            overhead=row.overhead,
            scope=cost.scope if cost else None,
        ),
    )


def _doubt(row: DefenseRow) -> str | None:
    """Why the numbers of a row cannot be relied on, as far as the audit itself says so."""
    reasons = [f"the audit cannot tell ({code.replace('-', ' ')})" for code in row.doubts]
    reasons += [notice.text.rstrip(".") for notice in row.warnings if notice.code in DAMAGING]
    if row.line_up is not None and row.line_up.contradicts:
        reasons.append("the line-up contradicts the certificate")
    return "; ".join(reasons)[:2000] or None


# -- the page ----------------------------------------------------------------------------------------------------------


def cards_page(cards: Sequence[Card]) -> str:
    """One self-contained page: a table that can be sorted and filtered, and is complete without its script."""
    script = page("cards.js.j2")
    choices: dict[str, list[str]] = {
        "verdict": [card.measured.verdict for card in cards],
        "stage": [stage for card in cards for stage in card.stage],
        "case": [f"{card.evidence.model} on {card.evidence.data}" for card in cards],
        "suite": [card.evidence.suite for card in cards],
    }
    return page(
        "cards.html.j2",
        cards=cards,
        choices={name: sorted(set(values)) for name, values in choices.items()},
        script=Markup(script),  # our own file, without a word of the cards in it
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
