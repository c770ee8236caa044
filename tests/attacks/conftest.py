from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gradveil.attacks.base import Target
from gradveil.attacks.matching.optimizers import LBFGS
from gradveil.attacks.matching.problem import NOTHING, Insight, Match, Problem


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> int:
    """Every search ends after so many steps: for what does not depend on how far an attack gets."""
    steps = 2
    minimum, build = LBFGS.minimize, Problem.__init__

    def minimize(self: LBFGS, objective: Any, x: Any, most: int, tick: Any = None) -> Any:
        return minimum(dataclasses.replace(self, evaluations=2), objective, x, min(most, steps), tick)

    def init(self: Problem, target: Target, match: Match, insight: Insight = NOTHING) -> None:
        build(self, target, dataclasses.replace(match, steps=min(match.steps, steps)), insight)

    monkeypatch.setattr(LBFGS, "minimize", minimize)
    monkeypatch.setattr(Problem, "__init__", init)
    return steps
