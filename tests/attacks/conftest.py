from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradveil.attacks.base import Target
from gradveil.attacks.matching.optimizers import LBFGS
from gradveil.attacks.matching.problem import NOTHING, Insight, Match, Problem
from gradveil.core.observation import Observation, Sighting


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


def _scaled(observation: Observation, factor: float, dtype: torch.dtype) -> Observation:
    """As if the client had sent `factor` times its update, and the defense had declared its noise and norm alike."""

    def times(sighting: Sighting) -> Sighting:
        tensors = {n: (t.double() * factor).to(dtype) for n, t in sighting.update.tensors.items()}
        return dataclasses.replace(sighting, update=dataclasses.replace(sighting.update, tensors=tensors))

    knowledge = dataclasses.replace(observation.knowledge, norm=observation.knowledge.norm / factor)
    return dataclasses.replace(observation, seen=tuple(times(s) for s in observation.seen), knowledge=knowledge)


@pytest.fixture
def scaled() -> Callable[[Observation, float, torch.dtype], Observation]:
    """`scaled(observation, 1e-20, torch.float32)`."""
    return _scaled
