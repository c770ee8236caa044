"""GradInversion (Yin et al. 2021): layer-wise distances, BatchNorm statistics, and agreement between several starts.

The authors' code is not public; the weights are those of the paper as others report them. The paper registers the images
of a group before averaging; here the mean is taken pixel by pixel. On nets without BatchNorm that term is void.
"""

from __future__ import annotations

from pydantic import Field

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.budget import steps_for
from gradveil.attacks.matching.distances import LayerNorms
from gradveil.attacks.matching.engine import match_and_choose
from gradveil.attacks.matching.optimizers import Adam
from gradveil.attacks.matching.priors import TV, BatchNormPrior, GroupPrior, L2Norm
from gradveil.attacks.matching.problem import Match
from gradveil.attacks.registry import attack
from gradveil.core.settings import settings


@attack("gradinversion")
@settings
class GradInversion(Attack):
    """Sum of layer distances + TV + L2 + BatchNorm + group consistency, noisy Adam."""

    steps: int | None = Field(default=None, ge=1)  # published: 20,000; Refiner uses 4,000
    lr: float = Field(default=0.1, gt=0)
    tv: float = Field(default=1e-3, ge=0)
    l2: float = Field(default=1e-6, ge=0)
    batchnorm: float = Field(default=0.1, ge=0)
    group: float = Field(default=0.01, ge=0)
    seeds: int = Field(default=3, ge=1)
    noise: float = Field(default=0.02, ge=0)  # of the learning rate, each step; the paper's 0.2 suits 224 pixels

    def run(self, target: Target) -> Answer:
        priors = (TV(self.tv), L2Norm(self.l2), BatchNormPrior(self.batchnorm), GroupPrior(self.group))
        match = Match(
            LayerNorms(),
            priors,
            Adam(self.lr, noise=self.noise),
            steps=self.steps or steps_for(target, 3_000),
            restarts=self.seeds,
            warmup=50,
        )
        return match_and_choose(target, match)
