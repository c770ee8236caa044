"""BatchNorm's running statistics in a federation.

Clients train on batch statistics; the server's model is judged with running ones. So after its round a client passes
what it fed to the network through it once more, in mini-batches and at the weights it sends, and reports mean and
variance of every BatchNorm layer; the server averages them. They leave the client beside the update, and no defense
acts on them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.core.gradients import ModelFunction
from gradveil.core.types import Tensors

# How far one mini-batch moves a running statistic: torch's default. For FedSGD, where a round is one mini-batch.
MOMENTUM = 0.1


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(m, _BatchNorm) for m in module.modules())


def pieces(x: Tensor, size: int) -> tuple[Tensor, ...]:
    """`x` in even pieces of at least `size`: never a last one of a single image, which has no variance."""
    return x.tensor_split(max(1, len(x) // size))


class RunningStatistics:
    """Measures what BatchNorm layers would hold after one pass; all else in the network is in evaluation mode."""

    def __init__(self, module: nn.Module):
        self._function = ModelFunction(module)
        self._names: list[str] = []
        for path, part in self._function.module.named_modules():
            if isinstance(part, _BatchNorm) and part.running_mean is not None:
                part.train()
                part.momentum = None  # a plain average over the mini-batches
                prefix = f"{path}." if path else ""
                self._names += [f"{prefix}running_mean", f"{prefix}running_var", f"{prefix}num_batches_tracked"]

    def measure(self, state: Tensors, x: Tensor, batch_size: int, rng: torch.Generator) -> Tensors:
        """Mean and variance of each layer over `x` (normalised images); empty without BatchNorm."""
        if not self._names:
            return {}
        fresh = {name: torch.zeros_like(state[name]) for name in self._names}
        with torch.no_grad():
            for part in pieces(x, batch_size):
                self._function({**state, **fresh}, part, self._function.draw_noise(len(part), rng))
        return {name: value for name, value in fresh.items() if value.is_floating_point()}
