"""Against InstaHide: a flipped sign leaves a pixel two values, and the pixel range, priors and other encodings choose.

The signs act on (x − mean) / std, so an encoded pixel of magnitude a was mean + std·a or mean − std·a before.

1. The encodings are rebuilt from the updates (`fed.py`); their absolute values are free of the signs.
2. Where one of the two values lies outside [0, 1], the other is true: on dark images that settles most of the bright
   pixels. The rest begin nearest to what the mixture of mean images would be; `cheap` stops there, with |x| turned to
   the dark side or the bright one, and shows the encoding itself.
3. The mixture is solved as for MixUp (`mixup.py`), the signs are chosen anew to fit it, and so on in turn.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks.adaptive.fed import Fed, recover
from gradveil.attacks.adaptive.mixup import Mixture, answer, cannot_decode, decode, unmix
from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.registry import attack
from gradveil.settings import settings
from gradveil.types import Batch, Observation

ERROR = 0.02  # of an encoding's pixel, when its fit is weighed against how rare the images' pixels are
BINS = 16
ROUNDED = 0.02  # how far outside [0, 1] a pixel may come to lie by an inexact encoding

Rarity = Callable[[Tensor], Tensor]


@attack("instahide-decode", adaptive=True)
@settings
class InstahideDecode(Attack):
    """Rebuild the encodings, then solve for signs and images in turn."""

    steps: int = Field(default=1000, ge=1)  # of the least squares in the pixel range
    rounds: int = Field(default=15, ge=1)  # in which the signs are chosen anew
    starts: int = Field(default=6, ge=2)  # from which each pixel is fitted
    cheap: bool = False  # only undo the signs

    def applies(self, observation: Observation) -> str | None:
        return cannot_decode(observation, "instahide")

    def run(self, target: Target) -> Answer:
        fed = recover(target)
        low, high = both(fed)
        first = nearest(low, high, torch.zeros_like(low))
        if self.cheap:
            return answer(target, fed, first.view_as(fed.x)[fed.sighting == 0])

        rarity = rarity_in(target.knowledge.public)

        def solve(mixture: Mixture) -> tuple[Tensor, Tensor]:
            return fit(mixture, low, high, self, rarity, target.rng)

        return answer(target, fed, decode(fed, first, solve, self.steps))


def both(fed: Fed) -> tuple[Tensor, Tensor]:
    """The two values that each pixel may have had; the same twice where only one is a pixel's."""
    size, first = fed.x.flatten(0, 1).abs(), fed.target.first
    mean, std = first.mean.view(-1, 1, 1), first.std.view(-1, 1, 1)
    low, high = mean - std * size, mean + std * size
    return torch.where(low < -ROUNDED, high, low).clamp(0, 1), torch.where(high > 1 + ROUNDED, low, high).clamp(0, 1)


def fit(
    mixture: Mixture, low: Tensor, high: Tensor, settings: InstahideDecode, rarity: Rarity, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Images and the encodings with their signs undone, in turn. Pixels are fitted by themselves, so each keeps the
    start that fits it best: from black, from the mean, and from random images. Signs have an exact counterpart (all
    images at mean + std·a in place of mean − std·a), which only the pixels' rarity can tell."""
    m, shape, starts = mixture.mixing, mixture.mean.shape, settings.starts
    mean, low, high = (t.flatten(1).repeat(1, starts) for t in (mixture.mean, low, high))
    x = torch.rand(mean.shape, generator=rng)
    pixels = shape[1:].numel()
    x[:, :pixels] = 0
    x[:, pixels : 2 * pixels] = mean[:, :pixels]
    for _ in range(settings.rounds):
        x = unmix(Mixture(m, mean, mixture.own), nearest(low, high, m @ x), settings.steps // 10)
    encodings = nearest(low, high, m @ x)
    misfit = (m @ x - encodings).square().sum(0) / (2 * ERROR**2) + rarity(x).sum(0)
    best = misfit.view(starts, pixels).argmin(0) * pixels + torch.arange(pixels)
    return x[:, best].view(shape), encodings[:, best].view(-1, *shape[1:])


def rarity_in(public: Batch | None) -> Rarity:
    """−log of how frequent a pixel's value is in public images."""
    if public is None:
        return torch.zeros_like
    counts = torch.histc(public.x, BINS, 0, 1)
    cost = -((counts + 1) / (counts + 1).sum()).log()
    return lambda x: cost[(x * BINS).long().clamp(0, BINS - 1)]


def nearest(low: Tensor, high: Tensor, to: Tensor) -> Tensor:
    return torch.where((low - to).abs() <= (high - to).abs(), low, high)
