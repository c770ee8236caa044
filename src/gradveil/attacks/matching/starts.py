"""Where the search for an image begins, in the network's input space."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradveil.attacks.base import Target


@dataclass(frozen=True)
class Start:
    """`normal` (scale · N(0,1)), `uniform` pixels, `grey`, CPL's tiled `patch`, or `images` (victims × B × …, pixels)."""

    kind: Literal["normal", "uniform", "grey", "patch", "images"] = "normal"
    scale: float = 1.0
    images: Tensor | None = None

    def draw(self, target: Target, restarts: int, rng: torch.Generator) -> Tensor:
        """Victims · restarts × B × C × H × W. Starts do not depend on the other victims."""
        victims, *rest = target.shape
        shape = (restarts, *rest)
        if self.kind == "images":
            assert self.images is not None
            return target.normalize(self.images).repeat_interleave(restarts, 0)
        if self.kind == "normal":
            one = self.scale * torch.randn(shape, generator=rng)
        elif self.kind == "uniform":
            one = target.normalize(torch.rand(shape, generator=rng))
        elif self.kind == "grey":
            one = target.normalize(torch.full(shape, 0.5))
        else:
            one = target.normalize(_tiled(shape, rng))
        return one.repeat(victims, 1, 1, 1, 1)


def _tiled(shape: tuple[int, ...], rng: torch.Generator, size: int = 16) -> Tensor:
    *front, height, width = shape
    patch = torch.rand((*front, min(size, height), min(size, width)), generator=rng)
    rows, columns = -(-height // patch.shape[-2]), -(-width // patch.shape[-1])
    return patch.repeat(*(1 for _ in front), rows, columns)[..., :height, :width]
