"""Additive noise on every entry of the update, the oldest baseline.

The published comparisons (DLG, ATS, DCS2, PRECODE) add it without clipping, so it gives no privacy guarantee. They add it to
every gradient (`at=gradient`); who trains locally and sends weight differences adds it to those (`at=update`). Of a
single gradient both are the same.
"""

import math

from pydantic import Field

from gradveil.core.errors import UserError
from gradveil.core.settings import settings
from gradveil.core.types import Noise, Tensors
from gradveil.defenses import Step, defense
from gradveil.defenses.update.clip import length
from gradveil.defenses.update.place import AtOnePlace, Place

STD = SCALE = 1e-2


@defense("gaussian", random=True, version=2)
@settings
class Gaussian(AtOnePlace):
    """Add N(0, std²) to every entry.

    Zhu et al. 2019 (DLG) try it against leakage.

    Args:
        std: standard deviation, in units of the update. PRECODE: 1e-2 and 1e-3; DCS2: 1e-2 on MNIST.
        relative: in place of `std`, a share of the update's own size: the standard deviation is `relative` times the root
            mean square of all entries of the update, so 1 is noise as long as the update. It depends on private data, so it
            can never give differential privacy.
        at: `update` adds it once to what is sent; `gradient` adds it to the gradient of every local step, as the papers do.

    Example:
        >>> gv.protect(model, "gaussian:std=1e-3", data=(x, y))
    """

    std: float = Field(default=STD, ge=0)
    relative: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    at: Place = "update"

    def __post_init__(self) -> None:
        if self.relative is not None and self.std != STD:
            raise UserError("gaussian: set std or relative, not both.")

    def added_noise(self, examples: int) -> Noise:
        return Noise(self.std) if self.relative is None else Noise(self.relative, relative=True)

    def act(self, tensors: Tensors, step: Step) -> Tensors:
        std = self.std if self.relative is None else self.relative * root_mean_square(tensors)
        return {name: step.rng.added_normal(g, std) for name, g in tensors.items()}


@defense("laplace", random=True, version=2)
@settings
class Laplace(AtOnePlace):
    """Add Laplace(0, scale) to every entry.

    Zhu et al. 2019 (DLG) try it against leakage.

    Args:
        scale: the Laplace scale b, in units of the update; the standard deviation is √2·b. ATS: 1e-3 and 1e-2.
        relative: in place of `scale`, a share of the update's own size: the standard deviation is `relative` times the root
            mean square of all entries, as in `gaussian`. It can never give differential privacy.
        at: `update` or `gradient`, as in `gaussian`.

    Example:
        >>> gv.protect(model, "laplace:scale=1e-3", data=(x, y))
    """

    scale: float = Field(default=SCALE, ge=0)
    relative: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    at: Place = "update"

    def __post_init__(self) -> None:
        if self.relative is not None and self.scale != SCALE:
            raise UserError("laplace: set scale or relative, not both.")

    def added_noise(self, examples: int) -> Noise:
        if self.relative is not None:
            return Noise(self.relative, "laplace", relative=True)
        return Noise(self.scale * math.sqrt(2), "laplace")

    def act(self, tensors: Tensors, step: Step) -> Tensors:
        scale = self.scale if self.relative is None else self.relative * root_mean_square(tensors) / math.sqrt(2)
        return {name: step.rng.added_laplace(g, scale) for name, g in tensors.items()}


def root_mean_square(tensors: Tensors) -> float:
    """Of all entries of an update: its norm divided by the square root of their number."""
    return float(length(tensors)) / math.sqrt(sum(g.numel() for g in tensors.values()))
