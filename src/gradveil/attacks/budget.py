"""How long an attack may work: by budget, and by what one iteration costs on the model at hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gradveil.attacks.base import Target

_FACTOR = {"quick": 0.5, "standard": 1.0, "thorough": 4.0}
_SMALL = 5e6  # multiply-adds of one image's forward pass up to which an attack gets all its steps


def steps_for(target: Target, steps: int, *, least: int = 200) -> int:
    """`steps` scaled by the budget, and down with the square root of the cost on large nets."""
    cost = forward_cost(target.model.module, target.task.input_shape)
    share = min(1.0, (_SMALL / max(cost, 1.0)) ** 0.5)
    return max(min(least, steps), int(steps * _FACTOR[target.budget] * share))


# Copies of the parameters and of the activations that one row of a matching attack holds at its peak: the update, its
# comparison with the seen one, and the two passes of the second derivative. Measured; the larger models need fewer.
_UPDATES, _ACTIVATIONS = 6, 12


def row_bytes(target: Target) -> int:
    """What one victim (or one of its restarts) takes while its images are matched."""
    parameters = sum(t.numel() for t in target.model.parameters(target.state).values())
    images = target.shape[1] * activations(target.model.module, target.task.input_shape)
    steps = len(target.training.slices(target.shape[1]))  # local steps are differentiated through, all of them
    return 4 * steps * (_UPDATES * parameters + _ACTIVATIONS * images)


def rows_at_once(target: Target) -> int | None:
    """How many rows of victims · restarts fit the memory; None where there is no limit."""
    return None if target.memory is None else max(1, target.memory // row_bytes(target))


def activations(module: nn.Module, input_shape: tuple[int, int, int]) -> int:
    """Numbers that the layers give out for one image."""
    total = 0

    def count(part: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal total
        if isinstance(output, torch.Tensor):
            total += output.numel()

    leaves = [m for m in module.modules() if not any(m.children())]
    _run_with(count, leaves, module, input_shape)
    return total // 2 + input_shape[0] * input_shape[1] * input_shape[2]


def forward_cost(module: nn.Module, input_shape: tuple[int, int, int]) -> float:
    """Multiply-adds of the linear and convolutional layers for one image."""
    total = 0.0

    def count(part: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal total
        if isinstance(part, nn.Conv2d):
            total += output[0].numel() * part.weight[0].numel()
        elif isinstance(part, nn.Linear):
            total += part.weight.numel()

    _run_with(count, [m for m in module.modules() if isinstance(m, (nn.Conv2d, nn.Linear))], module, input_shape)
    return total


def _run_with(
    hook: Callable[..., None], parts: list[nn.Module], module: nn.Module, input_shape: tuple[int, int, int]
) -> None:
    """Two images through the module, with a hook on some of its parts."""
    handles = [part.register_forward_hook(hook) for part in parts]
    try:
        with torch.no_grad():
            module(torch.zeros(2, *input_shape, dtype=next(module.parameters()).dtype))
    finally:
        for handle in handles:
            handle.remove()
