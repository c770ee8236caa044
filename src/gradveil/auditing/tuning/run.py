"""From a tune's settings to its finished folder: search, price, choose, audit again on fresh victims, write.

All audits of the search share one folder, so that no cell is done twice and the same command goes on where it was stopped.
The cells of privacy come first: accuracy, the most expensive, is measured only for settings that hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from gradveil import defenses as defense_methods
from gradveil.auditing.advice import Evidence, advise
from gradveil.auditing.case import Case
from gradveil.auditing.export import export
from gradveil.auditing.fit import CHOSEN, fit
from gradveil.auditing.limits import Execution
from gradveil.auditing.line_up import proved_limit
from gradveil.auditing.progress import Display
from gradveil.auditing.run import FinishedRun, default_folder, run_audit, workers_of
from gradveil.auditing.spec import AuditSpec, written
from gradveil.auditing.strength import Scale
from gradveil.auditing.tuning import choice
from gradveil.auditing.tuning.bracket import Bracket
from gradveil.auditing.tuning.results import FILE, FRESH, FamilyOutcome, Measured, TriedSetting, TuneSummary
from gradveil.auditing.tuning.spec import TuneSpec
from gradveil.auditing.utility import UtilityTraining, rounds_of_an_image
from gradveil.certification.certificate import LINE_UP
from gradveil.core.errors import UserError
from gradveil.core.text import listing, plural
from gradveil.protection import audited
from gradveil.storage.files import write_text
from gradveil.storage.reading import read_yaml
from gradveil.storage.run_folder import RunFolder
from gradveil.summary import NO_LEAK, DefenseRow, NextStep, Recommendation, Rejection, RejectionCode, Summary

SEARCH_SHARE = 0.5  # of --minutes: the rest is for accuracy and the fresh victims


class FinishedTune(NamedTuple):
    """Where a tune is stored, and what it says."""

    folder: Path
    tuned: TuneSummary
    searched: Summary  # of all settings that were tried
    fresh: Summary | None  # of those that were audited again


def run_tune(spec: TuneSpec, execution: Execution | None = None, display: Display | None = None) -> FinishedTune:
    """Find the cheapest setting that survives. What is stored already is used again."""
    tune = _Tune(spec, execution or Execution(), display or Display())
    brackets, left_out = tune.brackets()
    while settings := [text for bracket in brackets if (text := tune.next_of(bracket))]:
        summary = tune.audit(settings).summary
        for bracket in brackets:
            for row in (row for row in summary.defenses if row.spec in settings and _family(row.spec) == bracket.scale.family):
                bracket.record(row.spec, tune.standing(summary, row)[0], row.gradient)
    searched = tune.price(brackets)
    rows = {row.spec: row for row in searched.defenses}
    settings = [tune.setting(bracket, rows[text], searched) for bracket in brackets for text in sorted(bracket.tried, key=bracket.level)]
    settings, fresh = tune.confirm(settings)
    tuned = tune.summary(brackets, left_out, settings, searched, fresh)
    return tune.written(tuned, searched, fresh)


def _family(text: str) -> str:
    scale = Scale.of(defense_methods.parse(text))
    return scale.family if scale else ""


class _Tune:
    """One search with all that its steps share."""

    def __init__(self, spec: TuneSpec, execution: Execution, display: Display):
        self.minutes, self.deadline = execution.minutes, None
        if execution.minutes is not None:
            self.deadline = time.monotonic() + 60 * execution.minutes
        self.case = Case(spec.audit())
        self.execution = replace(execution, minutes=None, out=execution.out or default_folder(self.case))
        self.spec, self.display = self._fitted(spec, display), display
        self.fresh_case = Case(self.spec.fresh())  # refuses at once what has no fresh victims

    @property
    def folder(self) -> Path:
        assert self.execution.out is not None
        return self.execution.out

    # -- the search ----------------------------------------------------------------------------------------------------

    def brackets(self) -> tuple[list[Bracket], list[FamilyOutcome]]:
        """One per defense. With a risk, only defenses that can promise it; for the others the reason stands in words."""
        brackets, left_out = [], []
        for text, scale in zip(map(written, self.spec.defenses), self.spec.scales, strict=True):
            try:
                brackets.append(Bracket(scale, self.spec.strengths, self._least(scale)))
            except UserError as error:
                left_out.append(FamilyOutcome(family=text, weakest=None, leaking=None, text=f"It was left out: {error}"))
        return brackets, left_out

    def _least(self, scale: Scale) -> float | None:
        """The level at which the defense promises the risk; None where none is wanted."""
        if self.spec.risk is None:
            return None
        limit = proved_limit(self.case, scale.defense, self.candidates, self.releases, self.spec.risk)
        now = proved_limit(self.case, scale.defense, self.candidates, self.releases)
        text = scale.at(scale.level + math.log10(limit.noise / now.noise), at_least=True)
        least = Scale.of(defense_methods.parse(text))
        assert least is not None
        return least.level

    @property
    def candidates(self) -> int:
        return self.spec.candidates or LINE_UP

    @cached_property
    def releases(self) -> int:
        """Rounds of the training of the cost in which one image takes part."""
        training, case = self.spec.utility or UtilityTraining(), self.case
        return rounds_of_an_image(training.plan(case.training, self.spec.batch_size, len(case.data.private), self.spec.seed))

    def next_of(self, bracket: Bracket) -> str | None:
        return None if self._late(SEARCH_SHARE) else bracket.next()

    def _late(self, share: float) -> bool:
        """Whether this share of the time is over."""
        return self.minutes is not None and time.monotonic() > (self.deadline or 0.0) - (1 - share) * 60 * self.minutes

    def audit(self, defenses: Sequence[str], **changes: object) -> FinishedRun:
        case = Case(self.spec.audit(defenses=defenses, **changes))
        return run_audit(case, self.execution, self.display, deadline=self.deadline)

    def price(self, brackets: Sequence[Bracket]) -> Summary:
        """All that was tried, with the cost of the weakest settings that hold."""
        tried = [text for bracket in brackets for text in bracket.tried]
        priced = choice.to_price(brackets) if self.spec.utility else []
        case = Case(self.spec.audit(defenses=tried or ["none"], utility=self.spec.utility if priced else None))
        unpriced = {text for text in tried if text not in priced}
        return run_audit(case, self.execution, self.display, deadline=self.deadline, unpriced=unpriced).summary

    # -- the choice ----------------------------------------------------------------------------------------------------

    def standing(self, summary: Summary, row: DefenseRow) -> tuple[choice.Standing, choice.Basis]:
        assert summary.control is not None
        return choice.standing_of(row, summary.control, self.spec.risk)

    def setting(self, bracket: Bracket, row: DefenseRow, summary: Summary) -> TriedSetting:
        standing, basis = self.standing(summary, row)
        utility = row.utility
        return TriedSetting(
            **dict(Measured.of(row, standing, basis)),
            spec=row.spec,
            family=written(bracket.scale.defense),
            level=bracket.level(row.spec),
            promised=self._promised(row.spec),
            accuracy=row.accuracy,
            loss=row.loss,
            low=utility.low if utility else None,
            high=utility.high if utility else None,
            overhead=row.overhead,
            reasons=choice.against(self._evidence(self.spec, summary), row, standing, basis),
        )

    def _promised(self, text: str) -> float | None:
        try:
            return proved_limit(self.case, defense_methods.parse(text), self.candidates, self.releases).upper
        except UserError:  # it has no proof
            return None

    def _evidence(self, spec: AuditSpec, summary: Summary) -> Evidence:
        methods, data = {row.spec: defense_methods.parse(row.spec) for row in summary.defenses}, self.case.data
        chance = 1 / data.num_classes if data.has_classes else None
        unpriced = [row.spec for row in summary.defenses if row.utility is None]
        needed, cost = summary.victims_needed, summary.cost_left_out
        return Evidence(spec, summary.defenses, methods, needed, chance, len(data.private), cost, unpriced)

    def confirm(self, settings: list[TriedSetting]) -> tuple[list[TriedSetting], Summary | None]:
        """The cheapest eligible setting is audited on fresh victims; where it does not hold there, the next one is."""
        fresh, checked = None, list[str]()
        for best in sorted((s for s in settings if not s.reasons), key=lambda s: (s.loss or 0.0, s.overhead or 0.0)):
            if self._late(1.0):
                break
            checked.append(best.spec)
            case = Case(self.spec.fresh(defenses=checked))
            execution = replace(self.execution, out=self.folder / FRESH)
            fresh = run_audit(case, execution, self.display, deadline=self.deadline).summary
            row = next(row for row in fresh.defenses if row.spec == best.spec)
            standing, basis = self.standing(fresh, row)
            codes = choice.against(self._evidence(case.spec, fresh), row, standing, basis)
            failed = bool(set(codes) - choice.OF_THE_COST)
            update: dict[str, object] = {"fresh": Measured.of(row, standing, basis)}
            update |= {"reasons": ("failed-again",)} if failed else {}
            settings = [s.model_copy(update=update) if s is best else s for s in settings]
            if not failed:
                break
        return settings, fresh

    # -- the end -------------------------------------------------------------------------------------------------------

    def summary(
        self,
        brackets: Sequence[Bracket],
        left_out: Sequence[FamilyOutcome],
        settings: list[TriedSetting],
        searched: Summary,
        fresh: Summary | None,
    ) -> TuneSummary:
        rows, control = {row.spec: row for row in searched.defenses}, searched.control
        assert control is not None
        limits = choice.Limits(self.spec.max_loss, self.spec.risk)
        best = next((s for s in settings if s.fresh and not s.reasons), None)
        settings = [_beaten(s, best) for s in settings]
        measured = Measured.of(control, *self.standing(searched, control))
        text = choice.recommendation_text(best, self.spec.victims, limits) if best else choice.none_text(settings, limits)
        return TuneSummary(
            gradveil=searched.gradveil,
            command=self.spec.command(),
            scope=searched.scope,
            max_loss=self.spec.max_loss,
            risk=self.spec.risk,
            releases=self.releases if any(s.promised is not None for s in settings) else None,
            control=measured,
            settings=tuple(settings),
            families=(*(_outcome(bracket, rows) for bracket in brackets), *left_out),
            frontier=choice.frontier(measured, settings),
            recommended=best.spec if best else None,
            text=text,
            notes=tuple(self._notes(settings, measured)),
            next_steps=tuple(self._steps(settings, searched, best)),
            protection=audited.FILE if best else None,
        )

    def _steps(self, settings: Sequence[TriedSetting], searched: Summary, best: TriedSetting | None) -> Iterable[NextStep]:
        """As of every audit, with commands that search again."""
        evidence = self._evidence(self.spec, searched)
        if failed := [s.spec for s in settings if s.reasons == ("failed-again",)]:
            why = f"{listing(failed)} did not hold on fresh victims. On more victims a search is less easily deceived."
            yield NextStep(code="complete-evidence", reason=why, command=evidence.command(victims=2 * self.spec.victims))
        elif best is None or best.basis == "picture":
            yield from advise(evidence).next_steps

    def _notes(self, settings: Sequence[TriedSetting], control: Measured) -> list[str]:
        """What the reader must know beside the recommendation."""
        notes = []
        if any(s.basis in ("line-up", "certificate") for s in settings):
            notes.append(
                "Where the verdict is `cannot tell`, the picture decides nothing: that setting rests on the line-up, and on the "
                "certificate where a risk is promised."
            )
        if any(s.promised is not None for s in settings):
            notes.append(
                f"Proved limits are for {plural(self.releases, 'release')} of one image: as often as it takes part in the training "
                "that measures the cost. They do not count this search, which looked at private data to choose."
            )
        if control.standing == "unknown":
            notes.append("Without a defense neither attacks nor line-up show a leak, so nothing can be told of a defense.")
        return notes

    def written(self, tuned: TuneSummary, searched: Summary, fresh: Summary | None) -> FinishedTune:
        """Write `tune.json`, the recommended protection, and into the search's own summary what the fresh victims showed."""
        settled = searched.model_copy(update={"recommendation": _settled(searched.recommendation, tuned)})
        folder, row = RunFolder(self.folder), None
        folder.finish(Summary.model_validate(settled.model_dump()), 0.0)
        file = self.folder / audited.FILE
        if tuned.recommended and fresh:
            row = next(row for row in fresh.defenses if row.spec == tuned.recommended)
            export(RunFolder(self.folder / FRESH), fresh, row).save(file)
        elif file.exists():
            file.unlink()  # of an earlier tune in this folder, which recommended something
        write_text(self.folder / FILE, tuned.model_dump_json(indent=1) + "\n")
        return FinishedTune(self.folder, tuned, settled, fresh)

    # -- the time ------------------------------------------------------------------------------------------------------

    def _fitted(self, spec: TuneSpec, display: Display) -> TuneSpec:
        """With settings that fit in the minutes: half of them for as many audits as the search may need."""
        if self.minutes is None or self.deadline is None:
            return spec
        stored = self.folder / "audit.yaml"
        before = read_yaml(stored) if stored.is_file() else None
        if isinstance(before, dict):
            chosen = {name: before[name] for name in CHOSEN if name in before}
            display.note(f"--minutes {self.minutes:g}: the {', '.join(CHOSEN)} of {stored} are taken")
        else:
            case = Case(_all_strengths(spec))
            minutes = SEARCH_SHARE * self.minutes
            fitted = fit(case, minutes, max(1, workers_of(case, self.execution)), self.deadline - (1 - SEARCH_SHARE) * 60 * self.minutes)
            display.note(fitted.note)
            chosen = {name: getattr(fitted.case.spec, name) for name in CHOSEN}
        return spec.model_copy(update={name: tuple(v) if isinstance(v, list) else v for name, v in chosen.items()})


