"""What a tune says, as typed models. `tune.json` holds a `TuneSummary`; docs/reference/tune.schema.json is its JSON schema."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

from pydantic import ConfigDict, Field, model_validator

from gradveil.auditing.tuning.bracket import Standing
from gradveil.core.errors import UserError
from gradveil.core.results import Rate, Record, StorableText
from gradveil.storage.run_folder import read_record
from gradveil.summary import DefenseRow, Doubt, NextStep, RejectionCode, Verdict

SCHEMA: Final = 1
FILE, PAGE, FRESH = "tune.json", "tune.html", "fresh"  # of a run's folder; the last is the folder of the fresh victims

# What a standing rests on: the test of the verdict; the line-up where the test cannot tell; or a proof alone.
Basis = Literal["picture", "line-up", "certificate", "nothing"]


class Finding(Record):
    """What one audit says of one setting."""

    verdict: Verdict
    doubts: tuple[Doubt, ...]
    standing: Standing
    basis: Basis
    p: float | None  # of the test
    identified: Rate | None  # private images that could be picked out, by all attacks together
    line_up: Rate | None  # victims that came first in the line-up
    candidates: int | None  # of the line-up

    @classmethod
    def of(cls, row: DefenseRow, standing: Standing, basis: Basis) -> Finding:
        return cls(
            verdict=row.verdict,
            doubts=row.doubts,
            standing=standing,
            basis=basis,
            p=row.test.p if row.test else None,
            identified=row.worst.identified if row.worst else None,
            line_up=row.line_up.identified if row.line_up else None,
            candidates=row.line_up.m if row.line_up else None,
        )


class TriedSetting(Finding):
    """One setting that was audited in the search."""

    spec: StorableText
    family: StorableText  # its name, without settings
    level: float  # its strength, as a power of ten
    promised: float | None  # limit that it proves on a line-up, over the rounds of the training; None: it proves none
    accuracy: float | None  # None, as the next ones: not measured
    loss: float | None  # percent of the undefended accuracy
    low: float | None  # 95% interval of the loss
    high: float | None
    overhead: float | None  # time of a round against the undefended one
    reasons: tuple[RejectionCode, ...]  # all that speaks against it; empty: it may be recommended
    fresh: Finding | None = None  # on fresh victims; None: it was not audited again


class FamilyOutcome(Record):
    """What the search came to for one defense."""

    family: StorableText
    weakest: StorableText | None  # the weakest setting that holds
    leaking: StorableText | None  # the strongest setting that leaks
    text: StorableText


class TuneSummary(Record):
    """The whole of `tune.json`."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    schema_version: Literal[1] = Field(default=SCHEMA, alias="schema")
    gradveil: str
    command: StorableText | None  # None: the search was of Python objects
    scope: StorableText
    max_loss: float  # percent of the undefended accuracy that may be lost
    risk: float | None  # of a line-up that may be left
    releases: int | None  # rounds in which the same image takes part, for which a limit is promised
    control: Finding
    settings: tuple[TriedSetting, ...]  # family by family, the weakest first
    families: tuple[FamilyOutcome, ...]
    frontier: tuple[StorableText, ...]  # the control and settings that nothing tried beats in both leak and cost
    recommended: StorableText | None
    text: StorableText  # the recommendation, or why there is none
    notes: tuple[StorableText, ...]  # what it rests on, and what it does not cover
    next_steps: tuple[NextStep, ...]
    protection: StorableText | None  # the file of the recommended defense, beside this one

    @model_validator(mode="after")
    def _consistent(self) -> TuneSummary:
        best = self.best
        if self.recommended is not None and (
            best is None or best.reasons or best.fresh is None or best.fresh.standing != "holds"
        ):
            raise ValueError("what is recommended held twice, and nothing speaks against it")
        return self

    @property
    def best(self) -> TriedSetting | None:
        return next((setting for setting in self.settings if setting.spec == self.recommended), None)

    @classmethod
    def read(cls, folder: Path) -> TuneSummary:
        """The summary of a finished tune, or one clear line."""
        if not os.path.isfile(folder / FILE):
            raise UserError(f"{folder} has no {FILE}, so it is not a finished tune; `gradveil tune --out DIR` makes one.")
        return read_record(folder / FILE, cls, "run the tune again")
