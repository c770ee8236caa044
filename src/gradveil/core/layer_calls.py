"""What a call of a layer and the signal at its outputs tell about the gradient of each image in the layer's parameters.

A rule takes the layout of the images and the arguments of the call. It returns, for each parameter, a function of the signal.
It may be wrong for a model that uses the layer otherwise, so nothing is taken from it that a probe has not confirmed.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

KEPT = 1 << 23  # values of one parameter's gradients of single images that stay in memory, if a second sum would cost much
SMALL = 1 << 19  # values that always stay
MUCH = 256  # rows of an image
GHOST = 30  # products of rows are cheaper than gradients up to so many multiplications per entry of a gradient
CANCELLED = 1e-4  # a square this much below its bound has lost its digits in the product of rows
GROUPED = (8, 250)  # a grouped convolution is faster from so many channels on, up to so many weights per position


class ImageGradients(NamedTuple):
    """The gradients of single images in one parameter."""

    squares: Tensor  # of their norms
    total: Callable[[Tensor], Tensor]  # their sum, each times the factor of its image


class Layout(NamedTuple):
    """How many images there are, and how their rows follow each other: image by image, or the first rows of all first."""

    number: int
    rows_first: bool = False

    def rows(self, values: Tensor, *tail: int) -> Tensor:
        """Images × rows × tail."""
        if self.rows_first:
            return values.reshape(-1, self.number, *tail).transpose(0, 1)
        return values.reshape(self.number, -1, *tail)


Read = Callable[[Tensor], ImageGradients]
Reads = list[tuple[Tensor | None, Read]]  # of parameters
Rule = Callable[..., Reads]
_Size = int | Sequence[int]


def kept(gradients: Tensor) -> ImageGradients:
    """Of gradients that stay in memory."""
    rows = gradients.flatten(2) if gradients.ndim > 2 else gradients[:, None]
    squares = torch.linalg.vector_norm(rows, dim=2).square().sum(1).double()
    return ImageGradients(squares, lambda factors: torch.tensordot(factors.to(gradients), gradients, 1))


# -- products of inputs and signals: linear layers, convolutions -----------------------------------------------------------


def _product(
    rows: Callable[[slice], tuple[Tensor, Tensor]],
    gradients: Callable[[slice], Tensor],
    weighted: Callable[[Tensor], Tensor],
    images: int,
    shape: tuple[int, int, int, int],
) -> ImageGradients:
    """Of gradients D Aᵀ per image, where A is inputs × rows and D outputs × rows: by the cheaper way to their norms.

    |D Aᵀ|² is the sum over AᵀA · DᵀD, entry by entry (ghost norm). `shape` is groups, outputs, inputs and rows of an image.
    """
    groups, outputs, inputs, length = shape
    entries = groups * outputs * inputs
    if length**2 * groups * (inputs + outputs) <= GHOST * entries:
        a, d = rows(slice(None))
        gram = (a.mT @ a, d.mT @ d)
        squares = (gram[0] * gram[1]).flatten(1).sum(1).double()
        bound = torch.stack([g.diagonal(dim1=2, dim2=3).flatten(1).sum(1) for g in gram]).prod(0)
        for i in (squares < CANCELLED * bound / length).nonzero().flatten().tolist():
            squares[i] = kept(gradients(slice(i, i + 1))).squares[0]
        return ImageGradients(squares, weighted)
    if images * entries <= (KEPT if length >= MUCH else SMALL):
        return kept(gradients(slice(None)))
    chunk = max(1, SMALL // 2 // entries)
    parts = [kept(gradients(slice(i, i + chunk))).squares for i in range(0, images, chunk)]
    return ImageGradients(torch.cat(parts), weighted)


def _linear(images: Layout, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Reads:
    def read_weight(signal: Tensor) -> ImageGradients:
        a, d = (images.rows(t, t.shape[-1]) for t in (input, signal))

        def weighted(factors: Tensor) -> Tensor:
            return (d * factors.to(d)[:, None, None]).flatten(0, 1).mT @ a.flatten(0, 1)

        return _product(
            lambda part: (a[part, None].mT, d[part, None].mT),
            lambda part: d[part].mT @ a[part],
            weighted,
            images.number,
            (1, d.shape[2], a.shape[2], a.shape[1]),
        )

    return [(weight, read_weight), (bias, lambda signal: kept(images.rows(signal, signal.shape[-1]).sum(1)))]


def _convolution(
    images: Layout,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: _Size = 1,
    padding: str | _Size = 0,
    dilation: _Size = 1,
    groups: int = 1,
) -> Reads:
    axes = weight.ndim - 2
    kernel = list(weight.shape[2:])
    steps, apart = _each(stride, axes), _each(dilation, axes)
    if isinstance(padding, str):
        spans = [a * (k - 1) for a, k in zip(apart, kernel, strict=True)] if padding == "same" else [0] * axes
        if any(span % 2 for span in spans):
            return []  # more on one side than on the other
        padding = [span // 2 for span in spans]
    around = _each(padding, axes)

    def backward(x: Tensor, signal: Tensor, w: Tensor, groups: int) -> Tensor:
        options = (None, steps, around, apart, False, [0] * axes, groups, [False, True, False])
        gradient: Tensor = torch.ops.aten.convolution_backward(signal, x, w, *options)[1]
        return gradient

    def read_weight(signal: Tensor) -> ImageGradients:
        per_image = len(input) // images.number  # crops, say
        outputs, length = len(weight) // groups, math.prod(signal.shape[2:])

        def unfolded(part: slice) -> tuple[Tensor, Tensor]:
            x, d = (t.unflatten(0, (images.number, per_image))[part].flatten(0, 1) for t in (input, signal))
            windows = F.pad(x, [p for p in reversed(around) for _ in range(2)])
            for axis, (size, step, gap) in enumerate(zip(kernel, steps, apart, strict=True), start=2):
                windows = windows.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]
            windows = windows.permute(0, 1, *range(axes + 2, 2 * axes + 2), *range(2, axes + 2))
            return by_image(windows, weight[0].numel()), by_image(d, outputs)

        def by_image(values: Tensor, features: int) -> Tensor:
            return values.reshape(-1, per_image, groups, features, length).permute(0, 2, 3, 1, 4).flatten(3)

        def gradients(part: slice) -> Tensor:
            channels, entries = GROUPED
            if per_image > 1 or weight.shape[1] < channels or weight[0].numel() * outputs > entries * length:
                a, d = unfolded(part)
                return (d @ a.mT).view(-1, *weight.shape)
            x, d = (t[part].flatten(0, 1)[None] for t in (input, signal))
            count = x.shape[1] // input.shape[1]
            return backward(x, d, weight.repeat(count, *[1] * (axes + 1)), groups * count).view(count, *weight.shape)

        def weighted(factors: Tensor) -> Tensor:
            scale = factors.to(signal).repeat_interleave(per_image).view(-1, *[1] * (axes + 1))
            return backward(input, signal * scale, weight, groups)

        shape = (groups, outputs, weight[0].numel(), per_image * length)
        return _product(unfolded, gradients, weighted, images.number, shape)

    return [(weight, read_weight), (bias, lambda signal: kept(images.rows(signal.flatten(2).sum(2), len(weight)).sum(1)))]


def _each(size: _Size, axes: int) -> list[int]:
    return [size] * axes if isinstance(size, int) else [*size] * (axes // len(size))


# -- scales and shifts of normalized inputs --------------------------------------------------------------------------------


def _scaled(function: Callable[..., Tensor], *, last: bool = False) -> Rule:
    """Outputs are normalized inputs, times the weight, plus the bias; of channels, or of the last axes."""
    signature = inspect.signature(function)

    def rule(images: Layout, *args: object, **kwargs: object) -> Reads:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        weight, bias = call.arguments["weight"], call.arguments["bias"]
        options = {**call.arguments, "weight": None, "bias": None}
        if options.get("training"):
            return []  # it couples the images
        if options.get("use_input_stats"):
            options |= {"running_mean": None, "running_var": None}  # they would move again

        def summed(values: Tensor, like: Tensor) -> ImageGradients:
            if last:
                return kept(images.rows(values, *like.shape).sum(1))
            return kept(images.rows(values.flatten(2).sum(2), len(like)).sum(1))

        return [
            (weight, lambda signal: summed(signal * function(**options), weight)),
            (bias, lambda signal: summed(signal, bias)),
        ]

    return rule


# -- tables ----------------------------------------------------------------------------------------------------------------


def _embedding(
    images: Layout,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Reads:
    if scale_grad_by_freq:
        return []  # it couples the images

    def read(signal: Tensor) -> ImageGradients:
        rows, d = images.rows(input), images.rows(signal, signal.shape[-1])
        if padding_idx is not None:
            d = d * (rows != padding_idx % len(weight))[..., None]
        same = (rows[:, :, None] == rows[:, None, :]).to(d)

        def weighted(factors: Tensor) -> Tensor:
            scaled = (d * factors.to(d)[:, None, None]).flatten(0, 1)
            return torch.zeros_like(weight).index_add_(0, rows.flatten(), scaled)

        return ImageGradients(torch.einsum("nst,nst->n", same, d @ d.mT).double().clamp_min(0), weighted)

    return [(weight, read)]


RULES: dict[Callable[..., object], Rule] = {
    F.linear: _linear,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
    F.group_norm: _scaled(F.group_norm),
    F.layer_norm: _scaled(F.layer_norm, last=True),
    F.instance_norm: _scaled(F.instance_norm),
    F.batch_norm: _scaled(F.batch_norm),
    F.embedding: _embedding,
}
