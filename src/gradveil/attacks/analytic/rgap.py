"""R-GAP (Zhu and Blaschko 2021): layer by layer back to the image, each layer a linear least-squares problem.

The first fully connected layer gives its input and the signal at it exactly (see `matching/head.py`). Going back through
an invertible activation gives a convolution's output z and the signal k at it; its input u then satisfies two sets of
linear equations at once: conv(u) + b = z, and ∇W = the correlation of u with k. Both are solved together in float64.

A ReLU hides what it cut off, so only its open units give equations of the first kind. That is often enough for hidden
layers; what stays open of the image itself is filled in as smoothly as the equations allow.

Needs single images, clean gradients and a straight line of convolutions with sigmoid, tanh or (leaky) ReLU activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.nn import grad as conv_grad

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.attacks.matching.head import exact_input, linear_layers
from gradveil.attacks.registry import attack
from gradveil.settings import settings
from gradveil.types import Observation

_ACTIVATIONS = (nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.ReLU)
_OPEN = 1e-5  # share of the largest activation above which a ReLU counts as open
_NEUTRAL = (nn.Flatten, nn.Identity, nn.Dropout)


@attack("rgap")
@settings
class RGAP(Attack):
    """Recursive closed-form inversion of a plain convolutional net."""

    ridge: float = Field(default=1e-12, ge=0)
    smooth: float = Field(
        default=1e-8, ge=0
    )  # weight of squared differences of neighbouring pixels, for the image alone

    def applies(self, observation: Observation) -> str | None:
        if observation.knowledge.batch_size != 1 or observation.update.kind != "gradient":
            return "it needs the gradient of a single image"
        if _line(observation) is None:
            return "it needs a straight line of convolutions and activations, without pooling, before a linear layer"
        return None

    def run(self, target: Target) -> Answer:
        rows = [self._one(o) for o in target.observations]
        return Answer(torch.stack([x for x, _ in rows]), torch.stack([s for _, s in rows]))

    def _one(self, observation: Observation) -> tuple[Tensor, Tensor]:
        line = _line(observation)
        assert line is not None
        exact = exact_input(observation, line.pop()[0])
        if exact is None:
            nothing = torch.zeros(1, *observation.input_shape)
            return nothing, torch.tensor(1.0)
        a, signal = (t.double() for t in exact)
        worst = torch.tensor(0.0, dtype=torch.float64)
        while line:
            path, shapes, activation = line.pop()
            z, slope = _undo(activation, a)
            k = signal * slope
            a, error = self._invert(observation, path, shapes, z, k, slope)
            worst = torch.maximum(worst, error)
            weight = observation.state[f"{path}.weight"].double()
            conv = observation.model.module.get_submodule(path)
            signal = conv_grad.conv2d_input(
                (1, *shapes[0]),
                weight,
                k.view(1, *shapes[1]),
                conv.stride,
                conv.padding,
                conv.dilation,  # type: ignore[arg-type]
            ).flatten()
        return a.float().view(1, *observation.input_shape), worst.float()

    def _invert(
        self,
        observation: Observation,
        path: str,
        shapes: tuple[torch.Size, torch.Size],
        z: Tensor,
        k: Tensor,
        slope: Tensor,
    ) -> tuple[Tensor, Tensor]:
        conv = observation.model.module.get_submodule(path)
        weight, sent = (
            observation.state[f"{path}.weight"].double(),
            observation.update.tensors[f"{path}.weight"].double(),
        )
        bias = observation.state.get(f"{path}.bias")
        (channels, height, width), out = shapes[0], shapes[1][0]
        # Which pixel each kernel place reads at each output place; 0 is the padding.
        numbers = torch.arange(1, height * width + 1, dtype=torch.float64).view(1, 1, height, width)
        index = F.unfold(numbers, conv.kernel_size, conv.dilation, conv.padding, conv.stride)[0].long()  # type: ignore[arg-type]
        pixels, places = height * width, index.shape[1]
        kernel = weight.shape[2] * weight.shape[3]

        # conv(u) = z − b: a row for every output place, a column for every pixel of every channel.
        row = torch.arange(out * places).view(out, 1, 1, places).expand(-1, channels, kernel, -1)
        column = index + torch.arange(channels).view(1, -1, 1, 1) * (pixels + 1)
        values = weight.view(out, channels, kernel, 1).expand(-1, -1, -1, places)
        forward = _sparse(row, column.expand_as(row), values, (out * places, channels * (pixels + 1)))
        inside = (torch.arange(channels * (pixels + 1)) % (pixels + 1) != 0).numpy()
        forward = forward[:, inside]
        wanted = z - (bias.double().repeat_interleave(places) if bias is not None else 0)
        trust = slope.abs().numpy()  # z came through the activation's inverse: it is as sure as its slope
        forward_t, wanted_t = scipy.sparse.diags(trust) @ forward, wanted.numpy() * trust

        # ∇W of one input channel reads that channel alone, by the same matrix for all.
        row = torch.arange(out * kernel).view(out, kernel, 1).expand(-1, -1, places)
        values = k.view(out, 1, places).expand(-1, kernel, -1)
        back = _sparse(row, index.expand_as(row), values, (out * kernel, pixels + 1))[:, 1:]
        scale = scipy.sparse.linalg.norm(forward_t) / max(scipy.sparse.linalg.norm(back), 1e-30) / channels**0.5
        given = sent.view(out, channels, kernel).transpose(0, 1).reshape(channels, out * kernel).numpy()
        gram = (forward_t.T @ forward_t).toarray()
        right = forward_t.T @ wanted_t + (scale**2 * (given @ back)).ravel()
        block = scale**2 * (back.T @ back).toarray()
        size = float((gram.trace() + channels * block.trace()) / len(gram))
        if shapes[0] == observation.input_shape and self.smooth:
            block = block + self.smooth * size * _roughness(height, width)
        for c in range(channels):
            gram[c * pixels : (c + 1) * pixels, c * pixels : (c + 1) * pixels] += block
        u = _solve(gram, right, self.ridge * size)
        error = np.linalg.norm(forward_t @ u - wanted_t) / max(float(np.linalg.norm(wanted_t)), 1e-30)
        return torch.from_numpy(u), torch.tensor(error, dtype=torch.float64)


def _solve(gram: Any, right: Any, ridge: float) -> Any:
    """By Cholesky, with as much more of a ridge as rounding makes it need."""
    for factor in (1, 1e2, 1e4, 1e6):
        gram[np.diag_indices_from(gram)] += factor * ridge
        try:
            return scipy.linalg.cho_solve(scipy.linalg.cho_factor(gram), right)
        except np.linalg.LinAlgError:
            continue
    return np.full_like(right, np.nan)  # recorded as a failure


def _sparse(row: Tensor, column: Tensor, values: Tensor, shape: tuple[int, int]) -> Any:
    entries = (values.flatten().numpy(), (row.flatten().numpy(), column.flatten().numpy()))
    return scipy.sparse.coo_array(entries, shape=shape).tocsr()


def _roughness(height: int, width: int) -> Any:
    """The quadratic form of squared differences between neighbouring pixels."""
    number = np.arange(height * width).reshape(height, width)
    first = np.concatenate([number[1:].ravel(), number[:, 1:].ravel()])
    second = np.concatenate([number[:-1].ravel(), number[:, :-1].ravel()])
    graph = np.zeros((height * width, height * width))
    graph[first, second] = graph[second, first] = 1
    return np.diag(graph.sum(0)) - graph


def _undo(activation: nn.Module, a: Tensor) -> tuple[Tensor, Tensor]:
    """What went into the activation, and its slope there."""
    if isinstance(activation, nn.Sigmoid):
        a = a.clamp(1e-9, 1 - 1e-9)
        return torch.logit(a), a * (1 - a)
    if isinstance(activation, nn.Tanh):
        a = a.clamp(-1 + 1e-9, 1 - 1e-9)
        return torch.atanh(a), 1 - a**2
    if isinstance(activation, nn.ReLU):
        is_open = (a > _OPEN * a.abs().max()).to(a)
        return a * is_open, is_open
    slope = float(activation.negative_slope)  # type: ignore[arg-type]
    return torch.where(a >= 0, a, a / slope), torch.where(a >= 0, torch.ones_like(a), torch.full_like(a, slope))


def _line(observation: Observation) -> list[tuple[str, tuple[torch.Size, torch.Size], nn.Module]] | None:
    """(path, input and output shapes, activation) of each convolution up to the first linear layer, which comes last."""
    linear = linear_layers(observation)
    if not linear:
        return None
    met: list[tuple[str, nn.Module, torch.Size, torch.Size]] = []

    def note(path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda m, i, o: met.append((path, m, i[0].shape[1:], o.shape[1:]))

    leaves = [(p, m) for p, m in observation.model.module.named_modules() if not list(m.children())]
    handles = [m.register_forward_hook(note(p)) for p, m in leaves]
    try:
        with torch.no_grad():
            observation.model(observation.state, torch.zeros(2, *observation.input_shape))
    finally:
        for handle in handles:
            handle.remove()
    line: list[tuple[str, tuple[torch.Size, torch.Size], nn.Module]] = []
    for path, part, before, after in met:
        if path == linear[0]:
            return [*line, (path, (before, after), part)] if line and not _waiting(line) else None
        if isinstance(part, nn.Conv2d) and part.groups == 1 and part.padding_mode == "zeros" and not _waiting(line):
            line.append((path, (before, after), part))
        elif isinstance(part, _ACTIVATIONS) and _waiting(line):
            line[-1] = (*line[-1][:2], part)
        elif not isinstance(part, _NEUTRAL):
            return None
    return None


def _waiting(line: list[tuple[str, tuple[torch.Size, torch.Size], nn.Module]]) -> bool:
    """Whether the last convolution's activation has not been met yet."""
    return bool(line) and isinstance(line[-1][2], nn.Conv2d)
