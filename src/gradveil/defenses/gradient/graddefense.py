"""GradDefense: noise on random slices of the gradient, cut by the sensitivity of each layer."""

import torch
from pydantic import Field
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.settings import settings
from gradveil.core.types import Batch, Noise, Tensors
from gradveil.defenses import Defense, Setup, Step, defense


@defense("graddefense", random=True)
@settings
class GradDefense(Defense):
    """Add Gaussian noise to random slices of the gradient, which have equal sensitivity.

    Wang et al., INFOCOM 2022.

    1. The sensitivity of a layer is the mean over a small root set of ‖∂(Σ ∇_θ_l L)/∂x‖_F: how strongly its gradient
       depends on the image.
    2. The flattened gradient is cut into slices of equal cumulative sensitivity; the sensitivity of a layer is spread
       evenly over its entries.
    3. At every step randomly drawn slices get noise. With `clip`, the part of each image in these slices is first
       scaled down to a norm of at most `std`.

    The root set is public data, or the client's data where there is none: it only moves the cuts. The public code
    measures the sensitivity at every step; here it is measured once, at the first weights of the client, unless
    `refresh` is set. The denoising of the paper is left out: the server removes principal components of the aggregate
    that look like noise, which hides nothing. Under softmax the gradients of the rows of a classifier sum to zero, so
    its sensitivity is zero and all of it lies in the last slice, as in the public code.

    Args:
        slices: number of slices.
        noised: number of slices that get noise.
        std: of the noise. Early demonstrations of the code: 0.1; later ones: 5e-4.
        clip: whether to clip the part of each image.
        root: number of images in the root set.
        refresh: measure the sensitivity at every step.

    Example:
        >>> gv.protect(model, "graddefense:noised=10,std=0.1", data=(x, y))
    """

    slices: int = Field(default=10, ge=1)
    noised: int = Field(default=5, ge=0)
    std: float = Field(default=5e-4, ge=0)
    clip: bool = False
    root: int = Field(default=50, ge=1)
    refresh: bool = False

    def __post_init__(self) -> None:
        if self.noised > self.slices:
            raise UserError(f"graddefense: noised={self.noised} is more than slices={self.slices}.")

    def added_noise(self, examples: int) -> Noise:
        return Noise(self.std)  # on the slices that were drawn, which an adversary does not know

    def prepare(self, setup: Setup) -> tuple[Batch, Tensor]:
        source = setup.public if setup.public is not None else setup.private
        pick = setup.rng.permutation(len(source))[: self.root]
        step = Step(setup.task, setup.state, source[pick], setup.rng)
        return step.batch, self.cuts(step, step.batch)

    def gradient(self, tensors: Tensors, step: Step) -> Tensors:
        root, cuts = step.memory
        if self.refresh:
            cuts = self.cuts(step, root)
        chosen = step.rng.permutation(self.slices)[: self.noised].sort().values
        parts = [slice(int(cuts[i]), int(cuts[i + 1])) for i in chosen]
        flat = torch.cat([g.flatten() for g in tensors.values()])
        if self.clip:
            self._clip(flat, parts, step)
        for part in parts:
            flat[part] = step.rng.added_normal(flat[part], self.std)
        step.secrets["graddefense.noised"] = torch.stack([cuts[chosen], cuts[chosen + 1]], dim=1)
        split = flat.split([g.numel() for g in tensors.values()])
        return {name: part.view_as(g).to(g) for part, (name, g) in zip(split, tensors.items(), strict=True)}

    def _clip(self, flat: Tensor, parts: list[slice], step: Step) -> None:
        """Replace these slices by the mean over images of the part of each image, scaled to a norm of at most `std`."""
        if step.model.couples_images:
            raise UserError("graddefense:clip=true needs one image at a time; BatchNorm in training mode couples them.")
        for part in parts:
            flat[part] = 0
        for i in range(len(step.batch)):
            noise = {name: draw[i : i + 1] for name, draw in step.noise.items()}
            one = torch.cat([g.flatten() for g in step.gradient(step.batch[i : i + 1], noise).values()])
            for part in parts:
                flat[part] += one[part] * (self.std / one[part].norm().clamp_min(1e-12)).clamp_max(1) / len(step.batch)

    def cuts(self, step: Step, root: Batch) -> Tensor:
        """Where the slices of the flattened gradient begin, and where the last slice ends (slices + 1 numbers)."""
        noise = step.model.draw_noise(len(root), step.rng)
        size = sensitivity(step.model, step.state, step.task.normalize(root.x), root.y, noise)
        counts = torch.tensor([p.numel() for p in step.model.parameters(step.state).values()])
        total = (size.double().cpu() / counts).repeat_interleave(counts).cumsum(0)
        inner = torch.searchsorted(total, total[-1] * torch.arange(1, self.slices) / self.slices)
        return torch.cat([torch.tensor([0]), inner, torch.tensor([len(total)])])


def sensitivity(model: ModelFunction, state: Tensors, x: Tensor, y: Tensor, noise: Tensors | None = None) -> Tensor:
    """Per trained tensor: the mean over images of the norm of ∂(sum of its gradient)/∂image."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        noise = {k: v[None] for k, v in (noise or {}).items()}
        gradients = model.gradients(state, x[None], y[None], noise, route="loop")
        slopes = [torch.autograd.grad(g.sum(), x, retain_graph=True)[0] for g in gradients.values()]
    return torch.stack([slope.flatten(1).norm(dim=1).mean() for slope in slopes])
