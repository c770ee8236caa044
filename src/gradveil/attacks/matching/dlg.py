"""DLG, iDLG and CPL: the squared distance of gradients under L-BFGS.

* `dlg` (Zhu et al. 2019): images and soft labels are both unknown and found together.
* `idlg` (Zhao et al. 2020): the label is read from the classifier's gradient first, then only the image is sought.
* `cpl` (Wei et al. 2020): as iDLG, from a tiled random patch, with a term that the image's output be its label.

The public code takes L-BFGS steps of fixed length and often diverges; here every row has a line search, and a victim
that did not converge gets further starts, chosen by the adversary's own residual. Pixels are those of the network's input.
"""

from __future__ import annotations

from pydantic import Field

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.matching.distances import L2
from gradveil.attacks.matching.engine import match_and_choose
from gradveil.attacks.matching.optimizers import LBFGS
from gradveil.attacks.matching.priors import LabelTerm
from gradveil.attacks.matching.problem import Match
from gradveil.attacks.matching.starts import Start
from gradveil.attacks.registry import attack
from gradveil.core.settings import settings


@attack("dlg")
@settings
class DeepLeakage(Attack):
    """Images and labels together by L2 and L-BFGS."""

    steps: int = Field(default=300, ge=1)  # as published
    restarts: int = Field(default=4, ge=1)

    def run(self, target: Target) -> Answer:
        match = Match(L2(), (), LBFGS(history=100), self.steps, Start(), self.restarts, learn_labels=True)
        return match_and_choose(target, match)


@attack("idlg")
@settings
class ImprovedDeepLeakage(Attack):
    """The label first, then the image by L2 and L-BFGS."""

    steps: int = Field(default=300, ge=1)
    restarts: int = Field(default=2, ge=1)

    def run(self, target: Target) -> Answer:
        return match_and_choose(target, Match(L2(), (), LBFGS(history=100), self.steps, Start(), self.restarts))


@attack("cpl")
@settings
class ClientPrivacyLeakage(Attack):
    """iDLG from a tiled patch, with a label term."""

    steps: int = Field(default=300, ge=1)
    label_weight: float = Field(default=0.01, ge=0)  # PRECODE's and its follow-up's reading of α
    restarts: int = Field(default=2, ge=1)

    def run(self, target: Target) -> Answer:
        priors = (LabelTerm(self.label_weight),) if self.label_weight else ()
        match = Match(L2(), priors, LBFGS(history=100), self.steps, Start("patch"), self.restarts)
        return match_and_choose(target, match)
