"""DLG, iDLG and CPL: the squared distance of gradients under L-BFGS.

* `dlg` (Zhu et al. 2019): images and soft labels are both unknown and sought together.
* `idlg` (Zhao et al. 2020): the label is read from the classifier's gradient first, then only the image is sought.
* `cpl` (Wei et al. 2020): as iDLG, from a tiled random patch, with a term that the image's output be its label.

The public code takes L-BFGS steps of fixed length and often diverges. Here every row has a line search, and a victim
gets several starts, chosen by the adversary's own residual. Pixels are those of the network's input.
"""

from typing import Literal

from pydantic import Field

from gradveil.attacks import Workload, attack
from gradveil.attacks.matching.distances import L2
from gradveil.attacks.matching.engine import MatchingAttack
from gradveil.attacks.matching.optimizers import LBFGS, Adam
from gradveil.attacks.matching.priors import TV, LabelTerm
from gradveil.attacks.matching.problem import Match
from gradveil.attacks.matching.starts import Start


@attack("dlg")
class DeepLeakage(MatchingAttack):
    """Images and labels together by L2 and L-BFGS.

    Args:
        steps: iterations of L-BFGS, as published.
        restarts: starts per victim.
    Example: gradveil audit --attack dlg:restarts=8
    """

    steps: int = Field(default=300, ge=1)
    restarts: int = Field(default=4, ge=1)

    def match(self, work: Workload) -> Match:
        return Match(L2(), (), LBFGS(history=100), self.steps, Start(), self.restarts, learn_labels=True)


@attack("idlg", version=2)
class ImprovedDeepLeakage(MatchingAttack):
    """The label first, then the image by L2 and L-BFGS.

    Args: steps, restarts as for `dlg`.
    Example: gradveil audit --attack idlg
    """

    steps: int = Field(default=300, ge=1)
    restarts: int = Field(default=2, ge=1)

    def match(self, work: Workload) -> Match:
        return Match(L2(), (), LBFGS(history=100), self.steps, Start(), self.restarts)


@attack("cpl", version=2)
class ClientPrivacyLeakage(MatchingAttack):
    """iDLG from a tiled patch, with a label term.

    Args:
        label_weight: α of the label term for an update of length 1; PRECODE's 0.01 on a LeNet, where it is about 27.
        steps, restarts: as for `dlg`.
        optimizer: `lbfgs` as published, or `adam` as PRECODE runs it, which found L-BFGS slow and weak: signed steps of
            `lr` from noise, boxed, with total variation 1e-6, and a random model's noise drawn anew at every step.
        lr: step of that Adam.
    Example: gradveil audit --attack cpl:label_weight=0
    """

    steps: int = Field(default=300, ge=1)
    label_weight: float = Field(default=1.4e-5, ge=0)
    restarts: int = Field(default=2, ge=1)
    optimizer: Literal["lbfgs", "adam"] = "lbfgs"
    lr: float = Field(default=0.01, gt=0)

    def match(self, work: Workload) -> Match:
        priors = (LabelTerm(self.label_weight),) if self.label_weight else ()
        if self.optimizer == "lbfgs":
            return Match(L2(), priors, LBFGS(history=100), self.steps, Start("patch"), self.restarts)
        step = Adam(self.lr, signed=True)
        return Match(L2(), (*priors, TV(1e-6)), step, self.steps, Start(), self.restarts, box=True, resample=True)
