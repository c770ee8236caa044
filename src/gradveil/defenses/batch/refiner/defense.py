"""Refiner: send the gradient of other images, which train like the private ones and look like noise."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradveil.core.loops import Loop
from gradveil.core.settings import settings
from gradveil.core.types import Batch, Tensors
from gradveil.defenses import Defense, Setup, Step, defense
from gradveil.defenses.batch.refiner.evaluator import Evaluator, evaluator_for

_TINY = 1e-20
LEAST = 0.1  # α below which the step does not become shorter


@defense("refiner", random=True, version=2)
@settings
class Refiner(Defense):
    """Train on noise-like images whose gradient is similar to the true one at critical parameters.

    Fan et al. 2022, arXiv version 1: mix noise into the images, then minimise UM − β·PM. UM compares gradients, with
    larger weights for critical parameters; PM is the output of an evaluation network: how noisy an image looks.

    Two objectives, by `utility`:
    - `printed`, Eq. 3 and 5 of the paper: Σ‖w ⊙ (∇L(x*) − g)‖² − β·PM with w = |g ⊙ θ|·τ^layer. On a partly trained model
      it fails: the weights leave nearly all parameters free, and UM is so small that PM alone decides.
    - `normalised`, ours and the default: UM/UM(0) − β·(1 − UM/UM(0))₊·PM. The most critical parameter counts twice as
      much as one that is not critical at all, UM is divided by its value for a zero gradient, and PM counts the less
      the farther the gradient still is, so that no image is rewarded for being noise alone.

    The paper names neither optimiser nor step; here it is Adam on the gradient of each image divided by its size. The step
    decides whether α matters: steps of 0.1 pixels cross the whole range of pixels and forget the start (noise ratio 0.15,
    0.14, 0.14 at α 0.1, 0.5, 0.9; 16 images of CIFAR-10, LeNet). So by default the step is `lr`·α², short where the start
    is nearly the image: 0.04, 0.13, 0.14. Secrets: `refiner.start`, the noise.

    Args:
        alpha: share of noise at the start. Tables II and III: 1.
        beta: weight of PM.
        steps: of the optimisation. The paper: 100. Half of them with `beta1=0.5,beta2=0.9` look as noisy, and leave up to
            twice the UM at α 0.9 (docs/results/crafting.md).
        tau: factor of the weight of each further layer.
        utility: `normalised` or `printed`, see above.
        lr: step of Adam in pixels, at α 1, falling to 0.
        scaled: whether the step is multiplied by α² (by 0.01 at the least); else α hardly matters.
        beta1, beta2: of Adam.
        epochs: of the training of the evaluation network. The paper: 20.

    Example:
        >>> gv.protect(model, "refiner:steps=10,epochs=1", data=(x, y))
    """

    alpha: float = Field(default=1.0, ge=0, le=1)
    beta: float = Field(default=1.0, ge=0)
    steps: int = Field(default=100, ge=0)
    tau: float = Field(default=0.95, ge=0, le=1)
    utility: Literal["normalised", "printed"] = "normalised"
    lr: float = Field(default=0.1, gt=0)
    scaled: bool = True
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epochs: int = Field(default=20, ge=1)

    def prepare(self, setup: Setup) -> Evaluator:
        return evaluator_for(setup, self.epochs)

    def batch(self, batch: Batch, step: Step) -> Batch:
        evaluator: Evaluator = step.memory
        noise = step.rng.uniform(batch.x.shape)
        step.remember(**{"refiner.start": noise})
        draw = step.model.draw_noise(len(batch), step.rng)  # of a random model; the same in every comparison
        true = step.gradient(batch, draw)
        utility = Utility(true, step.model.parameters(step.state), self.tau, self.utility)

        x = torch.lerp(batch.x, noise, self.alpha).requires_grad_()
        lr = self.lr * max(self.alpha, LEAST) ** 2 if self.scaled else self.lr
        optimizer = torch.optim.Adam([x], lr=lr, betas=(self.beta1, self.beta2))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=max(self.steps, 1))
        for _ in Loop(self.steps):
            with torch.enable_grad():
                inputs = step.task.normalize(x)
                um = utility(step.model.gradient(step.state, inputs, batch.y, draw, differentiable=True))
                weight = (1 - um.detach()).clamp_min(0) if self.utility == "normalised" else 1.0
                loss = um - self.beta * weight * evaluator(x).mean()
                (slope,) = torch.autograd.grad(loss, x)
            # UM falls by orders of magnitude; unscaled, the first gradients would dominate the moments of Adam.
            size = slope.flatten(1).square().mean(1).sqrt().view(-1, 1, 1, 1)
            x.grad = slope / size.clamp_min(_TINY)
            optimizer.step()
            schedule.step()
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
            critical = {name: (1 + c / max(largest, _TINY)).sqrt() for name, c in critical.items()}  # squared below
        depth = _layers(list(true))
        self.weights = {name: c * tau ** depth[name] for name, c in critical.items()}
        of_zero = sum(float((w * true[name]).square().sum()) for name, w in self.weights.items())
        self.scale = max(of_zero, _TINY) if form == "normalised" else 1.0

    def __call__(self, gradient: Tensors) -> Tensor:
        parts = [(w * (gradient[name] - self.true[name])).square().sum() for name, w in self.weights.items()]
        return torch.stack(parts).sum() / self.scale


def _layers(names: list[str]) -> dict[str, int]:
    """The number of the layer of each tensor, counted from the input; a weight and its bias are in one layer."""
    order = {layer: i for i, layer in enumerate(dict.fromkeys(n.rpartition(".")[0] for n in names), start=1)}
    return {name: order[name.rpartition(".")[0]] for name in names}
