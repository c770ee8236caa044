"""What an attack costs: how long it may work by its budget, and what one row of its batch takes in memory.

A budget is a number of CPU seconds per victim and search. They are nominal: computed from the network, never measured, so that
an attack takes the same steps on every machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import nn

from gradveil.attacks.layers import hooked
from gradveil.core.kernels import plain_kernels
from gradveil.core.local_training import LocalTraining
from gradveil.core.task import Task
from gradveil.core.types import Shape

Budget = Literal["quick", "standard", "thorough"]
_FACTOR = {"quick": 0.5, "standard": 1.0, "thorough": 4.0}
SECONDS = {"quick": 60.0, "standard": 240.0, "thorough": 2400.0}  # nominal, of one search for one victim
# Nominal seconds of one evaluation of an update with its derivative: per mini-batch, per multiply-add of a forward pass, and
# per number that a layer gives out. Between .6 and 1.5 of the time that ten networks took on one core of a current CPU.
_PER_PASS, _PER_MULTIPLY_ADD, _PER_OUTPUT = 5e-3, 1 / 1.5e9, 5e-8
# The last two of a signed step by differences (`matching/frozen.py`): between .7 and 1.4 of the time that four networks took.
_SIGNED_MULTIPLY_ADD, _SIGNED_OUTPUT = 1 / 9e9, 1e-8
LARGE = 2e7  # multiply-adds of a forward pass from which differences, one victim at a time, are as fast as all victims at once


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

    def steps(self, steps: int, *, least: int = 20, signed: bool = False) -> int:
        """`steps` scaled by the budget, and no more than its CPU seconds allow."""
        allowed = self.signed_evaluations if signed else self.evaluations
        return max(min(least, steps), min(int(steps * _FACTOR[self.budget]), allowed))

    @property
    def evaluations(self) -> int:
        """How often the budget allows to compute an update and its derivative for one victim."""
        return self._evaluations(_PER_MULTIPLY_ADD, _PER_OUTPUT)

    @property
    def signed_evaluations(self) -> int:
        """The same where only the signs of the derivative count."""
        return self._evaluations(_SIGNED_MULTIPLY_ADD, _SIGNED_OUTPUT) if self.allows_differences else self.evaluations

    @property
    def allows_differences(self) -> bool:
        """Whether signed steps are taken by differences: on large nets that send a gradient."""
        model, dropout = self.task.model, nn.modules.dropout._DropoutNd
        if self.training.kind != "gradient":
            return False
        if model.mode == "train" and any(isinstance(m, dropout) for m in model.module.modules()):
            return False  # the second pass would draw again
        return forward_cost(model.module, self.task.input_shape) >= LARGE

    def _evaluations(self, per_multiply_add: float, per_output: float) -> int:
        module, shape = self.task.model.module, self.task.input_shape
        image = forward_cost(module, shape) * per_multiply_add + activations(module, shape) * per_output
        passes, epochs = self.training.number_of_mini_batches(self.batch_size), self.training.epochs
        return int(SECONDS[self.budget] / (passes * _PER_PASS + epochs * self.batch_size * image))


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
    with torch.no_grad(), plain_kernels(), hooked(part.register_forward_hook(hook) for part in parts):
        module(torch.zeros(2, *input_shape, dtype=next(module.parameters()).dtype))
