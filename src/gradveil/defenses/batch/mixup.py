"""MixUp: train on convex combinations of images and of their labels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.randomness import Stream
from gradveil.core.settings import settings
from gradveil.core.types import Batch
from gradveil.defenses import Defense, Setup, Step, defense

ITSELF = 3  # Dirichlet parameter of the image itself; that of its partners is 1
TRIES = 10_000  # redraws before an error


@defense("mixup", random=True)
@settings
class MixUp(Defense):
    """Mix each image with k − 1 other images of the client; labels become soft.

    Zhang et al. 2018 mix pairs. As a defense it mixes k images (Huang et al. 2021, GradAttack, whose protocol LODA
    follows): each image of the batch with k − 1 others of the client's data, drawn anew at every step. The coefficients
    are Dirichlet(3, 1, …, 1), the image itself first, and are drawn again while they exceed the limits.

    Secrets, one row per mixed image: `mixing` (its k coefficients), `partners` (the positions of those images in the
    client's data, the image itself first; −1 where it is not among them) and `component` (the image of largest weight).

    Args:
        k: number of images in a mixture. LODA: 4 and 6.
        upper: limit of the largest coefficient. GradAttack: 0.65; 1 sets no limit.
        lower: limit of the smallest coefficient.

    Example:
        >>> gv.protect(model, "mixup:k=6", data=(x, y))
    """

    k: int = Field(default=4, ge=2)
    upper: float = Field(default=0.65, gt=0, le=1)
    lower: float = Field(default=0.0, ge=0, lt=1)

    def __post_init__(self) -> None:
        check_limits(self.name, self.k, self.lower, self.upper)

    def prepare(self, setup: Setup) -> Partners:
        return Partners.of(setup.private, self.k, self.name)

    def batch(self, batch: Batch, step: Step) -> Batch:
        mixing = within(lambda rows: dirichlet(rows, self.k, step.rng), len(batch), self.lower, self.upper)
        return mix(batch, mixing, step.memory.draw(batch, self.k, step.rng), step.memory.data, step)


@dataclass(frozen=True)
class Partners:
    """The images that a client may mix with, and the position of each."""

    data: Batch
    positions: dict[bytes, int]

    @staticmethod
    def of(data: Batch, k: int, name: str) -> Partners:
        if len(data) < k:
            raise UserError(f"{name} mixes {k} images, but there are only {len(data)}; choose a smaller k.")
        return Partners(data, {_key(image): i for i, image in enumerate(data.x)})

    def draw(self, batch: Batch, k: int, rng: Stream) -> Tensor:
        """n × k different positions: that of each image itself (−1 if it is not among these), then its partners."""
        positions = torch.tensor([[self.positions.get(_key(image), -1)] for image in batch.x])
        return different(positions, k - 1, len(self.data), rng)


def _key(image: Tensor) -> bytes:
    return hashlib.blake2b(image.detach().cpu().contiguous().numpy().tobytes(), digest_size=16).digest()


def different(first: Tensor, count: int, below: int, rng: Stream) -> Tensor:
    """The rows of `first`, extended by `count` random numbers below `below`; no number occurs twice in a row."""

    def draw(rows: Tensor) -> Tensor:
        return torch.cat([rows, rng.integers(0, below, (len(rows), count))], dim=1)

    drawn = draw(first)
    while (twice := (drawn.sort(dim=1).values.diff(dim=1) == 0).any(dim=1)).any():
        drawn[twice] = draw(first[twice])
    return drawn


def dirichlet(rows: int, k: int, rng: Stream) -> Tensor:
    """Dirichlet(3, 1, …, 1), rows × k: sums of standard exponentials, normalised."""
    exponential = -torch.log1p(-rng.uniform((rows, ITSELF + k - 1), torch.float64))
    parts = torch.cat([exponential[:, :ITSELF].sum(dim=1, keepdim=True), exponential[:, ITSELF:]], dim=1)
    return (parts / parts.sum(dim=1, keepdim=True)).float()


def check_limits(name: str, k: int, lower: float, upper: float) -> None:
    if upper * k <= 1 or lower * k >= 1:
        raise UserError(f"{name}: {k} coefficients that sum to 1 need upper above {1 / k:.3g} and lower below it.")


def within(draw: Callable[[int], Tensor], rows: int, lower: float, upper: float, least_pair: float = 0.0) -> Tensor:
    """Rows of coefficients between the limits, the first two of sum at least `least_pair`; others are drawn again."""
    drawn = draw(rows)
    for _ in range(TRIES):
        bad = (drawn.amax(dim=1) > upper) | (drawn.amin(dim=1) < lower) | (drawn[:, :2].sum(dim=1) < least_pair)
        if not bad.any():
            return drawn
        drawn[bad] = draw(int(bad.sum()))
    raise UserError(f"coefficients between lower={lower:g} and upper={upper:g} are too rare to draw; widen the limits.")


def mix(batch: Batch, mixing: Tensor, partners: Tensor, data: Batch, step: Step) -> Batch:
    """Each image combined with its partners in `data`; coefficients and partners become secrets of the step."""
    others = step.protected(data[partners[:, 1:].flatten()])
    images = torch.cat([batch.x[:, None], others.x.view(len(batch), -1, *batch.x.shape[1:])], dim=1)
    classes = step.task.num_outputs
    labels = torch.cat([soft(batch.y, classes)[:, None], soft(others.y, classes).view(len(batch), -1, classes)], dim=1)
    step.remember(mixing=mixing, partners=partners, component=images[torch.arange(len(batch)), mixing.argmax(dim=1)])
    return Batch(torch.einsum("nk,nkchw->nchw", mixing, images), torch.einsum("nk,nkc->nc", mixing, labels))


def soft(labels: Tensor, classes: int) -> Tensor:
    """Class numbers as rows of ones and zeros (n × classes); soft labels stay."""
    return labels if labels.is_floating_point() else F.one_hot(labels, classes).float()
