"""DCS²: hide the gradient of sensitive samples behind the gradient of concealed ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from gradveil.core.errors import UserError, shape_text
from gradveil.core.loops import Loop
from gradveil.core.losses import takes_classes
from gradveil.core.settings import settings
from gradveil.core.types import Batch, Tensors
from gradveil.defenses import Defense, Setup, Step, defense

_ENTRIES = 2**26  # entries of per-sample gradients in memory at a time


class Preset(NamedTuple):
    """The settings of the public scripts for a data set."""

    lambda_x: float
    lambda_z: float
    threshold: float


PRESETS = {
    "mnist": Preset(0.01, 0.01, 300),
    "cifar10": Preset(0.01, 0.01, 500),
    "celeba": Preset(0.01, 0.1, 500),
    "tinyimagenet": Preset(0.001, 0.01, 400),
}


def _sensitive(value: object) -> object:
    """Masks and lists of positions as text, so that the defense has a text form."""
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        value = value.nonzero().flatten()
    if isinstance(value, (Tensor, list, tuple)):
        value = "/".join(str(int(i)) for i in value)
    if not callable(value) and not re.fullmatch(r"all|last:[1-9]\d*|\d+(/\d+)*", str(value)):
        raise ValueError("all, last:K, positions in the batch such as 0/3, a mask, or a function of the batch")
    return value if callable(value) else str(value)


@defense("dcs2", random=True, version=2)
@settings
class DCS2(Defense):
    """Mix the gradient of concealed samples into the gradient of the sensitive ones.

    Wu et al., AAAI 2024. At every step, for each sensitive sample (x_s, y_s):

    1. Craft a concealed sample x_c with label y_c, from a start point that is not x_s, by minimising Eq. 9:
       1 − cos(∇L(x_c, y_c), ∇L(x_s, y_s)) + exp(−λx‖x_c − x_s‖) + λz‖f(x_c) − f(x_s)‖ / ‖f(x_s)‖.
       f is the output of the network, and distances are between normalised pixels.
    2. Add its gradient to that of the batch (Eq. 10): g_c = g + λg·∇L(x_c, y_c) + (1 − λg)·∇L(x_c, y_s).
    3. If ⟨g, g_c⟩ < 0, project: g_c + v·g with v = −⟨g, g_c⟩ / ‖g‖² (closed form of Eq. 12, which prints v for v²).

    Where paper and public code differ, the paper is the default. The code divides Eq. 10 by 3, by 2 where λg is 0 or 1
    (`divide`), and adds at least half of g when it projects (`margin=0.5`). The constant ε of Eq. 9 has no effect and is
    left out. The paper derives Eq. 9 for one sample and then writes ∇L(f(x_s), y_s) for the whole mini-batch; the code
    compares the joint gradients of all sensitive and of all concealed samples. Where BatchNorm in training mode couples
    the images of a batch, only the joint form is defined, and it is used. The early stop and the presets are the code's.

    Secrets: `dcs2.concealed`, `dcs2.concealed_labels`, `dcs2.sensitive` (positions) and `dcs2.lambda_g`.

    Args:
        sensitive: `all` (the paper), `last:K`, positions such as `0/3`, a mask, or a function Batch → mask.
        preset: the data set whose λx, λz and threshold are used.
        lambda_x, lambda_z: weights of Eq. 9; by default those of the preset.
        threshold: crafting stops at this distance; by default that of the preset.
        lambda_g: weight of Eq. 10.
        start: start points (Table 5): `data` takes random public images with their labels, `noise` has random labels;
            the `mixup` forms mix in 0.3 of x_s. Without public data it is noise, which the paper finds as good.
            `same-class` is ours: public images of the class of x_s, so that y_c = y_s.
        steps: of Adam. Published: 1000 at lr 0.1, which costs thousands of plain steps; 40 larger ones get as near
            (benchmarks/crafting.py).
        lr: of Adam, ×0.1 at 3/8, 5/8 and 7/8 of the steps. Published: 0.1.
        enough: crafting ends where the cosine of Eq. 9 has reached this. Published: 1, never.
        clamp: keep x_c in the range of pixels; paper and code do not, and x_c leaves it by far.
        match: `joint` as in the code; `each` matches every concealed sample with its sensitive one. That hides a little
            more and distorts the gradient more: a cosine ignores that most samples of a trained network have a small one.
        divide, margin: as in the public code, see above.
        length: `free` as published: nothing bounds the length of the concealed gradients, which can be many times that of
            g and move the training off. `kept` is ours: what is sent has the length of g.

    Example:
        >>> gv.protect(model, "dcs2:steps=20,preset=cifar10", data=(x, y))
    """

    sensitive: Annotated[str | Callable[[Batch], Tensor], BeforeValidator(_sensitive)] = "all"
    preset: Literal["mnist", "cifar10", "celeba", "tinyimagenet"] = "mnist"
    lambda_x: float | None = Field(default=None, ge=0)
    lambda_z: float | None = Field(default=None, ge=0)
    threshold: float | None = Field(default=None, gt=0)
    lambda_g: float = Field(default=0.7, ge=0, le=1)
    start: Literal["data", "noise", "mixup", "noise-mixup", "same-class"] = "data"
    steps: int = Field(default=40, ge=0)
    lr: float = Field(default=0.3, gt=0)
    enough: float = Field(default=0.95, gt=0, le=1)
    clamp: bool = False
    match: Literal["joint", "each"] = "joint"
    divide: bool = False
    margin: float = Field(default=0.0, ge=0)
    length: Literal["free", "kept"] = "free"

    def prepare(self, setup: Setup) -> Batch | None:
        if setup.private.y.ndim == 2 and not takes_classes(setup.model.loss_fn, setup.task.num_outputs):
            raise UserError("dcs2 draws class labels for concealed samples; the targets of this loss are not classes.")
        if setup.public is not None and setup.public.x.shape[1:] != setup.private.x.shape[1:]:
            public, private = (shape_text(b.x.shape[1:]) for b in (setup.public, setup.private))
            raise UserError(f"dcs2 starts from public images; these are {public}, the private images are {private}.")
        return setup.public

    def gradient(self, tensors: Tensors, step: Step) -> Tensors:
        index = self.select(step.batch)
        if len(index) == 0:
            return tensors
        private, noise = step.batch[index], {k: v[index] for k, v in step.noise.items()}
        start = self._start(private, step)
        start_noise = step.model.draw_noise(len(index), step.rng)
        x = self.craft(private, start, step, noise, start_noise)

        a, b = (step.model.gradient(step.state, x, y, start_noise) for y in (start.y, private.y))
        mixed = {k: (g + self.lambda_g * a[k] + (1 - self.lambda_g) * b[k]) / self.divisor for k, g in tensors.items()}
        secrets = {"concealed": step.task.denormalize(x), "concealed_labels": start.y, "sensitive": index}
        step.remember(**{f"dcs2.{name}": rows for name, rows in secrets.items()})
        step.secrets["dcs2.lambda_g"] = torch.tensor(self.lambda_g)
        sent = project(mixed, tensors, self.margin)
        return sent if self.length == "free" else _of_length(sent, tensors)

    @property
    def divisor(self) -> int:
        """What the sum of Eq. 10 is divided by."""
        return 1 if not self.divide else 2 if self.lambda_g in (0, 1) else 3

    def select(self, batch: Batch) -> Tensor:
        """The positions of the sensitive samples in a batch."""
        if callable(self.sensitive):
            mask = self.sensitive(batch)
            if mask.shape != (len(batch),) or mask.dtype != torch.bool:
                raise UserError(f"dcs2: sensitive(batch) must return {len(batch)} booleans, one per image.")
            return mask.nonzero().flatten()
        if self.sensitive == "all":
            return torch.arange(len(batch))
        if self.sensitive.startswith("last:"):
            return torch.arange(max(0, len(batch) - int(self.sensitive.removeprefix("last:"))), len(batch))
        positions = [int(i) for i in self.sensitive.split("/")]
        if max(positions) >= len(batch):
            raise UserError(
                f"dcs2: position {max(positions)} is outside this batch of {len(batch)}; "
                "use sensitive=last:K, or a function of the batch."
            )
        return torch.tensor(positions)

    def _start(self, private: Batch, step: Step) -> Batch:
        """One start point per sensitive sample, as network inputs."""
        n, public = len(private), step.memory
        if public is not None and not self.start.startswith("noise"):
            pick = self._picked(private, public, step)
            x, y = step.task.normalize(public.x[pick].to(private.x)), public[pick].hard_labels.cpu()
        if public is None or self.start.startswith("noise"):
            x = step.rng.normal(private.x.shape).to(private.x)
            y = torch.full((n,), step.task.num_outputs)
        random = step.rng.integers(0, step.task.num_outputs, (n,))  # for noise, and for unknown classes
        if self.start.endswith("mixup"):
            x = 0.7 * x + 0.3 * step.task.normalize(private.x)
        return Batch(x, torch.where(y < step.task.num_outputs, y, random).to(private.y.device))

    def _picked(self, private: Batch, public: Batch, step: Step) -> Tensor:
        """The public images to start from: any, or of each sample's class, where there are such images."""
        drawn = step.rng.integers(0, len(public), (len(private),))
        if self.start != "same-class":
            return drawn
        classes = public.hard_labels.cpu()
        alike = [(classes == label).nonzero().flatten() for label in private.hard_labels.cpu()]
        return torch.stack([rows[k % len(rows)] if len(rows) else k for rows, k in zip(alike, drawn, strict=True)])

    def craft(self, private: Batch, start: Batch, step: Step, noise: Tensors, start_noise: Tensors) -> Tensor:
        """Concealed samples, as network inputs. `noise`, `start_noise`: the draws of a random model for both batches."""
        joint = self.match == "joint" or step.model.couples_images
        size = len(private) if joint else max(1, _ENTRIES // sum(step.state[k].numel() for k in step.model.trainable))
        crafted = []
        for i in range(0, len(private), size):
            part = slice(i, i + size)
            x = step.task.normalize(private.x[part])
            target = Side(x, private.y[part], {k: v[part] for k, v in noise.items()})
            begin = Side(start.x[part], start.y[part], {k: v[part] for k, v in start_noise.items()})
            crafted.append(self._minimise(target, begin, step, joint))
        return torch.cat(crafted)

    def _minimise(self, target: Side, start: Side, step: Step, joint: bool) -> Tensor:
        """Eq. 9 by Adam. A row holds one sample, or with `joint` all of them; rows are independent."""
        preset = PRESETS[self.preset]
        lambda_x = preset.lambda_x if self.lambda_x is None else self.lambda_x
        lambda_z = preset.lambda_z if self.lambda_z is None else self.lambda_z
        threshold = preset.threshold if self.threshold is None else self.threshold
        low, high = (step.task.normalize(torch.full_like(target.x, v)) for v in (0.0, 1.0))

        def rows(t: Tensor) -> Tensor:
            return t[None] if joint else t[:, None]

        def evaluate(side: Side) -> tuple[Tensor, Tensor]:
            """The gradient of each row, flattened, and the output of the network for each image."""
            if len(rows(side.x)) == 1:
                return _one_pass(side, step)
            noise = {k: rows(v) for k, v in side.noise.items()}
            gradients = step.model.gradients(step.state, rows(side.x), rows(side.y), noise)
            flat = torch.cat([g.flatten(1) for g in gradients.values()], dim=1)
            return flat, step.model(step.state, side.x, side.noise)

        target_gradient, target_output = (t.detach() for t in evaluate(target))
        x = start.x.clone().requires_grad_()
        optimizer = torch.optim.Adam([x], lr=self.lr)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [int(self.steps / p) for p in (2.667, 1.6, 1.142)])
        moving = torch.ones(len(rows(x)), dtype=torch.bool, device=x.device)
        for _ in Loop(self.steps):
            with torch.enable_grad():
                gradient, output = evaluate(start._replace(x=x))
                cosine = torch.cosine_similarity(gradient, target_gradient, dim=1, eps=1e-12)
                distance = rows((x - target.x).flatten(1).norm(dim=1)).mean(1)
                shift = (output - target_output).norm(dim=1) / target_output.norm(dim=1)
                value = 1 - cosine + torch.exp(-lambda_x * distance) + lambda_z * rows(shift).mean(1)
                (x.grad,) = torch.autograd.grad(value.sum(), x)
            moving &= (distance.detach() <= threshold) & (cosine.detach() < self.enough)
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
    """Network inputs, labels, and the draw of a random model for them."""

    x: Tensor
    y: Tensor
    noise: Tensors


def _one_pass(side: Side, step: Step) -> tuple[Tensor, Tensor]:
    """The gradient of a single row and its output by plain autograd: half the time of `vmap` on a small network."""
    outputs: list[Tensor] = []
    hook = step.model.module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        gradient = step.model.gradient(step.state, *side, differentiable=True)
    finally:
        hook.remove()
    return torch.cat([g.flatten() for g in gradient.values()])[None], outputs[0]


def project(mixed: Tensors, true: Tensors, margin: float = 0.0) -> Tensors:
    """The gradient nearest to `mixed` whose inner product with `true` is not negative (Eq. 11, 12)."""
    inner = sum(float((true[k].double() * g.double()).sum()) for k, g in mixed.items())
    if inner >= 0:
        return mixed
    v = max(margin, -inner / sum(float((g.double() ** 2).sum()) for g in true.values()))
    return {k: g + v * true[k] for k, g in mixed.items()}


def _of_length(tensors: Tensors, like: Tensors) -> Tensors:
    """The same direction with the length of another gradient."""
    ours, theirs = (torch.cat([g.double().flatten() for g in t.values()]).norm() for t in (tensors, like))
    return {name: (g * (theirs / ours.clamp_min(1e-300))).to(g.dtype) for name, g in tensors.items()}
