"""InstaHide (Huang et al. 2020): MixUp, then the sign of every pixel flipped at random.

The signs act on images as the network takes them, (x − mean) / std, so what is fed leaves the range of pixels: as
published. Without `public` all k images are the client's own and the coefficients GradAttack's (see `mixup`), the
protocol LODA compares with. With `public` it is the original's cross-dataset scheme: half of the k images (rounded up)
are private and the rest public, coefficients are |N(0, 1)| normalised, the first two together at least 0.3, and labels
come from the private ones alone, not rescaled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.settings import settings
from gradveil.core.types import Batch
from gradveil.defenses.base import Defense, Setup, Step
from gradveil.defenses.batch.mixup import Partners, check_limits, different, dirichlet, mix, remember, within
from gradveil.defenses.registry import defense

PAIR = 0.3  # the least that the first two coefficients sum to, in the cross-dataset scheme


@defense("instahide", counters=["instahide-decode"], random=True)
@settings
class InstaHide(Defense):
    """Mix each image with k − 1 others, flip pixel signs at random; labels become soft.

    Secrets, a row for each encoded image: those of MixUp (public partners are numbered after the client's images), and
    `signs` (+1 or −1 for each pixel).
    """

    k: int = Field(default=4, ge=2)  # LODA: 4 and 6; InstaHide recommends 4 or 6
    upper: float = Field(default=0.65, gt=0, le=1)  # InstaHide's paper; 1 sets no limit
    lower: float = Field(default=0.0, ge=0, lt=1)
    public: bool = False  # mix with public images too

    def __post_init__(self) -> None:
        check_limits(self.name, self.k, self.lower, self.upper)

    def prepare(self, setup: Setup) -> Partners | Crossed:
        if not self.public:
            return Partners.of(setup.private, self.k, self.name)
        if setup.public is None or len(setup.public) < self.k // 2:
            raise UserError(
                "instahide:public=true mixes with public images, and there are none; give some, or leave it out."
            )
        return Crossed.of(setup.private, setup.public.x, (self.k + 1) // 2, self.name, setup.task.num_outputs)

    def batch(self, batch: Batch, step: Step) -> Batch:
        if self.public:
            mixing = within(lambda rows: _normal(rows, self.k, step.rng), len(batch), self.lower, self.upper, _paired)
        else:
            mixing = within(lambda rows: dirichlet(rows, self.k, step.rng), len(batch), self.lower, self.upper)
        mixed = mix(batch, mixing, step.memory.draw(batch, self.k, step.rng), step.memory.data, step)
        signs = torch.randint(2, mixed.x.shape, generator=step.rng, dtype=torch.int8) * 2 - 1
        remember(step, "signs", signs)
        return Batch(step.task.denormalize(step.task.normalize(mixed.x) * signs), mixed.y)


@dataclass(frozen=True)
class Crossed:
    """The client's images, of which each encoding takes `own`, followed by the public ones, which carry no label."""

    private: Partners
    data: Batch
    own: int

    @staticmethod
    def of(private: Batch, public: Tensor, own: int, name: str, classes: int) -> Crossed:
        labels = private.y if private.y.ndim == 2 else torch.nn.functional.one_hot(private.y, classes).float()
        data = Batch(torch.cat([private.x, public]), torch.cat([labels, labels.new_zeros(len(public), classes)]))
        return Crossed(Partners.of(private, own, name), data, own)

    def draw(self, batch: Batch, k: int, rng: torch.Generator) -> Tensor:
        private, first = self.private.draw(batch, self.own, rng), len(self.private.data)
        none = torch.empty(len(batch), 0, dtype=torch.long)
        return torch.cat([private, first + different(none, k - self.own, len(self.data) - first, rng)], dim=1)


def _normal(rows: int, k: int, rng: torch.Generator) -> Tensor:
    size = torch.randn(rows, k, generator=rng).abs()
    return size / size.sum(dim=1, keepdim=True)


def _paired(mixing: Tensor) -> Tensor:
    return mixing[:, :2].sum(dim=1) >= PAIR
