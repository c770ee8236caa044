"""Inverting Gradients (Geiping et al. 2020): cosine distance, total variation, Adam on the sign of the gradient, a box.

`paper` picks the settings another paper used for the same attack; what differs is in the table below. Any of them can be
overridden by name.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import nn

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.budget import steps_for
from gradveil.attacks.matching.distances import Cosine
from gradveil.attacks.matching.engine import match_and_choose
from gradveil.attacks.matching.optimizers import Adam
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import Match
from gradveil.attacks.registry import attack
from gradveil.core.settings import settings


@settings
class Variant:
    """One paper's settings of the attack."""

    steps: int
    tv: float = 1e-4
    lr: float = 0.1
    signed: bool = True
    boxed: bool = True
    patience: int | None = None


VARIANTS = {
    "gradveil": Variant(4_000),  # fewer steps suffice on small nets; on smooth ones unsigned and unboxed, see below
    "geiping": Variant(24_000),
    "loda": Variant(5_000),
    "ats": Variant(4_800),
    "dcs2": Variant(10_000, signed=False, boxed=False),
    "precode": Variant(7_000, tv=1e-6, lr=0.01, patience=1_200),
    "refiner": Variant(4_000, lr=0.01),
    "balunovic": Variant(2_000, tv=1e-5),
}


@attack("ig", targets="any")
@settings
class InvertingGradients(Attack):
    """Cosine distance + total variation, signed Adam, boxed."""

    paper: Literal["gradveil", "geiping", "loda", "ats", "dcs2", "precode", "refiner", "balunovic"] = "gradveil"
    steps: int | None = Field(default=None, ge=1)
    tv: float | None = Field(default=None, ge=0)
    lr: float | None = Field(default=None, gt=0)
    signed: bool | None = None
    boxed: bool | None = None
    restarts: int = Field(default=1, ge=1)

    def run(self, target: Target) -> Answer:
        published = VARIANTS[self.paper]

        # Signs help against kinks (ReLU, max-pool). On smooth nets they cost 12 dB: 37 against 49 on LeNet, 24 digits.
        smooth = self.paper == "gradveil" and _smooth(target.model.module)

        def setting(name: str) -> object:
            own = getattr(self, name)
            if own is None and smooth and name in ("signed", "boxed"):
                return False
            return getattr(published, name) if own is None else own

        match = Match(
            distance=Cosine(),
            priors=(TV(float(setting("tv"))),),  # type: ignore[arg-type]
            optimizer=Adam(float(setting("lr")), signed=bool(setting("signed"))),  # type: ignore[arg-type]
            steps=self.steps or (steps_for(target, published.steps) if self.paper == "gradveil" else published.steps),
            restarts=self.restarts,
            box=bool(setting("boxed")),
            patience=published.patience,
        )
        return match_and_choose(target, match)


def _smooth(module: nn.Module) -> bool:
    """Whether all the activations that the model shows are smooth ones."""
    parts = list(module.modules())
    kinked = any(isinstance(m, (nn.ReLU, nn.LeakyReLU, nn.MaxPool2d, nn.AdaptiveMaxPool2d)) for m in parts)
    return not kinked and any(
        isinstance(m, (nn.Sigmoid, nn.Tanh, nn.Softplus, nn.GELU, nn.SiLU, nn.ELU)) for m in parts
    )
