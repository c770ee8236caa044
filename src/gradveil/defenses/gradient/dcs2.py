"""DCS² (Wu et al., AAAI 2024): hide the gradient of sensitive samples behind that of concealed ones.

At every step, for each sensitive sample (x_s, y_s):
1. Craft a concealed sample x_c with label y_c, from a start point that is not x_s, by minimising Eq. 9:
   1 − cos(∇L(x_c, y_c), ∇L(x_s, y_s)) + exp(−λx‖x_c − x_s‖) + λz‖f(x_c) − f(x_s)‖ / ‖f(x_s)‖,
   alike for the server's model, unlike to the eye. f is the network's output, distances are of normalised pixels.
2. Add its gradient to the one of the batch (Eq. 10): g_c = g + λg·∇L(x_c, y_c) + (1 − λg)·∇L(x_c, y_s).
3. If ⟨g, g_c⟩ < 0, project: g_c + v·g, by the closed form of Eq. 12, v = −⟨g, g_c⟩ / ‖g‖².

Several sensitive samples: the paper derives Eq. 9 for one and then writes ∇L(f(x_s), y_s) for the whole mini-batch, and
its code compares the joint gradient of all sensitive samples with that of all concealed ones (`match=joint`, the
default). With `match=each` every concealed sample follows its own. That hides a little more and costs more: a cosine
does not see that on a trained net most samples hardly pull, and the sum of their doubles points elsewhere. Where
BatchNorm in training mode couples the images of a batch only the joint reading is defined, and it is taken.

Where paper and public code differ the paper is the default:
- the code divides Eq. 10 by 3, by 2 where λg is 0 or 1 (`divide`), and adds at least half of g when it projects
  (`margin=0.5`). Eq. 12 prints v where v² is meant. The constant ε of Eq. 9 has no effect and is left out.
- neither keeps x_c in the range of pixels, and it does leave it by far; `clamp` keeps it there.
The early stop is the code's; so are the settings of each data set (`preset`).

Start points (Table 5): images of the client's public data, whichever they are, with their labels; `noise` with random
labels; either with 0.3 of x_s mixed in. A client without public data starts from noise, which the paper finds as good.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from gradveil.core.errors import UserError
from gradveil.core.losses import takes_classes
from gradveil.core.settings import settings
from gradveil.core.types import Batch, Tensors
from gradveil.defenses.base import Defense, Setup, Step
from gradveil.defenses.registry import defense

_ENTRIES = 2**26  # entries of per-sample gradients held at once


class Preset(NamedTuple):
    """What the public scripts set for a data set."""

    lambda_x: float
    lambda_z: float
    threshold: float


PRESETS = {
    "mnist": Preset(0.01, 0.01, 300),
    "cifar10": Preset(0.01, 0.01, 500),
    "celeba": Preset(0.01, 0.1, 500),
    "tinyimagenet": Preset(0.001, 0.01, 400),
}


def _sensitive(value: Any) -> Any:
    """Masks and lists of positions as text, so that a defense can be written down."""
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        value = value.nonzero().flatten()
    if isinstance(value, (Tensor, list, tuple)):
        value = "/".join(str(int(i)) for i in value)
    if not callable(value) and not re.fullmatch(r"all|last:[1-9]\d*|\d+(/\d+)*", str(value)):
        raise ValueError("all, last:K, positions in the batch such as 0/3, a mask, or a function of the batch")
    return value if callable(value) else str(value)


@defense("dcs2", counters=["dcs2-average-start", "dcs2-joint"], random=True)
@settings
class DCS2(Defense):
    """Mix the gradient of concealed samples into that of the sensitive ones."""

    sensitive: Annotated[str | Callable[[Batch], Tensor], BeforeValidator(_sensitive)] = "all"  # the paper: all
    preset: Literal["mnist", "cifar10", "celeba", "tinyimagenet"] = "mnist"
    lambda_x: float | None = Field(default=None, ge=0)  # None: the preset's, as the next two
    lambda_z: float | None = Field(default=None, ge=0)
    threshold: float | None = Field(default=None, gt=0)  # of the distance at which crafting stops
    lambda_g: float = Field(default=0.7, ge=0, le=1)
    start: Literal["data", "noise", "mixup", "noise-mixup"] = "data"
    steps: int = Field(default=1000, ge=0)
    lr: float = Field(default=0.1, gt=0)  # Adam's, ×0.1 at 3/8, 5/8 and 7/8 of the steps
    clamp: bool = False
    match: Literal["joint", "each"] = "joint"
    divide: bool = False
    margin: float = Field(default=0.0, ge=0)

    def prepare(self, setup: Setup) -> Batch | None:
        if setup.private.y.ndim == 2 and not takes_classes(setup.model.loss_fn, setup.task.num_outputs):
            raise UserError(
                "dcs2 draws class labels for concealed samples, and under this loss targets are no classes."
            )
        if setup.public is not None and setup.public.x.shape[1:] != setup.private.x.shape[1:]:
            shapes = [tuple(b.x.shape[1:]) for b in (setup.public, setup.private)]
            raise UserError(f"dcs2 starts from public images: theirs is {shapes[0]}, the private ones' is {shapes[1]}.")
        return setup.public

    def gradient(self, tensors: Tensors, step: Step) -> Tensors:
        index = self.select(step.batch)
        if len(index) == 0:
            return tensors
        private, noise = step.batch[index], {k: v[index] for k, v in step.noise.items()}
        start = self._start(private, step)
        own = step.model.draw_noise(len(index), step.rng)
        x = self.craft(private, start, step, noise, own)

        a, b = (step.model.gradient(step.state, x, y, own) for y in (start.y, private.y))
        mixed = {k: (g + self.lambda_g * a[k] + (1 - self.lambda_g) * b[k]) / self.divisor for k, g in tensors.items()}
        _tell(step, concealed=step.task.denormalize(x), concealed_labels=start.y, sensitive=index)
        step.secrets["dcs2.lambda_g"] = torch.tensor(self.lambda_g)
        return project(mixed, tensors, self.margin)

    @property
    def divisor(self) -> int:
        """What the sum of Eq. 10 is divided by."""
        return 1 if not self.divide else 2 if self.lambda_g in (0, 1) else 3

    def select(self, batch: Batch) -> Tensor:
        """The positions of the sensitive samples in a batch."""
        if callable(self.sensitive):
            mask = self.sensitive(batch)
            if mask.shape != (len(batch),) or mask.dtype != torch.bool:
                raise UserError(f"dcs2: sensitive(batch) must give {len(batch)} booleans, one for each image.")
            return mask.nonzero().flatten()
        if self.sensitive == "all":
            return torch.arange(len(batch))
        if self.sensitive.startswith("last:"):
            return torch.arange(max(0, len(batch) - int(self.sensitive.removeprefix("last:"))), len(batch))
        positions = [int(i) for i in self.sensitive.split("/")]
        if max(positions) >= len(batch):
            raise UserError(
                f"dcs2: position {max(positions)} is beyond this batch of {len(batch)}; "
                "say sensitive=last:K, or give a function of the batch."
            )
        return torch.tensor(positions)

    def _start(self, private: Batch, step: Step) -> Batch:
        """One start point a sensitive sample, in the network's input space."""
        n, public = len(private), step.memory
        if public is not None and not self.start.startswith("noise"):
            pick = torch.randint(len(public), (n,), generator=step.rng)
            x, y = step.task.normalize(public.x[pick].to(private.x)), public[pick].hard_labels.cpu()
        if public is None or self.start.startswith("noise"):
            x = torch.randn(private.x.shape, generator=step.rng).to(private.x)
            y = torch.full((n,), step.task.num_outputs)
        foreign = torch.randint(step.task.num_outputs, (n,), generator=step.rng)  # noise, or images of another task
        if self.start.endswith("mixup"):
            x = 0.7 * x + 0.3 * step.task.normalize(private.x)
        return Batch(x, torch.where(y < step.task.num_outputs, y, foreign).to(private.y.device))

    def craft(self, private: Batch, start: Batch, step: Step, noise: Tensors, own: Tensors) -> Tensor:
        """Concealed samples, in the network's input space; `noise`, `own`: a random model's draws for both sides."""
        joint = self.match == "joint" or _coupled(step)
        size = len(private) if joint else max(1, _ENTRIES // sum(step.state[k].numel() for k in step.model.trainable))
        done = []
        for i in range(0, len(private), size):
            part = slice(i, i + size)
            there = Side(private.x[part], private.y[part], {k: v[part] for k, v in noise.items()})
            here = Side(start.x[part], start.y[part], {k: v[part] for k, v in own.items()})
            done.append(self._minimise(there._replace(x=step.task.normalize(there.x)), here, step, joint))
        return torch.cat(done)

    def _minimise(self, there: Side, here: Side, step: Step, joint: bool) -> Tensor:
        """Eq. 9 by Adam. Samples stand alone, in a row each, or together in one; rows are independent."""
        preset = PRESETS[self.preset]
        lambda_x = preset.lambda_x if self.lambda_x is None else self.lambda_x
        lambda_z = preset.lambda_z if self.lambda_z is None else self.lambda_z
        threshold = preset.threshold if self.threshold is None else self.threshold
        low, high = (step.task.normalize(torch.full_like(there.x, v)) for v in (0.0, 1.0))

        def rows(t: Tensor) -> Tensor:
            return t[None] if joint else t[:, None]

        def look(side: Side) -> tuple[Tensor, Tensor]:
            """The gradient of each row, flattened, and the network's output for each image."""
            if len(rows(side.x)) == 1:
                return _one_pass(side, step)
            noise = {k: rows(v) for k, v in side.noise.items()}
            found = step.model.gradients(step.state, rows(side.x), rows(side.y), noise)
            return torch.cat([g.flatten(1) for g in found.values()], dim=1), step.model(step.state, side.x, side.noise)

        wanted, latent = (t.detach() for t in look(there))
        x = here.x.clone().requires_grad_()
        optimizer = torch.optim.Adam([x], lr=self.lr)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [int(self.steps / p) for p in (2.667, 1.6, 1.142)])
        moving = torch.ones(len(rows(x)), dtype=torch.bool, device=x.device)
        for _ in range(self.steps):
            with torch.enable_grad():
                found, output = look(here._replace(x=x))
                likeness = torch.cosine_similarity(found, wanted, dim=1, eps=1e-12)
                distance = rows((x - there.x).flatten(1).norm(dim=1)).mean(1)
                shift = (output - latent).norm(dim=1) / latent.norm(dim=1)
                value = 1 - likeness + torch.exp(-lambda_x * distance) + lambda_z * rows(shift).mean(1)
                (x.grad,) = torch.autograd.grad(value.sum(), x)
            moving &= distance.detach() <= threshold
            if not moving.any():
                break
            before = x.detach().clone()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                after = torch.minimum(torch.maximum(x, low), high) if self.clamp else x
                x.copy_(torch.where(moving.view(-1, 1, 1, 1), after, before))
        return x.detach()


