"""The six attacks of ATS (Gao et al. 2021, Table 4): two distances more and two optimisers more than Inverting Gradients.

Its public code steps L-BFGS by a fixed 1e-4 and signs the gradients inside it, which hardly moves; here L-BFGS is the
proper one, so these two are stronger than the paper's.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.budget import steps_for
from gradveil.attacks.matching.distances import L1, L2, Cosine, Distance
from gradveil.attacks.matching.engine import match_and_choose
from gradveil.attacks.matching.optimizers import LBFGS, SGD, Adam
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import Match
from gradveil.attacks.registry import attack
from gradveil.core.settings import settings


@settings
class _Six(Attack):
    """What the six share; each names its distance, optimiser and number of steps."""

    distance: ClassVar[Distance]
    optimizer: ClassVar[Adam | SGD | LBFGS]
    published: ClassVar[int] = 4_800

    steps: int | None = Field(default=None, ge=1)
    tv: float = Field(default=1e-4, ge=0)
    restarts: int = Field(default=1, ge=1)

    def run(self, target: Target) -> Answer:
        second = isinstance(self.optimizer, LBFGS)
        steps = self.steps or (self.published if second else steps_for(target, self.published))
        prior = TV(self.tv, "smoothed" if second else "absolute")
        return match_and_choose(
            target, Match(self.distance, (prior,), self.optimizer, steps, restarts=self.restarts, box=not second)
        )


@attack("adam-cosine", targets="any")
@settings
class AdamCosine(_Six):
    """Cosine, signed Adam: Inverting Gradients with ATS's number of steps."""

    distance = Cosine()
    optimizer = Adam(0.1, signed=True)


@attack("sgd-cosine", targets="any")
@settings
class SGDCosine(_Six):
    """Cosine, signed SGD with Nesterov momentum (0.01 in the public code)."""

    distance = Cosine()
    optimizer = SGD(0.01, signed=True)


@attack("adam-l1", targets="any")
@settings
class AdamL1(_Six):
    """L1, signed Adam."""

    distance = L1()
    optimizer = Adam(0.1, signed=True)


@attack("adam-l2", targets="any")
@settings
class AdamL2(_Six):
    """L2, signed Adam."""

    distance = L2()
    optimizer = Adam(0.1, signed=True)


@attack("lbfgs-cosine", targets="any")
@settings
class LBFGSCosine(_Six):
    """Cosine, L-BFGS."""

    distance = Cosine()
    optimizer = LBFGS()
    published = 300


@attack("lbfgs-l2", targets="any")
@settings
class LBFGSL2(_Six):
    """L2, L-BFGS: DLG's distance with a prior."""

    distance = L2()
    optimizer = LBFGS()
    published = 300
    tv: float = Field(default=1e-3, ge=0)
