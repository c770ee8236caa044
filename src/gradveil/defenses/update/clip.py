"""Clipping: scale the whole update down to a bounded norm. It is one half of DP-SGD, and many servers require it."""

import torch
from pydantic import Field

from gradveil.core.settings import settings
from gradveil.core.types import Tensors
from gradveil.defenses import Defense, Step, defense


@defense("clip")
@settings
class Clip(Defense):
    """Scale the update so that its L2 norm over all tensors is at most `norm`.

    Args:
        norm: the bound.

    Example:
        >>> gv.protect(model, "clip:norm=0.5", data=(x, y))
    """

    norm: float = Field(default=1.0, gt=0)

    def clip_norm(self, examples: int) -> float:
        return self.norm

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        size = torch.stack([(g.double() ** 2).sum() for g in tensors.values()]).sum().sqrt()
        scale = (self.norm / size.clamp_min(1e-12)).clamp_max(1.0)
        return {name: g * scale.to(g) for name, g in tensors.items()}