class Side(NamedTuple):
    """Images as the network takes them, labels, and the draw of a random model for them."""

    x: Tensor
    y: Tensor
    noise: Tensors


def _one_pass(side: Side, step: Step) -> tuple[Tensor, Tensor]:
    """The gradient of a single row and its output by plain autograd: half the time of `vmap` on a small net."""
    parameters = {k: v.detach().requires_grad_() for k, v in step.model.parameters(step.state).items()}
    seen: list[Tensor] = []
    hook = step.model.module.register_forward_hook(lambda _module, _given, output: seen.append(output))
    try:
        with torch.enable_grad():
            value = step.model.loss({**step.state, **parameters}, side.x, side.y, side.noise)
            leaves = list(parameters.values())
            found = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True, allow_unused=True)
    finally:
        hook.remove()
    return torch.cat([g.flatten() for g in found])[None], seen[0]


def project(mixed: Tensors, true: Tensors, margin: float = 0.0) -> Tensors:
    """The gradient nearest to `mixed` that does not point away from `true` (Eq. 11, 12)."""
    inner = sum(float((true[k].double() * g.double()).sum()) for k, g in mixed.items())
    if inner >= 0:
        return mixed
    v = max(margin, -inner / sum(float((g.double() ** 2).sum()) for g in true.values()))
    return {k: g + v * true[k] for k, g in mixed.items()}


def _coupled(step: Step) -> bool:
    """Whether an image's gradient depends on the others of its batch."""
    norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in step.model.module.modules())
    return norms and step.model.mode == "train"


def _tell(step: Step, **found: Tensor) -> None:
    """Secrets of a step, after those of the steps before it."""
    for name, value in found.items():
        known = step.secrets.get(f"dcs2.{name}")
        step.secrets[f"dcs2.{name}"] = value if known is None else torch.cat([known, value])
