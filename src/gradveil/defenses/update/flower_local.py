"""Flower's LocalDpMod: the client clips its whole update and adds Gaussian noise."""

import math

from pydantic import Field

from gradveil.core.settings import settings
from gradveil.core.types import Noise, Tensors
from gradveil.defenses import Defense, Step, defense
from gradveil.defenses.update.clip import Clip
from gradveil.defenses.update.noise import Gaussian


@defense("flower-local", random=True)
@settings
class FlowerLocal(Defense):
    """Scale the update down to `clipping_norm`, and add noise of std `sensitivity` · √(2 ln(1.25 / `delta`)) / `epsilon`.

    Flower's `LocalDpMod` with the settings that it has: `clip` and then `gaussian`, with the noise by the classical formula
    (Dwork and Roth 2014) for one round. Whether the noise keeps (`epsilon`, `delta`) depends on `sensitivity`, which Flower
    does not compare with `clipping_norm`: two clipped updates may be 2 · `clipping_norm` apart. `gradveil certify` says
    what the noise promises.

    Args:
        clipping_norm: bound of the L2 norm over all tensors, in units of the update.
        sensitivity: factor of the noise; 0 means no noise.
        epsilon: ε of one round; more is less noise. The formula holds up to 1.
        delta: δ of one round.

    Example:
        >>> gv.protect(model, "flower-local:clipping_norm=1,sensitivity=2,epsilon=8", data=(x, y))
    """

    clipping_norm: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    sensitivity: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    epsilon: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    delta: float = Field(default=1e-5, gt=0, lt=1)

    @property
    def std(self) -> float:
        return self.sensitivity * math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon

    def added_noise(self, examples: int) -> Noise | None:
        return Noise(self.std) if self.std > 0 else None

    def clip_norm(self, examples: int) -> float | None:
        return self.clipping_norm

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return Gaussian(std=self.std).update(Clip(norm=self.clipping_norm).update(tensors, step), step)