def _all_strengths(spec: TuneSpec) -> AuditSpec:
    """An audit of as many settings as the search may try."""
    texts = [scale.at(max(scale.level, 0.1) + step / 2) for scale in spec.scales for step in range(spec.strengths)]
    return spec.audit(defenses=texts)


def _outcome(bracket: Bracket, rows: dict[str, DefenseRow]) -> FamilyOutcome:
    return FamilyOutcome(
        family=written(bracket.scale.defense),
        weakest=bracket.holding[0] if bracket.holding else None,
        leaking=bracket.leaking,
        text=choice.family_text(bracket, rows),
    )


def _beaten(setting: TriedSetting, best: TriedSetting | None) -> TriedSetting:
    """An eligible setting that is not the one to take costs more."""
    if best is None or setting.reasons or setting.spec == best.spec:
        return setting
    return setting.model_copy(update={"reasons": ("costs-more",)})


def _settled(before: Recommendation, tuned: TuneSummary) -> Recommendation:
    """What the search recommends, after the fresh victims had their say."""
    best = tuned.best
    shown = best.spec if best and best.verdict == NO_LEAK else None
    codes: dict[str, tuple[RejectionCode, ...]] = {r.spec: r.reasons for r in before.rejected}
    codes |= {s.spec: s.reasons for s in tuned.settings if s.reasons}
    rejected = tuple(Rejection(spec=s.spec, reasons=codes.get(s.spec, ("failed-again",))) for s in tuned.settings if s.spec != shown)
    return before.model_copy(update={"defense": shown, "rejected": rejected, "next_steps": tuned.next_steps})
