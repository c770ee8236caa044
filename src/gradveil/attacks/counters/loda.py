"""Against LODA: the obscured image is the end of a search, and its end tells for which image the search was made.

LODA lowers ‖g(x') − g(x)‖² − c‖x' − x‖² over x', so its slope is zero at the end. The adaptive attack of its authors (Wan
et al. 2022, Eq. 6) searches the x that makes it so: min over x of ‖Jᵀ(g(x') − g(x)) − c(x' − x)‖², J being the
extractor's Jacobian at x'. Extractor, layers and c follow from public images and the defense's settings.

LODA's search stays in [0, 1], and at a pixel on the edge the slope may point outwards instead of being zero. The paper
asks for zero there too (`edges=ignore`); such pixels can be left out (`mask`), or asked for the right sign (`sign`).

Many images fit nearly as well, so the likeliest by public images of the class is searched, in coordinates in which those
are N(0, 1). `prior=none` searches among all images, from grey, as the paper does, but by L-BFGS, not plain descent.
"""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradveil.attacks import Answer, Attack, Cost, Target, Workload, attack
from gradveil.attacks.generative.public_prior import ImageGaussian, Whitened, gaussians
from gradveil.attacks.matching.fed_images import fed_cost, one_image, sighting
from gradveil.attacks.matching.optimizers import LBFGS
from gradveil.core.observation import Observation
from gradveil.defenses.data.loda.defense import Loda, Memory

DIRECTIONS = 100  # in which images of a class differ
OUTSIDE = 50.0  # weight of pixels outside [0, 1], for a soft box
EDGE = 1.5 / 255  # how near to 0 or 1 a pixel is on the edge; obscured images are stored in 8 bits


@attack("loda-stationarity", needs={"public"}, against=(Loda,), version=4)
class LodaStationarity(Attack):
    """Rebuild the obscured image, then search the image it obscures.

    Args:
        edges: what a pixel at 0 or 1 says: the sign of the slope, nothing (`mask`), or all (`ignore`, as the paper).
        prior: likely images by public ones, or none (the paper).
        error: error of the slope, as a share of the slope for the class's mean image.
        steps: iterations of L-BFGS; the paper takes 100 of plain descent.
        weight: the weight c that the attack takes, as a share of the defense's; the paper searches 0 to 1 and takes 0.05.
    Example: gradveil audit --defense loda --attack loda-stationarity:edges=mask
    """

    edges: Literal["sign", "mask", "ignore"] = "sign"
    prior: Literal["public", "none"] = "public"
    error: float = Field(default=0.05, gt=0)
    steps: int = Field(default=600, ge=1)
    weight: float = Field(default=1.0, ge=0)

    def cost(self, work: Workload) -> Cost:
        return Cost(fed_cost(work).iterations + self.steps)

    def applies(self, observation: Observation) -> str | None:
        public = observation.knowledge.public
        if observation.knowledge.part(Loda) is None:
            return "the defense is not loda"
        if public is not None and public.x.shape[1:] != torch.Size(observation.task.input_shape):
            return "public images have another shape than the private ones"
        return None

    def run(self, target: Target) -> Answer:
        public, defense = target.knowledge.public, target.knowledge.needed_part(Loda)
        assert public is not None
        answer = one_image(sighting(target, 0))
        obscured = target.denormalize(answer.x).clamp(0, 1)
        memory = defense.equip(public, target.task.input_shape)
        memory = replace(memory, c=self.weight * memory.c)
        hard = target.hard_labels
        classes = gaussians(public, target.task.num_outputs, DIRECTIONS)
        kinds = [classes[c] for c in hard.flatten().tolist()]
        images = self.original(obscured.flatten(0, 1), memory, kinds).view_as(obscured)
        return Answer(target.normalize(images), answer.score, hard, answer.iterations + self.steps)

    def original(self, obscured: Tensor, memory: Memory, kinds: list[ImageGaussian]) -> Tensor:
        """The likeliest images behind these obscured ones: a slope of zero up to `error`, under the prior."""
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
        """Eq. 6, one number per image."""
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
        """The part of the slope that the edges of the pixel range do not explain."""
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
