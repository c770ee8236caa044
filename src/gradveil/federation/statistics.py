"""BatchNorm's running statistics in a federation.

Clients train on batch statistics; the server's model is evaluated with running ones. So after its round a client feeds the
same images once more, in mini-batches and at the weights that it sends, and reports mean and variance of every
BatchNorm layer. The server averages them. They leave the client beside the update, and no defense acts on them.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.core.gradients import ModelFunction
from gradveil.core.randomness import Stream
from gradveil.core.types import Tensors

# How far one mini-batch moves a running statistic: torch's default. For FedSGD, where a round is one mini-batch.
MOMENTUM = 0.1


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(m, _BatchNorm) for m in module.modules())


def even_parts(x: Tensor, size: int) -> tuple[Tensor, ...]:
    """`x` in even parts of at least `size` rows: a last part of a single image would have no variance."""
    return x.tensor_split(max(1, len(x) // size))


class RunningStatistics:
    """Measures what BatchNorm layers would hold after one pass; all other layers are in evaluation mode."""

    def __init__(self, module: nn.Module):
        self._model = ModelFunction(module)
        self._names: list[str] = []
        for path, layer in self._model.module.named_modules():
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
                layer.train()
                layer.momentum = None  # a plain average over the mini-batches
                prefix = f"{path}." if path else ""
                self._names += [f"{prefix}running_mean", f"{prefix}running_var", f"{prefix}num_batches_tracked"]

    def measure(self, state: Tensors, inputs: Tensor, batch_size: int, rng: Stream) -> Tensors:
        """Mean and variance of each layer over normalized images (n × C × H × W); empty without BatchNorm."""
        if not self._names:
            return {}
        buffers = {name: torch.zeros_like(state[name]) for name in self._names}
        with torch.no_grad():
            for x in even_parts(inputs, batch_size):
                self._model({**state, **buffers}, x, self._model.draw_noise(len(x), rng))
        return {name: value for name, value in buffers.items() if value.is_floating_point()}
