"""InstaHide: MixUp, then the sign of every pixel flipped at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.randomness import Stream
from gradveil.core.settings import settings
from gradveil.core.types import Batch
from gradveil.defenses import Defense, Setup, Step, defense
from gradveil.defenses.batch.mixup import Partners, check_limits, different, dirichlet, mix, soft, within

PAIR = 0.3  # the smallest sum of the first two coefficients in the cross-dataset scheme


@defense("instahide", random=True)
@settings
class InstaHide(Defense):
    """Mix each image with k − 1 others, then flip pixel signs at random; labels become soft.

    Huang et al. 2020. The signs act on the network inputs (x − mean) / std, so the result leaves the range of pixels, as
    published. Without `public` all k images are the client's and the coefficients are those of GradAttack (see `mixup`);
    LODA compares with this protocol. With `public` it is the cross-dataset scheme of the paper: half of the k images
    (rounded up) are private and the rest public, coefficients are |N(0, 1)|, normalised, the first two sum to at least
    0.3, and labels come from the private images alone, not rescaled.

    Secrets, one row per encoded image: those of MixUp (public partners are numbered after the client's images), and
    `signs` (+1 or −1 per pixel).

    Args:
        k: number of images in a mixture. LODA: 4 and 6; the paper recommends 4 or 6.
        upper: limit of the largest coefficient. The paper: 0.65; 1 sets no limit.
        lower: limit of the smallest coefficient.
        public: mix with public images too.

    Example:
        >>> gv.protect(model, "instahide:k=6", data=(x, y))
    """

    k: int = Field(default=4, ge=2)
    upper: float = Field(default=0.65, gt=0, le=1)
    lower: float = Field(default=0.0, ge=0, lt=1)
    public: bool = False

    def __post_init__(self) -> None:
        check_limits(self.name, self.k, self.lower, self.upper)

    def prepare(self, setup: Setup) -> Partners | Crossed:
        if not self.public:
            return Partners.of(setup.private, self.k, self.name)
        if setup.public is None or len(setup.public) < self.k // 2:
            raise UserError("instahide:public=true needs public images; give more of them, or leave it out.")
        return Crossed.of(setup.private, setup.public.x, (self.k + 1) // 2, self.name, setup.task.num_outputs)

    def batch(self, batch: Batch, step: Step) -> Batch:
        if self.public:
            mixing = within(lambda rows: _normal(rows, self.k, step.rng), len(batch), self.lower, self.upper, PAIR)
        else:
            mixing = within(lambda rows: dirichlet(rows, self.k, step.rng), len(batch), self.lower, self.upper)
        mixed = mix(batch, mixing, step.memory.draw(batch, self.k, step.rng), step.memory.data, step)
        signs = step.rng.integers(0, 2, mixed.x.shape, torch.int8) * 2 - 1
        step.remember(signs=signs)
        return Batch(step.task.denormalize(step.task.normalize(mixed.x) * signs), mixed.y)


@dataclass(frozen=True)
class Crossed:
    """The client's images, of which every mixture takes `num_private`, then the public images, without labels."""

    private: Partners
    data: Batch
    num_private: int

    @staticmethod
    def of(private: Batch, public: Tensor, num_private: int, name: str, classes: int) -> Crossed:
        labels = soft(private.y, classes)
        data = Batch(torch.cat([private.x, public]), torch.cat([labels, labels.new_zeros(len(public), classes)]))
        return Crossed(Partners.of(private, num_private, name), data, num_private)

    def draw(self, batch: Batch, k: int, rng: Stream) -> Tensor:
        private, start = self.private.draw(batch, self.num_private, rng), len(self.private.data)
        empty = torch.empty(len(batch), 0, dtype=torch.long)
        public = start + different(empty, k - self.num_private, len(self.data) - start, rng)
        return torch.cat([private, public], dim=1)


def _normal(rows: int, k: int, rng: Stream) -> Tensor:
    size = rng.normal((rows, k)).abs()
    return size / size.sum(dim=1, keepdim=True)
