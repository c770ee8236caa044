"""The Bayes-optimal adversary of Balunović et al. 2022: maximise log p(update | image) + log p(image).

For an update that was noised, the distance is the noise's own likelihood: L2 for Gaussian, L1 for Laplace. The size of
the noise is read from the defense's settings, which are no secret; without noise the likelihood is sharp and L2 remains.
"""

from __future__ import annotations

import math

from pydantic import Field

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.budget import steps_for
from gradveil.attacks.matching.distances import Distance, GaussianLikelihood, LaplaceLikelihood
from gradveil.attacks.matching.engine import match_and_choose
from gradveil.attacks.matching.optimizers import Adam
from gradveil.attacks.matching.priors import TV, BoxPenalty
from gradveil.attacks.matching.problem import Match
from gradveil.attacks.registry import attack
from gradveil.core.settings import settings
from gradveil.core.types import Noise


def likelihood(noise: Noise | None, least: float) -> Distance:
    """The likelihood of an update that carries this noise; `least` is the standard deviation assumed without any."""
    if noise is not None and noise.law == "laplace":
        return LaplaceLikelihood(max(noise.std / math.sqrt(2), least))
    return GaussianLikelihood(least if noise is None else max(noise.std, least))


@attack("bayes", targets="any")
@settings
class BayesOptimal(Attack):
    """Likelihood of the noise + a smoothness prior, Adam."""

    steps: int | None = Field(default=None, ge=1)
    tv: float = Field(default=0.1, ge=0)
    lr: float = Field(default=0.1, gt=0)
    least: float = Field(default=1e-3, gt=0)  # standard deviation assumed where no noise was added
    restarts: int = Field(default=1, ge=1)

    def run(self, target: Target) -> Answer:
        match = Match(
            likelihood(target.knowledge.noise, self.least),
            (TV(self.tv, "squared"), BoxPenalty(1.0)),
            Adam(self.lr),
            steps=self.steps or steps_for(target, 2_000),
            restarts=self.restarts,
        )
        return match_and_choose(target, match)
