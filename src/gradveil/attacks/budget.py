"""How long an attack may work: by budget, and by what one iteration costs on the model at hand."""

from __future__ import annotations

import torch
from torch import nn

from gradveil.attacks.base import Target

_FACTOR = {"quick": 0.5, "standard": 1.0, "thorough": 4.0}
_SMALL = 5e6  # multiply-adds of one image's forward pass up to which an attack gets all its steps


def steps_for(target: Target, steps: int, *, least: int = 200) -> int:
    """`steps` scaled by the budget, and down with the square root of the cost on large nets."""
    cost = forward_cost(target.model.module, target.first.input_shape)
    share = min(1.0, (_SMALL / max(cost, 1.0)) ** 0.5)
    return max(min(least, steps), int(steps * _FACTOR[target.budget] * share))


def forward_cost(module: nn.Module, input_shape: tuple[int, int, int]) -> float:
    """Multiply-adds of the linear and convolutional layers for one image."""
    total = 0.0

    def count(part: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal total
        if isinstance(part, nn.Conv2d):
            total += output[0].numel() * part.weight[0].numel()
        elif isinstance(part, nn.Linear):
            total += part.weight.numel()

    handles = [m.register_forward_hook(count) for m in module.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    try:
        with torch.no_grad():
            module(torch.zeros(2, *input_shape, dtype=next(module.parameters()).dtype))
    finally:
        for handle in handles:
            handle.remove()
    return total
