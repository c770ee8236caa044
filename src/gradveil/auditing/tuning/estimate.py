"""How long a tune may take, before it begins: at most so many settings are audited, priced and audited again."""

from __future__ import annotations

from typing import NamedTuple

from gradveil.auditing.case import Case
from gradveil.auditing.estimate import Estimate
from gradveil.auditing.plan import make_plan
from gradveil.auditing.spec import CONTROL
from gradveil.auditing.tuning.spec import TuneSpec

PRICED = 2  # settings of one defense whose cost is measured


class TuneTime(NamedTuple):
    """CPU seconds of one core, at most."""

    search: float
    cost: float
    fresh: float  # of one setting; up to three are audited again


def expected_time(spec: TuneSpec) -> TuneTime:
    """By the same estimate as `gradveil audit --plan`; of a defense all strengths take about as long."""
    case = Case(spec.settings_to_time(spec.strengths))
    plan = make_plan(case)
    estimate = Estimate(case, plan)
    seconds = {cell: estimate.cell(cell).seconds for cell in plan}
    attacked = sum(time for cell, time in seconds.items() if cell.kind != "utility")
    control = sum(time for cell, time in seconds.items() if cell.kind != "utility" and cell.defense in ("", CONTROL))
    settings = len(case.defenses) - 1
    trained = [time for cell, time in seconds.items() if cell.kind == "utility"]
    priced = PRICED * len(spec.defenses) + 1
    return TuneTime(attacked, sum(trained) / max(1, len(trained)) * priced, control + (attacked - control) / settings)
