"""What all sides of a federation agree on: the model function, its inputs, its outputs and its targets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.core.gradients import ModelFunction
from gradveil.core.types import Shape


@dataclass(frozen=True)
class Task:
    """The model function (with its mode and loss), the input shape, the number of outputs, and the normalisation.

    `mean` and `std` hold one value per channel. Pixels in [0, 1] are normalised by them before they enter the network.
    With `has_classes` false, a target is one row of numbers per image (multi-label, regression).
    """

    model: ModelFunction
    input_shape: Shape
    num_outputs: int
    mean: Tensor
    std: Tensor
    has_classes: bool = True

    def normalize(self, pixels: Tensor) -> Tensor:
        """Pixels (… × C × H × W) as the network takes them."""
        return (pixels - self._per_channel(self.mean, pixels)) / self._per_channel(self.std, pixels)

    def denormalize(self, inputs: Tensor) -> Tensor:
        """Network inputs (… × C × H × W) as pixels; they may lie outside [0, 1]."""
        return inputs * self._per_channel(self.std, inputs) + self._per_channel(self.mean, inputs)

    def with_model(self, model: ModelFunction) -> Task:
        """The same task with another model function."""
        return replace(self, model=model)

    def to(self, device: torch.device, model: ModelFunction) -> Task:
        """The same task on a device, where `model` already is."""
        return replace(self, model=model, mean=self.mean.to(device), std=self.std.to(device))

    @staticmethod
    def _per_channel(values: Tensor, images: Tensor) -> Tensor:
        return values.to(images).view(-1, 1, 1)
