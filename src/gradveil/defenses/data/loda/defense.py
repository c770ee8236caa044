"""LODA, learning to obscure data: train on images that look alike to a network and different to people."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradveil.core.errors import UserError, unknown
from gradveil.core.loops import Loop
from gradveil.core.progress import Progress
from gradveil.core.randomness import Stream, generator
from gradveil.core.settings import settings
from gradveil.core.types import Batch
from gradveil.defenses import Defense, Setup, Step, defense
from gradveil.defenses.data.loda.extractors import Extractor, extractor
from gradveil.defenses.data.loda.resnet import resnet_extractor

BATCH = 128  # images obscured together; they do not interact, so this changes rounding only
PAIRS = 256  # of public images, to measure the scale of the extractor


@dataclass(frozen=True)
class Memory:
    """What the method needs. An adversary who knows the public images can compute it too."""

    extractor: Extractor
    layers: tuple[str, ...]
    c: float  # weight of the squared pixel distance against the summed squared feature distances
    public: Tensor | None  # images to start from; None: uniform noise

    def features(self, x: Tensor) -> list[Tensor]:
        return self.extractor(x, self.layers)

    def starts(self, shape: Sequence[int], rng: Stream) -> Tensor:
        if self.public is None:
            return rng.uniform(shape)
        return self.public[rng.integers(0, len(self.public), (shape[0],))]


@defense("loda", random=True, version=2)
@settings
class Loda(Defense):
    """Replace each image by one with similar features and different pixels; labels stay.

    Wan et al. 2022. Each private image x* is replaced, once, by the x' in [0, 1] that minimises
    ‖g(x') − g(x*)‖² − c ‖x' − x*‖²: near to it in the features g of a public network, far from it in pixels. x' starts
    as a random public image and takes steps of gradient descent of fixed length. Sums run over all values of all chosen
    layers. The larger c, the nearer x' comes to the negative of x*, which is far in pixels and hides nothing: see
    |correlation| and identification, not PSNR alone. Secrets: `start`, the start of each image.

    Args:
        variant: chooses the layers. In the paper the extractor is ResNet18 with 20 convolutions: loda1 takes the first
            five, loda2 all, loda3 the last five and the linear part. Here: the first quarter, all, the last quarter
            with all later layers. loda3 hides best for its accuracy (benchmarks/loda_tradeoff.py).
        layers: names of layers instead of a variant: `conv2/conv4/pooled`.
        c: weight of the pixel distance. The paper: 20, 30 and 1 (absolute) for the three variants.
        relative: whether c is in units of feature over pixel distance between public images; else absolute.
        extractor: the public network; `auto` trains a small one on public images if they have classes, else takes AlexNet.
            `resnet18` is that of the paper, trained on the public images for 200 epochs: for a GPU.
        steps: of gradient descent. The paper: 500 of one length; 240 that fall from ten times it get as far in half the
            time (benchmarks/crafting.py).
        lr: length of the first step. The paper: 0.1.
        fall: whether steps become shorter, down to zero. The paper: no.
        round: to 8 bits, as images are stored.

    Example:
        >>> gv.protect(model, "loda:variant=loda2,steps=20", data=(x, y), public=(x_public, y_public))
    """

    variant: Literal["loda1", "loda2", "loda3"] = "loda3"
    layers: tuple[str, ...] = ()
    c: float = Field(default=0.03, ge=0)
    relative: bool = True
    extractor: Literal["auto", "trained", "resnet18", "alexnet", "vgg16"] = "auto"
    steps: int = Field(default=240, ge=1)
    lr: float = Field(default=1.0, gt=0)
    fall: bool = True
    round: bool = True

    def equip(
        self, public: Batch | None, shape: Sequence[int], cache: Path | None = None, progress: Progress | None = None
    ) -> Memory:
        """Extractor, layers and c, computed from the public images alone."""
        if public is not None and not len(public):
            public = None
        network = self._network(public, cache, progress)
        layers = self.layers or _variants(network)[self.variant]
        for name in layers:
            if name not in network.layers:
                raise unknown("layer", name, network.layers, hint=f"The extractor has {', '.join(network.layers)}.")
        memory = Memory(network, tuple(layers), self.c, None if public is None else public.x)
        return replace(memory, c=self.c * _scale(memory, shape)) if self.relative else memory

    def _network(self, public: Batch | None, cache: Path | None, progress: Progress | None) -> Extractor:
        if self.extractor != "resnet18":
            return extractor(self.extractor, public, cache, progress)
        if public is None or len(public.hard_labels.unique()) < 2:
            raise UserError("loda:extractor=resnet18 needs public images of two classes or more to train it on.")
        return resnet_extractor(public, cache, progress)

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
        obscured = start.clone()
        for i in Loop(self.steps):
            with torch.enable_grad():
                obscured.requires_grad_()
                features = _distance(memory.features(obscured), target)
                (gradient,) = torch.autograd.grad(features - memory.c * (obscured - x).square().sum(), obscured)
            size = gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            length = self.lr * (1 - i / self.steps if self.fall else 1)
            obscured = (obscured.detach() - length * gradient / (size + 1e-8)).clamp(0, 1)
        return obscured


def _variants(network: Extractor) -> dict[str, tuple[str, ...]]:
    """The layers of each variant."""
    convolutions = network.convolutions
    quarter = max(1, round(len(convolutions) / 4))
    later = network.layers[len(convolutions) :]
    return {"loda1": convolutions[:quarter], "loda2": convolutions, "loda3": (*convolutions[-quarter:], *later)}


def _distance(features: list[Tensor], others: list[Tensor]) -> Tensor:
    """The summed squared distances between the features of all layers."""
    squares = ((a - b).square().sum() for a, b in zip(features, others, strict=True))
    return sum(squares, torch.zeros(()))


@torch.no_grad()
def _scale(memory: Memory, shape: Sequence[int]) -> float:
    """Squared feature distance per unit of squared pixel distance, over pairs of unrelated public images."""
    rng = generator(0, "loda-scale")
    one, other = (memory.starts((PAIRS, *shape), rng) for _ in range(2))
    return float(_distance(memory.features(one), memory.features(other)) / (one - other).square().sum())
