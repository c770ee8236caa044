"""GradDefense (Wang et al., INFOCOM 2022): noise on random slices of the gradient, cut by how sensitive each layer is.

1. A layer's sensitivity is the mean over a small root set of ‖∂(Σ ∇_θ_l L)/∂x‖_F: how far its gradient follows the
   image.
2. The flattened gradient, each layer's sensitivity spread evenly over its entries, is cut into `slices` of equal
   cumulative sensitivity.
3. At every step `noised` slices, drawn at random, get Gaussian noise. With `clip`, each image's part of these slices is
   first scaled down to a norm of at most `std`.

The root set is public data, or the client's own where there is none: it only moves the cuts. The public code measures
the sensitivity where it is used; here once, on the client's first weights, or with `refresh` at every step. Its early
demonstrations add noise of 0.1, the later ones of 5e-4 (the default). Its denoising is left out: it is the server's
work on the aggregate (dropping the principal components that look like noise) and hides nothing.

Note that under softmax the gradients of a classifier's rows add up to zero, so that its own sensitivity is zero and the
whole of it lies in the last slice, as in the public code.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.settings import settings
from gradveil.core.types import Batch, Noise, Tensors
from gradveil.defenses.base import Defense, Setup, Step
from gradveil.defenses.registry import defense


@defense("graddefense", counters=["noise-likelihood"], random=True)
@settings
class GradDefense(Defense):
    """Gaussian noise on `noised` of `slices` slices of equal sensitivity."""

    slices: int = Field(default=10, ge=1)
    noised: int = Field(default=5, ge=0)
    std: float = Field(default=5e-4, ge=0)
    clip: bool = False
    root: int = Field(default=50, ge=1)  # images of the root set
    refresh: bool = False  # measure the sensitivity anew at every step

    def __post_init__(self) -> None:
        if self.noised > self.slices:
            raise UserError(f"graddefense: noised={self.noised} is more than there are (slices={self.slices}).")

    def added_noise(self, examples: int) -> Noise:
        return Noise(self.std)  # on the slices that were drawn, which an adversary does not know

    def prepare(self, setup: Setup) -> tuple[Batch, Tensor]:
        source = setup.public if setup.public is not None else setup.private
        pick = torch.randperm(len(source), generator=setup.rng)[: self.root]
        step = Step(setup.task, setup.state, source[pick], setup.rng)
        return step.batch, self.cuts(step, step.batch)

    def gradient(self, tensors: Tensors, step: Step) -> Tensors:
        root, cuts = step.memory
        if self.refresh:
            cuts = self.cuts(step, root)
        chosen = torch.randperm(self.slices, generator=step.rng)[: self.noised].sort().values
        parts = [slice(int(cuts[i]), int(cuts[i + 1])) for i in chosen]
        flat = torch.cat([g.flatten() for g in tensors.values()])
        if self.clip:
            self._clip(flat, parts, step)
        for part in parts:
            flat[part] += self.std * torch.randn(flat[part].shape, generator=step.rng).to(flat)
        step.secrets["graddefense.noised"] = torch.stack([cuts[chosen], cuts[chosen + 1]], dim=1)
        split = flat.split([g.numel() for g in tensors.values()])
        return {name: part.view_as(g).to(g) for part, (name, g) in zip(split, tensors.items(), strict=True)}

    def _clip(self, flat: Tensor, parts: list[slice], step: Step) -> None:
        """Put in the chosen slices the mean over images of what each contributes, scaled to a norm of at most `std`."""
        coupled = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in step.model.module.modules())
        if coupled and step.model.mode == "train":
            raise UserError("graddefense:clip=true needs one image at a time; BatchNorm in training mode couples them.")
        for part in parts:
            flat[part] = 0
        for i in range(len(step.batch)):
            noise = {name: draw[i : i + 1] for name, draw in step.noise.items()}
            one = torch.cat([g.flatten() for g in step.gradient(step.batch[i : i + 1], noise).values()])
            for part in parts:
                flat[part] += one[part] * (self.std / one[part].norm().clamp_min(1e-12)).clamp_max(1) / len(step.batch)

    def cuts(self, step: Step, root: Batch) -> Tensor:
        """Where the slices of the flattened gradient begin, and where the last one ends."""
        noise = step.model.draw_noise(len(root), step.rng)
        size = sensitivity(step.model, step.state, step.task.normalize(root.x), root.y, noise)
        counts = torch.tensor([p.numel() for p in step.model.parameters(step.state).values()])
        total = (size.double().cpu() / counts).repeat_interleave(counts).cumsum(0)
        inner = torch.searchsorted(total, total[-1] * torch.arange(1, self.slices) / self.slices)
        return torch.cat([torch.tensor([0]), inner, torch.tensor([len(total)])])


def sensitivity(model: ModelFunction, state: Tensors, x: Tensor, y: Tensor, noise: Tensors | None = None) -> Tensor:
    """For each trained tensor: the mean over images of the norm of ∂(sum of its gradient)/∂image."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        own = {k: v[None] for k, v in (noise or {}).items()}
        found = model.gradients(state, x[None], y[None], own, route="loop")
        backs = [torch.autograd.grad(g.sum(), x, retain_graph=True)[0] for g in found.values()]
    return torch.stack([back.flatten(1).norm(dim=1).mean() for back in backs])
