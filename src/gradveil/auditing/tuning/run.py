"""From a tune's settings to its finished folder: search, price, choose, audit again on fresh victims, write.

All audits of the search share one folder, so that no cell is done twice and the same command goes on where it was stopped.
The cells of privacy come first: accuracy, the most expensive, is measured only for settings that hold. Of a setting that
leaks by the attacks at the head of the suite, which are fast, no others are asked, nor of the control where they get enough.
On fresh victims all are asked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from gradveil import defenses as defense_methods
from gradveil.attacks.suite import Counters
from gradveil.auditing.advice import DP_START, LEAST_BATCHES, LEAST_IMAGES, Evidence, advise, after
from gradveil.auditing.case import Case
from gradveil.auditing.export import export
from gradveil.auditing.fit import CHOSEN, SWIFT, Fitted, fit
from gradveil.auditing.limits import Execution
from gradveil.auditing.line_up import Repeated, proved_limit
from gradveil.auditing.progress import Display
from gradveil.auditing.run import default_folder, run_audit, workers_of
from gradveil.auditing.spec import AuditSpec, written
from gradveil.auditing.stages import Asked
from gradveil.auditing.strength import StrengthScale
from gradveil.auditing.tuning import choice
from gradveil.auditing.tuning.bracket import Bracket, Standing
from gradveil.auditing.tuning.results import FILE, FRESH, Basis, FamilyOutcome, Finding, TriedSetting, TuneSummary
from gradveil.auditing.tuning.spec import TuneSpec
from gradveil.auditing.utility import UtilityTraining, rounds_of_an_image
from gradveil.certification.certificate import CERTAIN, LINE_UP
from gradveil.core.errors import UserError
from gradveil.core.text import listing, plural
from gradveil.defenses.base import Defense
from gradveil.protection import audited
from gradveil.storage.files import write_text
from gradveil.storage.reading import read_yaml
from gradveil.storage.run_folder import RunFolder
from gradveil.summary import NO_LEAK, DefenseRow, NextStep, Recommendation, Rejection, RejectionCode, Summary

SEARCH_SHARE = 0.5  # of --minutes: the rest is for accuracy and the fresh victims
LEAST_STRENGTHS = 2  # of each defense that must fit in the minutes: they may leak and hold


class FinishedTune(NamedTuple):
    """Where a tune is stored, and what it says."""

    folder: Path
    tuned: TuneSummary
    searched: Summary  # of all settings that were tried
    fresh: Summary | None  # of those that were audited again


def run_tune(spec: TuneSpec, execution: Execution | None = None, display: Display | None = None) -> FinishedTune:
    """Find the cheapest setting that survives. What is stored already is used again."""
    tune = _Tune(spec, execution or Execution(), display or Display())
    while True:
        tune.search()
        tune.price()
        if not tune.confirm():
            break
    return tune.written(tune.summary())


def _family(text: str) -> str:
    scale = StrengthScale.of(defense_methods.parse(text))
    return scale.family if scale else ""


class _Tune:
    """One search with all that its steps share."""

    def __init__(self, spec: TuneSpec, execution: Execution, display: Display):
        self.minutes, self.deadline = execution.minutes, None
        if execution.minutes is not None:
            self.deadline = time.monotonic() + 60 * execution.minutes
        Case(spec.audit(utility=spec.utility))  # refuses before the search what could not be trained after it
        self.case = Case(spec.audit())
        self.execution = replace(execution, minutes=None, out=execution.out or default_folder(self.case))
        self.left_out: list[FamilyOutcome] = []  # for lack of time; with a risk, defenses that cannot promise it
        self.spec, self.display = self._fitted(spec, display), display
        Case(self.spec.fresh())  # refuses at once what has no fresh victims
        self.brackets = self._brackets()
        self.settled: Asked = {}  # settings that leak by few attacks, and the control if it does: these attacks
        self.searched: Summary  # of all settings that were tried
        self.fresh: Summary | None = None  # of those that were audited again
        self.again: dict[str, Finding] = {}  # what that audit says of each

    @property
    def folder(self) -> Path:
        assert self.execution.out is not None
        return self.execution.out

    # -- the search ----------------------------------------------------------------------------------------------------

    def _brackets(self) -> list[Bracket]:
        brackets = []
        for scale in self.spec.scales:
            try:
                brackets.append(Bracket(scale, self.spec.strengths, self._least(scale)))
            except UserError as error:
                text = f"It was left out: {error}"
                self.left_out.append(FamilyOutcome(family=scale.name, weakest=None, leaking=None, text=text))
        return brackets

    def search(self) -> None:
        """Audit one strength of each defense at a time, until each is bracketed."""
        while texts := [text for bracket in self.brackets if not self._late(SEARCH_SHARE) and (text := bracket.next())]:
            self.display.note(f"search: {listing(texts)}")
            summary = self._attacked(texts)
            for row in summary.defenses:
                for bracket in self.brackets:
                    if row.spec in texts and _family(row.spec) == bracket.scale.family:
                        bracket.record(row.spec, self._standing(summary, row)[0], row.gradient)

    def _attacked(self, texts: Sequence[str]) -> Summary:
        """The fast attacks first. Of a setting that leaks by them no others are asked, nor of a control that clearly does."""
        case = Case(self.spec.audit(defenses=texts, until_leak=True))
        return run_audit(case, self.execution, self.display, deadline=self.deadline, settled=self.settled).summary

    def _least(self, scale: StrengthScale) -> float | None:
        """The level at which the defense promises the risk; None where none is wanted."""
        if self.spec.risk is None:
            return None
        limit = proved_limit(self.case, scale.defense, self.candidates, self.repeated, self.spec.risk)
        now = proved_limit(self.case, scale.defense, self.candidates, self.repeated)
        text = scale.at(scale.level + math.log10(limit.noise / now.noise), at_least=True)
        least = StrengthScale.of(defense_methods.parse(text))
        assert least is not None
        return least.level

    @property
    def candidates(self) -> int:
        return self.spec.candidates or LINE_UP

    @cached_property
    def repeated(self) -> Repeated:
        """The rounds of the training of the cost in which one image takes part, with its own epochs and batches."""
        training, case = self.spec.utility or UtilityTraining(), self.case
        plan = training.plan(case.training, self.spec.batch_size, len(case.data.private), self.spec.seed)
        images = plan.images_per_client if plan.partition == "iid" else None
        return Repeated(plan.local_training(0), rounds_of_an_image(plan), images)

    @property
    def releases(self) -> int:
        return self.repeated.rounds

    def _late(self, share: float) -> bool:
        """Whether this share of the time is over."""
        return self.minutes is not None and time.monotonic() > (self.deadline or 0.0) - (1 - share) * 60 * self.minutes

    def price(self) -> None:
        """All that was tried, with the cost of the weakest settings that hold."""
        tried = [text for bracket in self.brackets for text in bracket.tried]
        priced = choice.to_price(self.brackets) if self.spec.utility else []
        if priced:
            self.display.note(f"cost in accuracy: {listing(priced)}")
        case = Case(self.spec.audit(defenses=tried or ["none"], utility=self.spec.utility if priced else None))
        unpriced = {text for text in tried if text not in priced}
        self.searched = run_audit(
            case, self.execution, self.display, deadline=self.deadline, unpriced=unpriced, settled=self.settled
        ).summary

    # -- the choice ----------------------------------------------------------------------------------------------------

    def _standing(self, summary: Summary, row: DefenseRow) -> tuple[Standing, Basis]:
        assert summary.control is not None
        return choice.standing_of(row, summary.control, self.spec.risk)

    def _settings(self) -> list[TriedSetting]:
        """All that was tried: family by family, the weakest first."""
        rows = {row.spec: row for row in self.searched.defenses}
        ordered = [(bracket, text) for bracket in self.brackets for text in sorted(bracket.tried, key=bracket.level)]
        return [self._setting(bracket, rows[text]) for bracket, text in ordered]

    def _setting(self, bracket: Bracket, row: DefenseRow) -> TriedSetting:
        standing, basis = self._standing(self.searched, row)
        utility, fresh = row.utility, self.again.get(row.spec)
        reasons = choice.against(self._evidence(self.spec, self.searched), row, standing, basis)
        return TriedSetting(
            **dict(Finding.of(row, standing, basis)),
            spec=row.spec,
            family=bracket.scale.name,
            level=bracket.level(row.spec),
            promised=self._promised(row.spec),
            accuracy=row.accuracy,
            loss=row.loss,
            low=utility.low if utility else None,
            high=utility.high if utility else None,
            overhead=row.overhead,
            reasons=("failed-again",) if standing == "holds" and bracket.is_below_failed(row.spec) else reasons,
            fresh=fresh,
        )

    def _promised(self, text: str) -> float | None:
        try:
            limit = proved_limit(self.case, defense_methods.parse(text), self.candidates, self.repeated).upper
        except UserError:  # it has no proof
            return None
        return limit if limit <= CERTAIN else None

    def _evidence(self, spec: AuditSpec, summary: Summary) -> Evidence:
        methods, data = {row.spec: defense_methods.parse(row.spec) for row in summary.defenses}, self.case.data
        classes = data.num_classes if data.has_classes else None
        unpriced = [row.spec for row in summary.defenses if row.utility is None]
        needed, cost = summary.victims_needed, summary.cost_left_out
        return Evidence(spec, summary.defenses, methods, needed, classes, len(data.private), cost, unpriced)

    def confirm(self) -> bool:
        """Audit the cheapest eligible setting on fresh victims. Whether it did not hold there, so that the search goes on."""
        eligible = sorted((s for s in self._settings() if not s.reasons), key=lambda s: (s.loss or 0.0, s.overhead or 0.0))
        if not eligible or eligible[0].spec in self.again or len(self.again) >= choice.MOST_FRESH or self._late(1.0):
            return False
        best = eligible[0].spec
        self.display.note(f"fresh victims: {best}")
        case = Case(self.spec.fresh(defenses=[*self.again, best]))
        execution = replace(self.execution, out=self.folder / FRESH)
        self.fresh = run_audit(case, execution, self.display).summary  # what has begun is done, whatever the time
        row = next(row for row in self.fresh.defenses if row.spec == best)
        standing, basis = self._standing(self.fresh, row)
        self.again[best] = Finding.of(row, standing, basis)
        codes = choice.against(self._evidence(case.spec, self.fresh), row, standing, basis)
        if not set(codes) - choice.OF_THE_COST:
            return False
        bracket = next(bracket for bracket in self.brackets if best in bracket.tried)
        bracket.fail(best)
        return True

    # -- the end -------------------------------------------------------------------------------------------------------

    def summary(self) -> TuneSummary:
        settings, searched, control = self._settings(), self.searched, self.searched.control
        assert control is not None
        limits = choice.Wanted(self.spec.max_loss, self.spec.risk)
        best = next((s for s in settings if s.fresh and not s.reasons), None)
        settings = [_beaten(s, best) for s in settings]
        measured, by_spec = Finding.of(control, *self._standing(searched, control)), {s.spec: s for s in settings}
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
            families=(*(_outcome(bracket, by_spec) for bracket in self.brackets), *self.left_out),
            frontier=choice.frontier(measured, settings),
            recommended=best.spec if best else None,
            text=text,
            notes=tuple(self._notes(settings, measured, best)),
            next_steps=tuple(self._steps(settings, best)),
            protection=audited.FILE if best else None,
        )

    def _steps(self, settings: Sequence[TriedSetting], best: TriedSetting | None) -> Iterable[NextStep]:
        """As of every audit, with commands that search again."""
        evidence = self._evidence(self.spec, self.searched)
        failed = [s.spec for s in settings if s.fresh and "failed-again" in s.reasons]
        open_ones = [s.spec for s in settings if "not-confirmed" in s.reasons]
        if best is not None:
            yield from after(evidence, next(row for row in self.searched.defenses if row.spec == best.spec))
        elif failed:
            why = f"{listing(failed)} did not hold on fresh victims. On more victims a search is less easily deceived."
            yield NextStep(code="complete-evidence", reason=why, command=evidence.command(victims=2 * self.spec.victims))
        elif open_ones:
            why = f"There was no time to audit {listing(open_ones)} on fresh victims. Without --minutes the command does it."
            yield NextStep(code="more-time", reason=why, command=evidence.spec.command())
        elif settings:
            yield from advise(evidence).next_steps
        elif not self.brackets:
            if not any("dpsgd" in outcome.family for outcome in self.left_out):
                why = "None of these defenses promises a risk; the noise of differential privacy (dpsgd) does."
                yield NextStep(code="differential-privacy", reason=why, command=evidence.command(defenses=[DP_START]))
        else:
            why = "There was no time to audit any setting. Without --minutes the command does it."
            yield NextStep(code="more-time", reason=why, command=evidence.spec.command())

    def _notes(self, settings: Sequence[TriedSetting], control: Finding, best: TriedSetting | None) -> list[str]:
        """What the reader must know beside the recommendation."""
        notes = []
        if best and (note := choice.line_up_note(best)):
            notes.append(note)
        if self.settled:
            notes.append("What leaks was attacked only until that was seen; all attacks together may get more of it.")
        if any(s.basis in ("line-up", "certificate") for s in settings):
            played = self.searched.control is not None and self.searched.control.line_up is not None
            beside = "its certificate, unless the line-up contradicts it" if played else "its certificate alone"
            rests = "the line-up" if self.spec.risk is None else beside
            notes.append(
                "Where the attacks get too little without a defense, the verdict is `cannot tell` and the picture decides "
                f"nothing: such a setting rests on {rests}."
            )
        if any(s.promised is not None for s in settings):
            notes.append(
                f"Proved limits are for a line-up of {self.candidates:,} candidates and {plural(self.releases, 'round')} with "
                "the same image: as often as it takes part in the training that measures the cost. They do not count this "
                "search, which looked at private data to choose."
            )
        if control.standing == "unknown":
            proved = any(s.basis == "certificate" for s in settings)
            told = "only a proof tells anything of a defense" if proved else "nothing can be told of a defense"
            notes.append(f"Without a defense neither attacks nor line-up show a leak, so {told}.")
        return notes

    def written(self, tuned: TuneSummary) -> FinishedTune:
        """Write `tune.json`, the recommended protection, and into the search's own summary what the fresh victims showed."""
        searched, fresh = self.searched, self.fresh
        settled = searched.model_copy(update={"recommendation": _settled(searched.recommendation, tuned)})
        RunFolder(self.folder).finish(Summary.model_validate(settled.model_dump()), 0.0)
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
        """With settings that fit in the minutes: half of them for a short search, which goes on as long as they last."""
        if self.minutes is None or self.deadline is None:
            return spec
        stored = self.folder / "audit.yaml"
        before = read_yaml(stored) if stored.is_file() else None
        if isinstance(before, dict):
            chosen = {name: before[name] for name in CHOSEN if name in before}
            # All that was begun: the stored audit is that of the last defenses whose search was open.
            begun = {_family(cell.defense) for cell in RunFolder(self.folder).cells.values() if cell.defense}
            families = tuple(d for d in spec.defenses if _family(written(d)) in begun) or spec.defenses
            display.note(f"--minutes {self.minutes:g}: the {', '.join(CHOSEN)} of {stored} are taken")
        else:
            families, fitted = self._families_in_time(spec, self.deadline - (1 - SEARCH_SHARE) * 60 * self.minutes)
            display.note(fitted.note)
            chosen = {name: getattr(fitted.case.spec, name) for name in CHOSEN}
        late = [written(family) for family in spec.defenses if family not in families]
        if late:
            display.note(f"left out, as there is no time for all attacks on so many defenses: {listing(late)}")
        self.left_out += [_not_begun(text) for text in late]
        changes = {name: tuple(v) if isinstance(v, list) else v for name, v in chosen.items()}
        return spec.model_copy(update={**changes, "defenses": families})

    def _families_in_time(self, spec: TuneSpec, until: float) -> tuple[tuple[str | Defense, ...], Fitted]:
        """Defenses and settings that fit. Fewer defenses are better than none that can be recommended."""
        assert self.minutes is not None
        families, workers = spec.defenses, max(1, workers_of(self.case, self.execution))
        least_victims = max(LEAST_BATCHES, math.ceil(LEAST_IMAGES / spec.images))  # fewer allow no recommendation
        while True:
            case = Case(spec.model_copy(update={"defenses": families}).settings_to_time(LEAST_STRENGTHS, utility=None))
            needed = {SWIFT, *(name for family in case.defenses.values() for name in Counters.of(family).accepted)}
            try:
                fitted = fit(case, self.minutes, workers, until, least_victims)
                if len(families) == 1 or needed.isdisjoint(set(fitted.case.spec.without) - set(spec.without)):
                    return families, fitted
            except UserError:
                if len(families) == 1:
                    raise
            families = families[:-1]


