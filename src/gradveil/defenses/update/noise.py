"""Additive noise on every entry of the update, the oldest baseline.

The published comparisons (DLG, ATS, DCS2, PRECODE) add it without clipping, so it gives no privacy guarantee.
"""

import math

from pydantic import Field

from gradveil.core.settings import settings
from gradveil.core.types import Noise, Tensors
from gradveil.defenses import Defense, Step, defense


@defense("gaussian", random=True)
@settings
class Gaussian(Defense):
    """Add N(0, std²) to every entry.

    Args:
        std: standard deviation. PRECODE: 1e-2 and 1e-3; DCS2: 1e-2 on MNIST.

    Example:
        >>> gv.protect(model, "gaussian:std=1e-3", data=(x, y))
    """

    std: float = Field(default=1e-2, ge=0)

    def added_noise(self, examples: int) -> Noise:
        return Noise(self.std)

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return {name: step.rng.added_normal(g, self.std) for name, g in tensors.items()}


@defense("laplace", random=True)
@settings
class Laplace(Defense):
    """Add Laplace(0, scale) to every entry.

    Args:
        scale: the Laplace scale b; the standard deviation is √2·b. ATS: 1e-3 and 1e-2.

    Example:
        >>> gv.protect(model, "laplace:scale=1e-3", data=(x, y))
    """

    scale: float = Field(default=1e-2, ge=0)

    def added_noise(self, examples: int) -> Noise:
        return Noise(self.scale * math.sqrt(2), "laplace")

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return {name: step.rng.added_laplace(g, self.scale) for name, g in tensors.items()}
