"""MixUp (Zhang et al. 2018): train on convex combinations of images, with their labels combined alike.

As a defense it mixes k images at once (Huang et al. 2021, GradAttack, whose protocol LODA follows too): each image of
the batch with k − 1 others of the client's own data, drawn anew at every step. The coefficients are
Dirichlet(3, 1, …, 1), the image itself first, redrawn while the largest is above `upper` or the smallest below `lower`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.settings import settings
from gradveil.core.types import Batch
from gradveil.defenses.base import Defense, Setup, Step
from gradveil.defenses.registry import defense

OWN = 3  # Dirichlet parameter of the image itself; that of its partners is 1
TRIES = 10_000  # redraws before the limits are taken to leave no coefficients


@defense("mixup", counters=["mixup-decode"], random=True)
@settings
class MixUp(Defense):
    """Mix each image with k − 1 others of the client's data; labels become soft.

    Secrets, a row for each mixed image: `mixing` (its k coefficients), `partners` (the places of those images in the
    client's data, the image itself first; −1 where it is not among them) and `component` (the image of most weight).
    """

    k: int = Field(default=4, ge=2)  # LODA: 4 and 6
    upper: float = Field(default=0.65, gt=0, le=1)  # GradAttack's paper; 1 sets no limit
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
    """The images a client may mix with, and the place of each."""

    data: Batch
    places: dict[bytes, int]

    @staticmethod
    def of(data: Batch, k: int, name: str) -> Partners:
        if len(data) < k:
            raise UserError(f"{name} mixes {k} images, but there are only {len(data)} to mix; give a smaller k.")
        return Partners(data, {_key(image): place for place, image in enumerate(data.x)})

    def draw(self, batch: Batch, k: int, rng: torch.Generator) -> Tensor:
        """n × k different places: each image's own (−1 if it is none of these), then its partners'."""
        own = torch.tensor([[self.places.get(_key(image), -1)] for image in batch.x])
        return different(own, k - 1, len(self.data), rng)


def _key(image: Tensor) -> bytes:
    return hashlib.blake2b(image.detach().cpu().contiguous().numpy().tobytes(), digest_size=16).digest()


def different(given: Tensor, count: int, among: int, rng: torch.Generator) -> Tensor:
    """Rows of `given` numbers continued by `count` random ones below `among`, no number twice in a row."""

    def draw(rows: Tensor) -> Tensor:
        return torch.cat([rows, torch.randint(among, (len(rows), count), generator=rng)], dim=1)

    found = draw(given)
    while (twice := (found.sort(dim=1).values.diff(dim=1) == 0).any(dim=1)).any():
        found[twice] = draw(given[twice])
    return found


def dirichlet(rows: int, k: int, rng: torch.Generator) -> Tensor:
    """Dirichlet(3, 1, …, 1): sums of standard exponentials, normalised."""
    exponential = -torch.log1p(-torch.rand(rows, OWN + k - 1, generator=rng, dtype=torch.float64))
    parts = torch.cat([exponential[:, :OWN].sum(dim=1, keepdim=True), exponential[:, OWN:]], dim=1)
    return (parts / parts.sum(dim=1, keepdim=True)).float()


def check_limits(name: str, k: int, lower: float, upper: float) -> None:
    if upper * k <= 1 or lower * k >= 1:
        raise UserError(f"{name}: {k} coefficients that sum to 1 need upper above {1 / k:.3g} and lower below it.")


def within(
    draw: Callable[[int], Tensor],
    rows: int,
    lower: float,
    upper: float,
    accept: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Rows of coefficients between the limits, and such as `accept` takes; others are drawn again."""
    found = draw(rows)
    for _ in range(TRIES):
        bad = (found.amax(dim=1) > upper) | (found.amin(dim=1) < lower)
        bad |= ~accept(found) if accept else False
        if not bad.any():
            return found
        found[bad] = draw(int(bad.sum()))
    raise UserError(f"coefficients between lower={lower:g} and upper={upper:g} are too rare to draw; widen the limits.")


def mix(batch: Batch, mixing: Tensor, partners: Tensor, data: Batch, step: Step) -> Batch:
    """The combinations of each image with its partners in `data`; how they were made goes into the step's secrets."""
    others = step.protected(data[partners[:, 1:].flatten()])
    images = torch.cat([batch.x[:, None], others.x.view(len(batch), -1, *batch.x.shape[1:])], dim=1)
    labels = torch.cat(
        [soft(batch.y, step)[:, None], soft(others.y, step).view(len(batch), -1, step.task.num_outputs)], dim=1
    )
    remember(step, "mixing", mixing)
    remember(step, "partners", partners)
    remember(step, "component", images[torch.arange(len(batch)), mixing.argmax(dim=1)])
    return Batch(torch.einsum("nk,nkchw->nchw", mixing, images), torch.einsum("nk,nkc->nc", mixing, labels))


def soft(labels: Tensor, step: Step) -> Tensor:
    """Class numbers as rows of ones and zeros; labels that are soft already stay."""
    return labels if labels.is_floating_point() else F.one_hot(labels, step.task.num_outputs).float()


def remember(step: Step, name: str, rows: Tensor) -> None:
    """Add rows to a secret: a round of several local steps has those of all of them, in their order."""
    step.secrets[name] = torch.cat([step.secrets[name], rows]) if name in step.secrets else rows