def _outcome(bracket: Bracket, settings: dict[str, TriedSetting]) -> FamilyOutcome:
    return FamilyOutcome(
        family=bracket.scale.name,
        weakest=bracket.holding[0] if bracket.holding else None,
        leaking=bracket.leaking,
        text=choice.family_text(bracket, settings),
    )


def _not_begun(text: str) -> FamilyOutcome:
    scale = StrengthScale.of(defense_methods.parse(text))
    assert scale is not None
    return FamilyOutcome(family=scale.name, weakest=None, leaking=None, text="It was left out: there was no time.")


def _beaten(setting: TriedSetting, best: TriedSetting | None) -> TriedSetting:
    """An eligible setting that is not the one to take costs more; where none is taken, none was audited again."""
    if setting.reasons or setting is best:
        return setting
    return setting.model_copy(update={"reasons": ("not-confirmed",) if best is None else ("costs-more",)})


def _settled(before: Recommendation, tuned: TuneSummary) -> Recommendation:
    """What the search recommends, after the fresh victims had their say."""
    best = tuned.best
    shown = best.spec if best and best.verdict == NO_LEAK else None
    codes: dict[str, tuple[RejectionCode, ...]] = {r.spec: r.reasons for r in before.rejected}
    codes |= {s.spec: s.reasons for s in tuned.settings if s.reasons}
    rejected = tuple(Rejection(spec=s.spec, reasons=codes[s.spec]) for s in tuned.settings if s.spec != shown)
    return before.model_copy(update={"defense": shown, "rejected": rejected, "next_steps": tuned.next_steps})
