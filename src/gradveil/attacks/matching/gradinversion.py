"""GradInversion (Yin et al. 2021): layer-wise distances, BatchNorm statistics, and agreement between several starts.

The authors' code is not public; the weights are those of the paper as others report them. The paper registers the images
of a group before averaging; here the mean is taken pixel by pixel. On nets without BatchNorm that term is zero; where
clients send its statistics, it has those of their batch.
"""

from pydantic import Field

from gradveil.attacks import Workload, attack
from gradveil.attacks.matching.distances import LayerNorms
from gradveil.attacks.matching.engine import MatchingAttack
from gradveil.attacks.matching.optimizers import Adam
from gradveil.attacks.matching.priors import TV, BatchNormPrior, GroupPrior, L2Norm
from gradveil.attacks.matching.problem import Match


@attack("gradinversion", version=3)
class GradInversion(MatchingAttack):
    """Sum of layer distances + TV + L2 + BatchNorm + group consistency, noisy Adam.

    Args:
        steps: iterations; published 20,000, Refiner uses 4,000; by default 3,000 scaled by the budget.
        lr: learning rate of Adam.
        tv, l2, batchnorm, group: weights of the four priors.
        seeds: starts per victim, pulled towards their mean.
        noise: added to the images at every step, as a share of the learning rate; the paper's 0.2 suits 224 pixels.
    Example: gradveil audit --model resnet20 --attack gradinversion:seeds=5
    """

    steps: int | None = Field(default=None, ge=1)
    lr: float = Field(default=0.1, gt=0)
    tv: float = Field(default=1e-3, ge=0)
    l2: float = Field(default=1e-6, ge=0)
    batchnorm: float = Field(default=0.1, ge=0)
    group: float = Field(default=0.01, ge=0)
    seeds: int = Field(default=3, ge=1)
    noise: float = Field(default=0.02, ge=0)

    def match(self, work: Workload) -> Match:
        priors = (TV(self.tv), L2Norm(self.l2), BatchNormPrior(self.batchnorm), GroupPrior(self.group))
        steps, optimizer = self.steps or work.steps(3_000), Adam(self.lr, noise=self.noise)
        return Match(LayerNorms(), priors, optimizer, steps, restarts=self.seeds, warmup=50)
