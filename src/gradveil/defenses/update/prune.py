"""Gradient pruning: send only the largest entries."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradveil.core.settings import settings
from gradveil.core.types import Tensors
from gradveil.defenses import Step, defense
from gradveil.defenses.update.place import AtOnePlace, Place


@defense("prune")
@settings
class Prune(AtOnePlace):
    """Set the smallest entries to zero; at least one entry of every tensor stays.

    Zhu et al. 2019 (DLG) propose it against leakage; Lin et al. 2017 use it to save traffic. All published code prunes
    every tensor separately, biases and norms included, so this is the default.

    Args:
        ratio: share of entries that become zero. LODA Table 1: 0.9 and 0.99.
        scope: `tensor` ranks the entries of each tensor separately, `global` those of all tensors together.
        at: `update` prunes once what is sent; `gradient` prunes the gradient of every local step, as the papers do.

    Example:
        >>> gv.protect(model, "prune:ratio=0.99", data=(x, y))
    """

    ratio: float = Field(default=0.9, ge=0, lt=1)
    scope: Literal["tensor", "global"] = "tensor"
    at: Place = "update"

    def act(self, tensors: Tensors, step: Step) -> Tensors:
        if self.scope == "global":
            cut = _cut(torch.cat([g.abs().flatten() for g in tensors.values()]), self.ratio)
            return {name: g.masked_fill(g.abs() < cut, 0) for name, g in tensors.items()}
        return {name: g.masked_fill(g.abs() < _cut(g.abs().flatten(), self.ratio), 0) for name, g in tensors.items()}


def _cut(sizes: Tensor, ratio: float) -> Tensor:
    """The smallest absolute value that stays."""
    dropped = min(int(ratio * sizes.numel()), sizes.numel() - 1)
    return sizes.kthvalue(dropped + 1).values
