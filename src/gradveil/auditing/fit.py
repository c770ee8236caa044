"""The best audit that fits in a number of minutes: settings are chosen before it begins, and written down like any others.

What does not fit is left out in this order: a larger budget; the measurement of the accuracy; attacks of the suite that are
neither among its first nor `swift` nor counters of a defense; victims, as long as enough are left for a verdict; the line-up;
counters; `swift`. Of attacks the longest goes first. The control, every defense, the first attacks of the suite (closed
forms and the inversion of features, which are fast) and attacks that were named stay. If that is still too long, as many
steps as fit of one search take the place of all others: of `features` where it applies to the control, else of `ig`. The
line-up comes back where it leaves room for the shortest such search, since it says more than a longer one does, and then the
accuracy where it leaves room for a long one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gradveil.attacks.suite import Counters
from gradveil.auditing.case import Case
from gradveil.auditing.estimate import CellTime, Estimate, wall_seconds
from gradveil.auditing.plan import Cell, cost_of, expected_power, make_plan
from gradveil.auditing.progress import clock_text
from gradveil.auditing.spec import CONTROL, written
from gradveil.core.errors import UserError
from gradveil.core.text import plural

RESERVE = 0.25  # share of the time that is kept for what takes longer than expected
BUSY = 1.3  # seconds on the clock per CPU second, from which the user is told that other work slows the audit down
START = 10.0  # seconds until the workers are ready, and for the summary
LEAST_VICTIMS = 4
LOWER = {"thorough": "standard", "standard": "quick"}
SWIFT, FEATURES = "swift", "features"
# Steps of what replaces them: beyond the least the line-up comes first, beyond enough the accuracy.
LEAST_STEPS, ENOUGH_STEPS, MOST_STEPS = 10, 200, 1_000
CHOSEN = ("attacks", "victims", "budget", "without", "line_up")  # settings of an audit


@dataclass(frozen=True)
class Settings:
    """What is chosen."""

    victims: int
    without: frozenset[str] = frozenset()
    utility: bool = True
    line_up: bool = True
    steps: int = 0  # iterations of a short search, in place of longer ones


class Fit:
    """The time of one audit under other settings, by one estimate of all its cells."""

    def __init__(self, case: Case, workers: int, least_victims: int = LEAST_VICTIMS):
        wall, cpu = time.monotonic(), time.process_time()
        self.case, self.workers, self.cells = case, workers, make_plan(case).cells
        self.least_victims = least_victims
        estimate = Estimate(case, self.cells)
        self.times = {cell.key: estimate.cell(cell) for cell in self.cells}
        # A core that others use too gives less than a CPU second per second. A short time tells nothing.
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
        self.slowness = max(1.0, wall / cpu) if cpu > 1 else 1.0

    def seconds(self, settings: Settings) -> float:
        """On the clock, until all cells are done."""
        share = settings.victims / self.case.spec.victims
        kept = [cell for cell in self.cells if self._kept(cell, settings)]
        seconds = {cell.key: self.times[cell.key].for_share(share) * self.slowness for cell in kept}
        return START + wall_seconds(kept, seconds, self.workers) + settings.steps * self._seconds_per_step(settings)

    def _seconds_per_step(self, settings: Settings) -> float:
        """On the clock: of one iteration of the short search under every defense."""
        share, total = settings.victims / self.case.spec.victims, 0.0
        for cell in self.cells:
            if cell.attack == self.shortened and self.times[cell.key].reason is None:
                cost = cost_of(self.case, cell)
                rows = cost.rows if self.shortened == SWIFT else 1  # `ig` has one, `features` as many as before
                total += self.times[cell.key].for_share(share) / max(1, cost.iterations * rows)
        return total * self.slowness / self.workers

    @property
    def shortened(self) -> str:
        """The attack of the suite in whose place a shorter search comes."""
        return FEATURES if self.applies(FEATURES) else SWIFT

    def short_search(self, steps: int) -> str:
        """A step of the inversion of features takes a third of an iteration, see its `cost`."""
        return f"features:steps={3 * steps},matching=0" if self.shortened == FEATURES else f"ig:steps={steps}"

    @staticmethod
    def _kept(cell: Cell, settings: Settings) -> bool:
        left_out = {"utility": not settings.utility, "line-up": not settings.line_up}
        return cell.attack not in settings.without and not left_out.get(cell.kind, False)

    def attacks(self, wanted: Callable[[str], bool]) -> list[str]:
        """Those of the suite that are wanted, by the time that they take under all defenses, the longest first.

        One that applies nowhere takes no time, and is not left out.
        """
        named = {written(attack) for attack in self.case.spec.attacks}
        attacked = [cell for cell in self.cells if cell.kind == "attack"]
        total = {cell.attack: 0.0 for cell in attacked if self.times[cell.key].reason is None}
        for cell in attacked:
            if cell.attack in total:
                total[cell.attack] += self.times[cell.key].seconds
        return sorted((name for name in total if name not in named and wanted(name)), key=lambda name: -total[name])

    def applies(self, attack: str) -> bool:
        """Whether it runs on the control."""
        times: list[CellTime] = [self.times[c.key] for c in self.cells if (c.defense, c.attack) == (CONTROL, attack)]
        return any(time.reason is None for time in times)

    def choose(self, limit: float) -> Settings | float:
        """Settings within the limit; where there are none, the seconds of the smallest audit that was tried."""
        chosen = self._first_within(limit)
        if isinstance(chosen, float):
            return chosen
        chosen = self._richer(chosen, replace(chosen, line_up=True), LEAST_STEPS, limit)
        return self._richer(chosen, replace(chosen, utility=True), ENOUGH_STEPS, limit)

    def _richer(self, plain: Settings, richer: Settings, steps: int, limit: float) -> Settings:
        """The richer settings with as many steps of a short search as fit, if so many do; else the plain ones."""
        richer = replace(richer, steps=min(richer.steps, steps))
        if self.seconds(richer) > limit:
            return plain
        return replace(richer, steps=self._steps_within(limit, richer)) if richer.steps else richer

    def _first_within(self, limit: float) -> Settings | float:
        case = self.case
        counters = {name for defense in case.defenses.values() for name in Counters.of(defense).accepted}
        first = set(case.spec.suite.first) if case.spec.suite else set[str]()
        last = {SWIFT} if any(map(self.applies, first)) else set[str]()
        settings = Settings(case.spec.victims)
        for change in (
            *(["utility"] if case.spec.utility else []),
            *self.attacks(lambda name: name not in counters | first | {SWIFT}),
            *(range(case.spec.victims - 1, self._least_victims() - 1, -1)),
            *(["line_up"] if case.spec.candidates else []),
            *self.attacks(lambda name: name in counters - first),
            *self.attacks(lambda name: name in last),
        ):
            if self.seconds(settings) <= limit:
                return settings
            if isinstance(change, int):
                settings = replace(settings, victims=change)
            elif change == "utility":
                settings = replace(settings, utility=False)
            elif change == "line_up":
                settings = replace(settings, line_up=False)
            else:
                settings = replace(settings, without=settings.without | {change})
        if self.seconds(settings) <= limit:
            return settings
        shorter = replace(settings, without=settings.without | set(self.attacks(lambda name: name in (SWIFT, self.shortened))))
        least = self.seconds(replace(shorter, steps=LEAST_STEPS))
        replaced = self.shortened in shorter.without and (self.shortened == FEATURES or SWIFT not in last)
        if not replaced or not self._seconds_per_step(shorter):
            return self.seconds(settings)
        if least > limit:
            return least
        return replace(shorter, steps=self._steps_within(limit, shorter))

    def _steps_within(self, limit: float, settings: Settings) -> int:
        rest = limit - self.seconds(replace(settings, steps=0))
        return min(MOST_STEPS, int(rest / self._seconds_per_step(settings)))

    def _least_victims(self) -> int:
        """As many as were asked for, and as a verdict needs: to see a leak of half of the images."""
        needed = {v.share: v.victims for v in expected_power(self.case)[1]}
        return min(self.case.spec.victims, max(self.least_victims, needed.get(0.5) or 0))


@dataclass(frozen=True)
class Fitted:
    """An audit that fits."""

    case: Case
    note: str  # what was chosen
    left_out: dict[str, float] = field(default_factory=dict)  # kinds of cells, and CPU seconds of each kind


def fit(case: Case, minutes: float, workers: int, deadline: float, least_victims: int = LEAST_VICTIMS) -> Fitted:
    """The case with settings that fit before the deadline (of `time.monotonic`)."""
    asked = case.spec
    while True:
        tried = Fit(case, workers, least_victims)
        chosen = tried.choose((deadline - time.monotonic()) * (1 - RESERVE))
        if isinstance(chosen, Settings) and (case.spec.budget == "quick" or chosen == Settings(case.spec.victims)):
            break
        if (lower := LOWER.get(case.spec.budget)) is None:
            assert not isinstance(chosen, Settings)
            planned = 60 * minutes - (deadline - time.monotonic())
            needed = math.ceil((planned + chosen / (1 - RESERVE)) / 60)
            load = f", as other work slows this machine down {tried.slowness:.1f} times" if tried.slowness > BUSY else ""
            raise UserError(f"--minutes {minutes:g} is too little: the smallest useful audit takes about {needed}{load}.")
        case = Case(case.spec.model_copy(update={"budget": lower}))
    kept = [text for text in sorted(chosen.without) if text not in asked.without]
    changes: dict[str, object] = {"victims": chosen.victims, "without": (*asked.without, *kept)}
    if not chosen.line_up:
        changes["line_up"] = 0
    if chosen.steps:
        changes["attacks"] = (*asked.attacks, tried.short_search(chosen.steps))
    cost = sum(tried.times[cell.key].seconds for cell in tried.cells if cell.kind == "utility")
    left_out = {} if chosen.utility else {"utility": cost}
    left = kept if chosen.line_up else [*kept, "the line-up"]
    left = [*left, *(f"the accuracy ({clock_text(seconds)} of one core)" for seconds in left_out.values())]
    left += [f"budget {asked.budget}"] if case.spec.budget != asked.budget else []
    victims = f"{chosen.victims} of {plural(asked.victims, 'victim')}"
    text = f"--minutes {minutes:g}: {victims}, budget {case.spec.budget}; left out: {', '.join(left) or 'nothing'}; "
    text += f"{tried.short_search(chosen.steps)} in place of {tried.shortened}; " if chosen.steps else ""
    text += f"expected to take {clock_text(tried.seconds(chosen))}"
    same = case.spec.model_copy(update=changes) == case.spec
    return Fitted(case if same else Case(case.spec.model_copy(update=changes)), text, left_out)
