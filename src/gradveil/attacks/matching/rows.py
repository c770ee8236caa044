"""The rows of a batched search: victims · restarts, the restarts of one victim side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.attacks.base import Target
from gradveil.core.randomness import generator
from gradveil.core.types import Tensors


@dataclass(frozen=True)
class Rows:
    """All rows of a search, or a selection of them: what a distance or a prior may use about each row."""

    target: Target
    restarts: int
    labels: Tensor  # rows × B class numbers, or rows × B × classes when soft
    noise: Tensors  # the draw of a random model, rows × B × …
    index: Tensor | None = None  # numbers of the selected rows; None: all rows

    @staticmethod
    def of(target: Target, restarts: int = 1) -> Rows:
        noise = {name: draw.repeat_interleave(restarts, 0) for name, draw in _noise(target).items()}
        return Rows(target, restarts, target.labels.repeat_interleave(restarts, 0), noise)

    def redrawn(self, step: int) -> Rows:
        """The same with another draw of a random model, except where the true one was granted."""
        noise = {name: draw.repeat_interleave(self.restarts, 0) for name, draw in _noise(self.target, step).items()}
        return replace(self, noise=noise)

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, index: Tensor | None) -> Rows:
        """A selection; `self` must hold all rows."""
        if index is None:
            return self
        noise = {name: draw[index] for name, draw in self.noise.items()}
        return replace(self, labels=self.labels[index], noise=noise, index=index)

    @property
    def victims(self) -> Tensor:
        """The number of each row's victim."""
        return (torch.arange(len(self)) if self.index is None else self.index) // self.restarts

    def select(self, values: Tensor) -> Tensor:
        """Of values with one entry per row of the search, those of the selected rows."""
        return values if self.index is None else values[self.index]

    def outputs(self, x: Tensor) -> Tensor:
        """The network's outputs for images rows × B × C × H × W, as rows · B × outputs.

        Row by row where the images of a batch change each other's outputs.
        """
        model, state = self.target.model, self.target.state
        if model.couples_images:
            noise = [{name: draw[i] for name, draw in self.noise.items()} for i in range(len(x))]
            return torch.cat([model(state, one, drawn) for one, drawn in zip(x, noise, strict=True)])
        return model(state, x.flatten(0, 1), {name: draw.flatten(0, 1) for name, draw in self.noise.items()})

    def draw(self, shape: Sequence[int]) -> Tensor:
        """N(0, 1), one draw per restart and the same for all victims, so that no result depends on other victims."""
        one = torch.randn((self.restarts, *shape), generator=self.target.rng)
        return one.repeat(len(self) // self.restarts, *(1 for _ in shape))


def _noise(target: Target, step: int | None = None) -> Tensors:
    """The draw of a random model, victims first: the true one where it was granted, otherwise one draw, or that of a step."""
    drawn = target.model.draw_noise(target.shape[1], generator("noise") if step is None else generator("noise", step))
    secrets = [o.knowledge.secrets for o in target.observations]
    return {name: torch.stack([granted.get(name, draw) for granted in secrets]) for name, draw in drawn.items()}
