"""NVFlare's PercentilePrivacy: hold small entries back, and cut large ones to a limit."""

import numpy as np
import torch
from pydantic import Field

from gradveil.core.settings import settings
from gradveil.core.types import Tensors
from gradveil.defenses import Defense, Step, defense


@defense("percentile")
@settings
class Percentile(Defense):
    """Set entries below a percentile of all absolute values to zero, and clamp the others to ±`gamma`.

    NVFlare's filter `PercentilePrivacy(percentile=10, gamma=0.01)`, after Shokri and Shmatikov 2015. All tensors are ranked
    together. Parameters that are a single number are ranked too, and leave as they are. It draws nothing and promises
    nothing.

    Args:
        percentile: entries with a smaller absolute value than this percentile become zero.
        gamma: limit of absolute values, in units of the update divided by `steps`: NVFlare means a weight difference, which
            is smaller than a gradient by the learning rate.
        steps: local steps that the client reports (`NUM_STEPS_CURRENT_ROUND`), by which the update is divided before and
            multiplied afterwards. NVFlare takes 1 where the client reports none.

    Example:
        >>> gv.protect(model, "percentile:percentile=10,gamma=0.01", data=(x, y))
    """

    percentile: float = Field(default=10, ge=0, le=100)
    gamma: float = Field(default=0.01, gt=0, allow_inf_nan=False)
    steps: int = Field(default=1, ge=1)

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        sizes = torch.cat([g.detach().abs().flatten().double().cpu() for g in tensors.values()])
        cutoff, limit = float(np.percentile(sizes.numpy(), self.percentile)), self.gamma * self.steps
        return {
            name: g if g.ndim == 0 else g.masked_fill(g.abs() < cutoff, 0).clamp(-limit, limit) for name, g in tensors.items()
        }
