"""The six attacks of ATS (Gao et al. 2021, Table 4): two distances more and two optimisers more than Inverting Gradients.

Its public code steps L-BFGS by a fixed 1e-4 and signs the gradients inside it, which hardly moves. Here L-BFGS has a line
search, so these two are stronger than the paper's.
"""

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from gradveil.attacks import Workload, attack
from gradveil.attacks.matching.distances import L1, L2, Cosine
from gradveil.attacks.matching.engine import MatchingAttack
from gradveil.attacks.matching.optimizers import LBFGS, SGD, Adam
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import Match
from gradveil.core.settings import settings


@settings
class _Six(MatchingAttack):
    """What the six share; each has its distance, optimiser and number of steps."""

    published: ClassVar[Match]

    steps: int | None = Field(default=None, ge=1)
    tv: float = Field(default=1e-4, ge=0)
    restarts: int = Field(default=1, ge=1)

    def match(self, work: Workload) -> Match:
        second = isinstance(self.published.optimizer, LBFGS)
        steps = self.published.steps if second else work.steps(self.published.steps)
        prior = TV(self.tv, "smoothed" if second else "absolute")
        return replace(self.published, priors=(prior,), steps=self.steps or steps, restarts=self.restarts)


@attack("adam-cosine", targets="any", version=2)
class AdamCosine(_Six):
    """Cosine, signed Adam: Inverting Gradients with ATS's number of steps.

    Args:
        steps: iterations; by default 4,800 scaled by the budget.
        tv: weight of total variation.
        restarts: starts per victim.
    Example: gradveil audit --attack adam-cosine:steps=1000
    """

    published = Match(Cosine(), optimizer=Adam(0.1, signed=True), steps=4_800, box=True)


@attack("sgd-cosine", targets="any", version=2)
class SGDCosine(_Six):
    """Cosine, signed SGD with Nesterov momentum (0.01 in the public code).

    Args: steps, tv, restarts as for `adam-cosine`.
    Example: gradveil audit --attack sgd-cosine
    """

    published = Match(Cosine(), optimizer=SGD(0.01, signed=True), steps=4_800, box=True)


@attack("adam-l1", targets="any", version=2)
class AdamL1(_Six):
    """L1, signed Adam.

    Args: steps, tv, restarts as for `adam-cosine`.
    Example: gradveil audit --attack adam-l1
    """

    published = Match(L1(), optimizer=Adam(0.1, signed=True), steps=4_800, box=True)


@attack("adam-l2", targets="any", version=2)
class AdamL2(_Six):
    """L2, signed Adam.

    Args: steps, tv, restarts as for `adam-cosine`.
    Example: gradveil audit --attack adam-l2
    """

    published = Match(L2(), optimizer=Adam(0.1, signed=True), steps=4_800, box=True)


@attack("lbfgs-cosine", targets="any", version=2)
class LBFGSCosine(_Six):
    """Cosine, L-BFGS.

    Args: steps (300 by default), tv, restarts as for `adam-cosine`.
    Example: gradveil audit --attack lbfgs-cosine:restarts=4
    """

    published = Match(Cosine(), optimizer=LBFGS(), steps=300)


@attack("lbfgs-l2", targets="any", version=2)
class LBFGSL2(_Six):
    """L2, L-BFGS: DLG's distance with a prior.

    Args: steps (300 by default), tv, restarts as for `adam-cosine`.
    Example: gradveil audit --attack lbfgs-l2
    """

    published = Match(L2(), optimizer=LBFGS(), steps=300)
    tv: float = Field(default=1e-3, ge=0)
