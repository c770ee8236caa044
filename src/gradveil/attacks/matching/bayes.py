"""The Bayes-optimal adversary of Balunović et al. 2022: maximise log p(update | image) + log p(image).

For an update that was noised, the distance is the noise's own likelihood: L2 for Gaussian, L1 for Laplace. The size of
the noise is read from the defense's settings, which are no secret; without noise the likelihood is sharp and L2 remains.
"""

from __future__ import annotations

from typing import Any

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


def likelihood(defense: Any, least: float) -> Distance:
    """The likelihood that a defense's published settings imply."""
    for part in getattr(defense, "parts", ()):
        if getattr(part, "name", "") == "laplace":
            return LaplaceLikelihood(max(part.scale, least))
        if getattr(part, "name", "") == "gaussian":
            return GaussianLikelihood(max(part.std, least))
    return GaussianLikelihood(least)


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
            likelihood(target.knowledge.defense, self.least),
            (TV(self.tv, "squared"), BoxPenalty(1.0)),
            Adam(self.lr),
            steps=self.steps or steps_for(target, 2_000),
            restarts=self.restarts,
        )
        return match_and_choose(target, match)
