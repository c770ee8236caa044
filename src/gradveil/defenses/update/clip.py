"""Clipping: scale the whole update down to a bounded norm.

It is one half of DP-SGD (Abadi et al. 2016), and many servers require it.
"""

import torch
from pydantic import Field
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.settings import settings
from gradveil.core.types import Tensors
from gradveil.defenses import Defense, Step, defense

NORM = 1.0


@defense("clip", version=2)
@settings
class Clip(Defense):
    """Scale the update so that its L2 norm over all tensors is at most `norm`.

    Args:
        norm: the bound, in units of the update: a weight difference is shorter than a gradient by the learning rate.
        relative: the bound as a share of the update's own norm, in place of `norm`. Every update is scaled by it, whatever
            its size. It bounds nothing, so it cannot be a part of differential privacy.

    Example:
        >>> gv.protect(model, "clip:norm=0.5", data=(x, y))
    """

    norm: float = Field(default=NORM, gt=0)
    relative: float | None = Field(default=None, gt=0, le=1)

    def __post_init__(self) -> None:
        if self.relative is not None and self.norm != NORM:
            raise UserError("clip: set norm or relative, not both.")

    def clip_norm(self, examples: int) -> float | None:
        return self.norm if self.relative is None else None

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        if self.relative is not None:
            return {name: g * self.relative for name, g in tensors.items()}
        scale = (self.norm / length(tensors).clamp_min(1e-12)).clamp_max(1.0)
        return {name: g * scale.to(g) for name, g in tensors.items()}


def length(tensors: Tensors) -> Tensor:
    """The L2 norm of a whole update, in double precision."""
    return torch.stack([(g.double() ** 2).sum() for g in tensors.values()]).sum().sqrt()
