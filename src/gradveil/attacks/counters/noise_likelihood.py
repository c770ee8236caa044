"""Against additive noise: average what can be averaged, and let the noise's known size choose the prior's weight.

Repeated updates of one batch on one model are averaged first: the noise falls with the square root of their number.
Then one image is sought for each of several TV weights. A weak prior fits the noise, a strong one blurs; of the candidates
the adversary keeps the smoothest whose misfit is no larger than the noise itself explains (Morozov's discrepancy principle).
So the strongest prior comes first, and a victim whose update it explains needs no other. It needs no truth, only the defense's
settings. What was clipped before the noise was added has an unknown size, which the match leaves open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.matching.distances import L2, Cosine
from gradveil.attacks.matching.engine import solve
from gradveil.attacks.matching.optimizers import Adam
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import NOTHING, Insight, Match, Problem, residual
from gradveil.core.loops import is_sampled
from gradveil.core.observation import Observation, Sighting
from gradveil.core.types import Noise, Update
from gradveil.defenses.gradient.dpsgd import DpSgd
from gradveil.defenses.gradient.graddefense import GradDefense
from gradveil.defenses.update.flower_local import FlowerLocal
from gradveil.defenses.update.noise import Gaussian, Laplace

WEIGHTS = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1)
EXPLAINED = 1.02  # misfit, as a share of what the noise leaves, up to which an image explains an update
NOISY = 0.75  # share of noise in an update from which on the strongest prior is expected to explain it; at .5 it did not
LEAST_STEPS = 20  # of each search, whatever the budget


class _Candidates(NamedTuple):
    """Images of victims × priors, what they leave unexplained, and the steps that were taken."""

    x: Tensor
    misfit: Tensor
    iterations: int


@attack("noise-likelihood", against=(Gaussian, Laplace, DpSgd, GradDefense, FlowerLocal), targets="any", version=3)
class NoiseLikelihood(Attack):
    """Average, match by cosine under several priors, choose by the noise's size.

    Args: steps: iterations of signed Adam; by default 1,500 scaled by the budget.
    Example: gradveil audit --defense gaussian:std=0.01 --updates 4 --attack noise-likelihood
    """

    steps: int | None = Field(default=None, ge=1)

    def cost(self, work: Workload) -> Cost:
        allowed = max(LEAST_STEPS, work.signed_evaluations // len(WEIGHTS))
        return Cost(self.steps or min(work.steps(1_500, signed=True), allowed), rows=len(WEIGHTS))

    def applies(self, observation: Observation) -> str | None:
        return None if observation.knowledge.noise else "the defense adds no noise of known size"

    def run(self, target: Target) -> Answer:
        averaged = target.about([self.average(o) for o in target.observations], target.labels)
        insight = self.insight(target)
        expected = torch.tensor([self.expected_misfit(o) for o in target.observations])
        best = self._search(averaged, insight, WEIGHTS[-1:])
        # Cut short, a search explains nothing yet.
        explained = expected >= NOISY if is_sampled() else best.misfit[:, 0] <= EXPLAINED * expected
        x, score, iterations = best.x[:, 0], best.misfit[:, 0], best.iterations
        rows = (~explained).nonzero().flatten().tolist()
        if rows:
            more = self._search(averaged.subset(rows, "weaker priors"), insight.subset(rows), WEIGHTS[:-1])
            misfit = torch.cat([more.misfit, best.misfit[rows]], 1)
            pick = _smoothest(misfit, expected[rows])
            each = torch.arange(len(rows))
            x[rows], score[rows] = torch.cat([more.x, best.x[rows]], 1)[each, pick], misfit[each, pick]
            iterations += more.iterations
        return Answer(x, score, iterations=iterations)

    def _search(self, target: Target, insight: Insight, weights: Sequence[float]) -> _Candidates:
        """One image per victim and prior."""
        priors, steps = (TV(torch.tensor(weights).repeat(target.shape[0])),), self.cost(target.workload).iterations
        match = Match(Cosine(), priors, Adam(0.1, signed=True), steps, restarts=len(weights), box=True)
        solution = solve(Problem(target, match, insight))
        misfit = residual(target, solution.x, L2(), insight)
        shape = (-1, len(weights))
        return _Candidates(solution.x.unflatten(0, shape), misfit.unflatten(0, shape), solution.iterations)

    def average(self, observation: Observation) -> Observation:
        """All updates of one batch on one model as one."""
        return average(observation)

    def insight(self, target: Target) -> Insight:
        """Which entries count, and how much."""
        return NOTHING

    def expected_misfit(self, observation: Observation) -> float:
        """The squared distance that the noise alone leaves."""
        return expected_misfit(observation)


def expected_misfit(observation: Observation) -> float:
    """The squared distance that the declared noise alone leaves, after averaging."""
    noise, updates = observation.knowledge.noise or Noise(0.0), same_state(observation)
    return sum(t.numel() for t in updates[0].update.tensors.values()) * noise.std**2 / len(updates)


def _smoothest(misfit: Tensor, expected: Tensor) -> Tensor:
    """Of each row the last (strongest prior) within the noise; if none is, the one that fits best."""
    fits = misfit <= EXPLAINED * expected[:, None]
    last = misfit.shape[1] - 1 - fits.flip(1).float().argmax(1)
    return torch.where(fits.any(1), last, misfit.argmin(1))


def same_state(observation: Observation) -> list[Sighting]:
    """The updates of the first batch on the first model."""
    first = observation.seen[0]
    return [s for s in observation.seen if s.state is first.state and s.group == first.group]


def average(observation: Observation) -> Observation:
    """The mean of all updates of one batch on one model, as one sighting."""
    same = same_state(observation)
    names = same[0].update.tensors
    mean = {n: torch.stack([s.update.tensors[n] for s in same]).mean(0) for n in names}
    update = Update(mean, same[0].update.kind, same[0].update.examples)
    return replace(observation, seen=(replace(same[0], update=update),))
