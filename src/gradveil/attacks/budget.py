"""What an attack costs: how long it may work by its budget, and what one row of its batch takes in memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import nn

from gradveil.attacks.layers import hooked
from gradveil.core.local_training import LocalTraining
from gradveil.core.task import Task
from gradveil.core.types import Shape

Budget = Literal["quick", "standard", "thorough"]
_FACTOR = {"quick": 0.5, "standard": 1.0, "thorough": 4.0}
_SMALL = 5e6  # multiply-adds of one image's forward pass up to which an attack gets all its steps


class Cost(NamedTuple):
    """What one victim costs an attack."""

    iterations: int  # evaluations of an update with its derivative, about; 0 for a closed form
    rows: int = 1  # restarts or candidates of one victim, computed side by side
    limit: int = 0  # iterations of a victim that needs every stage; 0: as above


@dataclass(frozen=True)
class Workload:
    """What the cost of an attack depends on; all of it is known before anything runs."""

    task: Task
    budget: Budget = "standard"
    batch_size: int = 1
    training: LocalTraining = field(default_factory=LocalTraining)
    public_images: int = 0

    def steps(self, steps: int, *, least: int = 200) -> int:
        """`steps` scaled by the budget, and down with the square root of the cost on large nets."""
        share = min(1.0, (_SMALL / max(forward_cost(self.task.model.module, self.task.input_shape), 1.0)) ** 0.5)
        return max(min(least, steps), int(steps * _FACTOR[self.budget] * share))


# Copies of the parameters and of the activations that one row of a matching attack holds at its peak: the update, its
# comparison with the observed one, and the two passes of the second derivative. Measured; larger models need fewer.
_UPDATES, _ACTIVATIONS = 6, 12


def row_bytes(work: Workload) -> int:
    """What one victim (or one of its restarts) takes while its images are matched."""
    model = work.task.model
    parameters = sum(t.numel() for name, t in model.module.named_parameters() if name in model.trainable)
    images = work.batch_size * activations(model.module, work.task.input_shape)
    steps = work.training.number_of_steps(work.batch_size)  # local steps are differentiated through, all of them
    return 4 * steps * (_UPDATES * parameters + _ACTIVATIONS * images)


def activations(module: nn.Module, input_shape: Shape) -> int:
    """Numbers that the layers give out for one image."""
    total = 0

    def count(part: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal total
        if isinstance(output, torch.Tensor):
            total += output.numel()

    leaves = [m for m in module.modules() if not any(m.children())]
    _run_with(count, leaves, module, input_shape)
    return total // 2 + input_shape[0] * input_shape[1] * input_shape[2]


def forward_cost(module: nn.Module, input_shape: Shape) -> float:
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


def _run_with(hook: Callable[..., None], parts: list[nn.Module], module: nn.Module, input_shape: Shape) -> None:
    """Two images through the module, with a hook on some of its parts."""
    with torch.no_grad(), hooked(part.register_forward_hook(hook) for part in parts):
        module(torch.zeros(2, *input_shape, dtype=next(module.parameters()).dtype))
