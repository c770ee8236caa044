"""Refiner: send the gradient of other images, made to train like the private ones and to look like noise.

Fan et al. 2022, arXiv version 1: mix noise in, then lower UM − β·PM for 100 steps. UM compares gradients, more closely
where a parameter is critical; PM is an evaluation network's word for how noisy an image looks. No code is public, and
UM as printed fails on a partly trained model: its weights |g·θ| leave nearly all parameters free, and its values are so
small that PM alone decides. By default the most critical parameter therefore counts twice as much as one that is not
critical at all, and UM is divided by its value for an empty gradient. Also our choice: PM rewards no image for being
noisier than noise, and the steps are Adam's, on each image's gradient divided by its size.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradveil.core.settings import settings
from gradveil.core.types import Batch, Tensors
from gradveil.defenses.base import Defense, Setup, Step
from gradveil.defenses.batch.refiner.evaluator import Evaluator, evaluator_for
from gradveil.defenses.registry import defense

_TINY = 1e-20


@defense("refiner", counters=["refiner-partial"], random=True)
@settings
class Refiner(Defense):
    """Train on noise-like images whose gradients resemble the true ones where it matters."""

    alpha: float = Field(default=1.0, ge=0, le=1)  # share of noise at the start; 1 in Tables II and III
    beta: float = Field(default=1.0, ge=0)  # weight of privacy against utility
    steps: int = Field(default=100, ge=0)
    tau: float = Field(default=0.95, ge=0, le=1)  # how much less each further layer counts
    utility: Literal["normalised", "printed"] = "normalised"
    lr: float = Field(default=0.1, gt=0)  # in pixels, falling to 0
    epochs: int = Field(default=20, ge=1)  # of the evaluation network

    def prepare(self, setup: Setup) -> Evaluator:
        return evaluator_for(setup, self.epochs)

    def batch(self, batch: Batch, step: Step) -> Batch:
        evaluator: Evaluator = step.memory
        noise = torch.rand(batch.x.shape, generator=step.rng)
        earlier = step.secrets.get("refiner.start", noise[:0])  # of the round's earlier steps
        step.secrets["refiner.start"] = torch.cat([earlier, noise])
        draw = step.model.draw_noise(len(batch), step.rng)  # of a model with random parts, the same in every comparison
        true = step.gradient(batch, draw)
        utility = Utility(true, step.model.parameters(step.state), self.tau, self.utility)

        x = torch.lerp(batch.x, noise, self.alpha).requires_grad_()
        optimizer = torch.optim.Adam([x], lr=self.lr)
        falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=max(self.steps, 1))
        for _ in range(self.steps):
            with torch.enable_grad():
                um = utility(_gradient(step, x, batch.y, draw))
                reached = (1 - um.detach()).clamp_min(0) if self.utility == "normalised" else 1.0
                loss = um - self.beta * reached * evaluator(x).mean()
                (slope,) = torch.autograd.grad(loss, x)
            # UM falls by orders of magnitude; without this the first steps would rule Adam's memory to the end.
            size = slope.flatten(1).square().mean(1).sqrt().view(-1, 1, 1, 1)
            x.grad = slope / size.clamp_min(_TINY)
            optimizer.step()
            falling.step()
            with torch.no_grad():
                x.clamp_(0, 1)
        return Batch(x.detach(), batch.y)


class Utility:
    """UM, Eq. 5: the weighted squared distance to the true gradient."""

    def __init__(self, true: Tensors, parameters: Tensors, tau: float, form: Literal["normalised", "printed"]):
        self.true = true
        critical = {name: (g * parameters[name]).abs() for name, g in true.items()}
        largest = max(float(c.max()) for c in critical.values())
        if form == "normalised":
            critical = {
                name: (1 + c / max(largest, _TINY)).sqrt() for name, c in critical.items()
            }  # squared in the sum
        depth = _layers(list(true))
        self.weights = {name: c * tau ** depth[name] for name, c in critical.items()}
        nothing = sum(float((w * true[name]).square().sum()) for name, w in self.weights.items())
        self.scale = max(nothing, _TINY) if form == "normalised" else 1.0

    def __call__(self, found: Tensors) -> Tensor:
        parts = [(w * (found[name] - self.true[name])).square().sum() for name, w in self.weights.items()]
        return torch.stack(parts).sum() / self.scale


def _layers(names: list[str]) -> dict[str, int]:
    """The place of each tensor's layer, counted from the input; a weight and its bias are of one layer."""
    order = {layer: i for i, layer in enumerate(dict.fromkeys(n.rpartition(".")[0] for n in names), start=1)}
    return {name: order[name.rpartition(".")[0]] for name in names}


def _gradient(step: Step, x: Tensor, y: Tensor, draw: Tensors) -> Tensors:
    """The gradient of the images as they are now, itself differentiable."""
    parameters = {n: p.detach().requires_grad_() for n, p in step.model.parameters(step.state).items()}
    loss = step.model.loss({**step.state, **parameters}, step.task.normalize(x), y, draw)
    found = torch.autograd.grad(loss, list(parameters.values()), create_graph=True, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), found, strict=True)}
