"""What a search looks for: the images alone, or the images together with their labels. Optimisers see rows of numbers."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gradveil.attacks.matching import dense, frozen
from gradveil.attacks.matching.optimizers import Objective
from gradveil.attacks.matching.problem import ImageMap, Problem
from gradveil.attacks.matching.rows import Rows


class ImagesOnly:
    """The images alone: a row of unknowns is B × C × H × W."""

    def __init__(self, problem: Problem):
        self.problem = problem

    def begin(self, x: Tensor) -> Tensor:
        """Rows of unknowns for rows of start images."""
        return x

    def __call__(self, z: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.problem(z, index)

    def quick(self, *, signed: bool) -> Objective:
        """The objective of first-order steps: a faster route where it has agreed with the exact one."""
        return dense.objective(self.problem) or frozen.objective(self.problem, signed=signed)

    def images(self, z: Tensor) -> Tensor:
        return z

    def labels(self, z: Tensor) -> Tensor:
        """Rows × B class numbers, or rows × B × classes when soft."""
        return self.problem.rows.labels

    def change_images(self, z: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        return change(z)


class MappedImages(ImagesOnly):
    """The images alone, by other coordinates than pixels."""

    def __init__(self, problem: Problem, coordinates: ImageMap):
        super().__init__(problem)
        self.coordinates = coordinates

    def begin(self, x: Tensor) -> Tensor:
        return self.coordinates.of_images(x)

    def __call__(self, z: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        value, gradient = self.problem(self.images(z), index)
        return value, self.coordinates.slope(gradient)

    def quick(self, *, signed: bool) -> Objective:
        return self

    def images(self, z: Tensor) -> Tensor:
        return self.coordinates.images(z)

    def change_images(self, z: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        return self.begin(change(self.images(z)))


class ImagesAndLabels(ImagesOnly):
    """Images and label logits: a row of unknowns is one vector, pixels first."""

    def begin(self, x: Tensor) -> Tensor:
        rows, task = self.problem.rows, self.problem.target.task
        self.shape, self.pixels = x.shape[1:], x[0].numel()
        logits = rows.draw((rows.labels.shape[1], task.num_outputs))
        self.label_shape = logits.shape[1:]
        return torch.cat([x.flatten(1), logits.flatten(1)], 1)

    def __call__(self, z: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        def value(z: Tensor, rows: Rows) -> Tensor:
            return self.problem.value(self.images(z), replace(rows, labels=self.labels(z)))

        return self.problem.differentiate(value, z, index)

    def quick(self, *, signed: bool) -> Objective:
        return self

    def images(self, z: Tensor) -> Tensor:
        return z[:, : self.pixels].view(len(z), *self.shape)

    def labels(self, z: Tensor) -> Tensor:
        return z[:, self.pixels :].view(len(z), *self.label_shape).softmax(-1)

    def change_images(self, z: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([change(self.images(z)).flatten(1), z[:, self.pixels :]], 1)
