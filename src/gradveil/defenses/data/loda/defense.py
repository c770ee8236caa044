"""LODA, learning to obscure data (Wan et al. 2022): train on images that a network takes for yours and people do not.

Each private image x* is replaced, once, by the x' that minimises ‖g(x') − g(x*)‖² − c ‖x' − x*‖² in [0, 1]: near to
it in the features g of a public network, far from it in pixels. x' starts as a random public image and takes 500 steps
of gradient descent of length 0.1. Sums run over all values of all chosen layers. Labels stay.

The larger c, the nearer x' comes to the negative of x*, which is far in pixels and hides nothing: look at |correlation|
and identification, not at PSNR alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradveil.core.errors import unknown
from gradveil.core.progress import Progress
from gradveil.core.randomness import generator
from gradveil.core.settings import settings
from gradveil.core.types import Batch
from gradveil.defenses.base import Defense, Setup, Step
from gradveil.defenses.data.loda.extractors import Extractor, extractor
from gradveil.defenses.registry import defense

BATCH = 128  # images obscured together; each takes its own steps, so this changes rounding only
PAIRS = 256  # of public images, to measure the extractor's scale


@dataclass(frozen=True)
class Memory:
    """What obscuring needs, and what an adversary who knows the public images can have too."""

    extractor: Extractor
    layers: tuple[str, ...]
    c: float  # weight of the squared pixel distance beside the summed squared feature distances
    public: Tensor | None  # where starts are drawn from; None: uniform noise

    def features(self, x: Tensor) -> list[Tensor]:
        return self.extractor(x, self.layers)

    def starts(self, shape: Sequence[int], rng: torch.Generator) -> Tensor:
        if self.public is None:
            return torch.rand(*shape, generator=rng)
        return self.public[torch.randint(len(self.public), (shape[0],), generator=rng)]


@defense("loda", counters=["loda-stationarity"], random=True)
@settings
class Loda(Defense):
    """Replace each image by one of like features and unlike pixels.

    Variants choose the layers. The paper's extractor, ResNet18, has 20 convolutions: loda1 takes the first five, loda2
    all, loda3 the last five and the linear part; here the first quarter, all, the last quarter with what follows.
    Secret: `start`, the image each obscured one began as.
    """

    variant: Literal["loda1", "loda2", "loda3"] = "loda3"  # hides best for its accuracy (benchmarks/loda_tradeoff.py)
    layers: tuple[str, ...] = ()  # by name instead: conv2/conv4/pooled
    c: float = Field(default=0.03, ge=0)  # absolute in the paper: 20, 30 and 1 for the three variants
    relative: bool = True  # c in units of feature over pixel distance between public images; false: absolute
    extractor: Literal["auto", "trained", "alexnet", "vgg16"] = "auto"
    steps: int = Field(default=500, ge=1)
    lr: float = Field(default=0.1, gt=0)  # length of a step
    round: bool = True  # to 8 bits, as images are stored

    def equip(
        self,
        public: Batch | None,
        shape: Sequence[int],
        cache: Path | None = None,
        progress: Progress | None = None,
    ) -> Memory:
        """Extractor, layers and c as they follow from the public images alone."""
        if public is not None and not len(public):
            public = None
        found = extractor(self.extractor, public, cache, progress)
        layers = self.layers or _quarters(found)[self.variant]
        for name in layers:
            if name not in found.layers:
                raise unknown("layer", name, found.layers, hint=f"The extractor has {', '.join(found.layers)}.")
        memory = Memory(found, tuple(layers), self.c, None if public is None else public.x)
        return Memory(found, memory.layers, self.c * _scale(memory, shape), memory.public) if self.relative else memory

    def prepare(self, setup: Setup) -> Memory:
        memory = self.equip(setup.public, setup.private.x.shape[1:], setup.cache, setup.progress)
        if memory.public is None:
            warnings.warn("loda: no public images, so obscured images start from noise.", stacklevel=2)
        return memory

    def data(self, batch: Batch, step: Step) -> Batch:
        start = step.memory.starts(batch.x.shape, step.rng).to(batch.x)
        parts = zip(batch.x.split(BATCH), start.split(BATCH), strict=True)
        obscured = torch.cat([self.obscure(x, begin, step.memory) for x, begin in parts])
        step.secrets["start"] = start
        return Batch((obscured * 255).round() / 255 if self.round else obscured, batch.y)

    def obscure(self, x: Tensor, start: Tensor, memory: Memory) -> Tensor:
        """Algorithm 1 of the paper."""
        with torch.no_grad():
            target = memory.features(x)
        found = start.clone()
        for _ in range(self.steps):
            with torch.enable_grad():
                found.requires_grad_()
                near = sum((a - b).square().sum() for a, b in zip(memory.features(found), target, strict=True))
                (gradient,) = torch.autograd.grad(near - memory.c * (found - x).square().sum(), found)
            size = gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            found = (found.detach() - self.lr * gradient / (size + 1e-8)).clamp(0, 1)
        return found


def _quarters(found: Extractor) -> dict[str, tuple[str, ...]]:
    """The layers of each variant."""
    convolutions = found.convolutions
    quarter = max(1, round(len(convolutions) / 4))
    behind = found.layers[len(convolutions) :]
    return {
        "loda1": convolutions[:quarter],
        "loda2": convolutions,
        "loda3": (*convolutions[-quarter:], *behind),
    }


@torch.no_grad()
def _scale(memory: Memory, shape: Sequence[int]) -> float:
    """Squared feature distance for one unit of squared pixel distance, over pairs of unrelated public images."""
    rng = generator(0, "loda-scale")
    one, other = (memory.starts((PAIRS, *shape), rng) for _ in range(2))
    near = sum((a - b).square().sum() for a, b in zip(memory.features(one), memory.features(other), strict=True))
    return float(near / (one - other).square().sum())
