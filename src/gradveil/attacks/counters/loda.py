"""Against LODA: an obscured image is the end of a search, and where the search ended tells what it was for.

LODA lowers ‖g(x') − g(x)‖² − c‖x' − x‖² over x', so at the end its slope is naught. Its authors' own adaptive attack
(Wan et al. 2022, Eq. 6) looks for the x that makes it so: min over x of ‖Jᵀ(g(x') − g(x)) − c(x' − x)‖², J being the
extractor's Jacobian at x'. Extractor, layers and c follow from public images and the defense's settings.

The search stays in [0, 1], and at a pixel on the edge the slope need not be naught: it may point outwards. The paper
asks naught of it all the same (`edges=ignore`); such pixels can be left out (`mask`), or asked for the right sign,
which is all that is known of them and more than nothing (`sign`, the default).

Many images fit nearly as well, so the likeliest of them is sought, by public images of the class, and in coordinates
in which those are N(0, 1). `prior=none` seeks among all images, from grey, as the paper does, but by L-BFGS where it
takes plain descent.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.generative.public_prior import ImageGaussian, Whitened, gaussians
from gradveil.attacks.matching.fed_images import one_image, sighting
from gradveil.attacks.matching.optimizers import LBFGS
from gradveil.attacks.registry import attack
from gradveil.core.observation import Observation
from gradveil.core.settings import settings
from gradveil.defenses.data.loda.defense import Loda, Memory

DIRECTIONS = 100  # in which images of a class differ
OUTSIDE = 50.0  # weight of pixels outside [0, 1], for a soft box
EDGE = 1.5 / 255  # how near to 0 or 1 a pixel is on the edge; obscured images are stored in 8 bits


@attack("loda-stationarity", needs={"public"}, adaptive=True)
@settings
class LodaStationarity(Attack):
    """Rebuild the obscured image, then find the image it obscures."""

    edges: Literal["sign", "mask", "ignore"] = "sign"
    prior: Literal["public", "none"] = "public"
    error: float = Field(default=0.05, gt=0)  # of the slope, as a share of what it would be for the class's mean image
    steps: int = Field(default=600, ge=1)  # of L-BFGS; the paper: 100 of plain descent

    def applies(self, observation: Observation) -> str | None:
        public = observation.knowledge.public
        if observation.knowledge.part(Loda) is None:
            return "the defense is not loda"
        if public is not None and public.x.shape[1:] != torch.Size(observation.task.input_shape):
            return "public images have another shape than the private ones"
        return None

    def run(self, target: Target) -> Answer:
        public, defense = target.knowledge.public, target.knowledge.part(Loda)
        assert public is not None and defense is not None
        answer = one_image(sighting(target, 0))
        obscured = target.denormalize(answer.x).clamp(0, 1)
        memory = defense.equip(public, target.task.input_shape)
        hard = target.hard_labels
        classes = gaussians(public, target.task.num_outputs, DIRECTIONS)
        kinds = [classes[c] for c in hard.flatten().tolist()]
        images = self.original(obscured.flatten(0, 1), memory, kinds).view_as(obscured)
        return Answer(target.normalize(images), answer.score, hard, answer.iterations + self.steps)

    def original(self, obscured: Tensor, memory: Memory, kinds: list[ImageGaussian]) -> Tensor:
        """The likeliest images whose obscured form these are: a slope of naught up to `error`, under the prior."""
        shape, every = obscured.shape[1:], torch.arange(len(obscured))
        prior = Whitened(kinds, shape) if self.prior == "public" else _Pixels(shape)
        start = torch.zeros(len(obscured), prior.width)
        with torch.no_grad():
            size = self._misfit(obscured, memory, prior.images(start, every)) / obscured[0].numel()

        def objective(z: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
            rows = every if rows is None else rows
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                x = prior.images(z, rows)
                misfit = self._misfit(obscured[rows], memory, x) / (2 * self.error**2 * size[rows].clamp_min(1e-12))
                outside = (x - x.clamp(0, 1)).square().flatten(1).sum(1)
                value = misfit + prior.rarity(z) + OUTSIDE * outside
                (gradient,) = torch.autograd.grad(value.sum(), z)
            return value.detach(), gradient

        z, _, _ = LBFGS(history=30).minimize(objective, start, self.steps)
        return prior.images(z, every).clamp(0, 1)

    def _misfit(self, obscured: Tensor, memory: Memory, x: Tensor) -> Tensor:
        """Eq. 6, a row for each image."""
        with torch.enable_grad():
            at = obscured.clone().requires_grad_()
            features = memory.features(at)
        slope = self._slope(obscured, at, features, memory, x)
        return self._unexplained(slope, obscured).square().flatten(1).sum(1)

    def _slope(self, obscured: Tensor, at: Tensor, features: list[Tensor], memory: Memory, x: Tensor) -> Tensor:
        """Half the slope of LODA's objective at the obscured images if they obscure `x`; differentiable in `x`."""
        gaps = [a.detach() - b for a, b in zip(features, memory.features(x), strict=True)]
        (near,) = torch.autograd.grad(features, at, gaps, retain_graph=True, create_graph=x.requires_grad)
        return near - memory.c * (obscured - x)

    def _unexplained(self, slope: Tensor, obscured: Tensor) -> Tensor:
        """What of the slope the edges of the pixel range do not explain."""
        if self.edges == "ignore":
            return slope
        dark, bright = obscured <= EDGE, obscured >= 1 - EDGE
        if self.edges == "mask":
            return slope * ~(dark | bright)
        return torch.where(dark, slope.clamp_max(0), torch.where(bright, slope.clamp_min(0), slope))


class _Pixels:
    """No prior: the unknowns are the pixels themselves, grey at first."""

    def __init__(self, shape: torch.Size):
        self.shape, self.width = shape, shape.numel()

    def images(self, z: Tensor, rows: Tensor) -> Tensor:
        return 0.5 + z.reshape(len(z), *self.shape)

    def rarity(self, z: Tensor) -> Tensor:
        return z.new_zeros(len(z))
