from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gradveil.attacks.matching import LBFGS, Match, Problem, engine


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> int:
    """Every search ends after so many steps: for what does not depend on how far an attack gets."""
    steps = 2
    second, first = LBFGS.minimize, engine._first_order

    def minimize(self: LBFGS, objective: Any, x: Any, most: int, tick: Any = None) -> Any:
        return second(dataclasses.replace(self, evaluations=2), objective, x, min(most, steps), tick)

    def first_order(problem: Problem, match: Match, x: Any) -> Any:
        return first(problem, dataclasses.replace(match, steps=min(match.steps, steps)), x)

    monkeypatch.setattr(LBFGS, "minimize", minimize)
    monkeypatch.setattr(engine, "_first_order", first_order)
    return steps
