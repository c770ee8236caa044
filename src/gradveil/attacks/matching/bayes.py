"""The Bayes-optimal adversary of Balunović et al. 2022: maximise log p(update | image) + log p(image).

For an update that was noised, the distance is the likelihood of the noise: L2 for Gaussian, L1 for Laplace. The defense
declares the size of its noise, which is no secret; without noise the likelihood is sharp and L2 remains. Sizes are shares
of the update's length.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field

from gradveil.attacks import Answer, Target, Workload, attack
from gradveil.attacks.matching.distances import Distance, GaussianLikelihood, LaplaceLikelihood
from gradveil.attacks.matching.engine import MatchingAttack, match_and_choose
from gradveil.attacks.matching.optimizers import Adam
from gradveil.attacks.matching.priors import TV, BoxPenalty
from gradveil.attacks.matching.problem import Match
from gradveil.core.types import Noise


def likelihood(noises: Sequence[Noise | None], least: float) -> Distance:
    """The likelihood of updates (one per row) that carry this noise; `least` is the deviation assumed without any."""
    stds = torch.tensor([0.0 if noise is None else noise.std for noise in noises])
    if noises[0] is not None and noises[0].law == "laplace":
        return LaplaceLikelihood((stds / math.sqrt(2)).clamp_min(least))
    return GaussianLikelihood(stds.clamp_min(least))


@attack("bayes", targets="any", version=4)
class BayesOptimal(MatchingAttack):
    """Likelihood of the noise + a smoothness prior, Adam.

    Args:
        steps: iterations; by default 2,000 scaled by the budget.
        tv, lr: weight of the squared total variation, and learning rate of Adam.
        least: standard deviation assumed where no noise was added, as a share of the update's length.
        restarts: starts per victim.
    Example: gradveil audit --defense gaussian:std=0.01 --attack bayes
    """

    steps: int | None = Field(default=None, ge=1)
    tv: float = Field(default=0.1, ge=0)
    lr: float = Field(default=0.1, gt=0)
    least: float = Field(default=1e-3, gt=0)
    restarts: int = Field(default=1, ge=1)

    def match(self, work: Workload) -> Match:
        priors, steps = (TV(self.tv, "squared"), BoxPenalty(1.0)), self.steps or work.steps(2_000)
        return Match(likelihood([None], self.least), priors, Adam(self.lr), steps, restarts=self.restarts)

    def run(self, target: Target) -> Answer:
        noises = [o.knowledge.noise for o in target.observations for _ in range(self.restarts)]
        distance = likelihood(noises, self.least)
        return match_and_choose(target, replace(self.match(target.workload), distance=distance))
