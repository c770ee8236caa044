"""R-GAP (Zhu and Blaschko 2021): layer by layer back to the image, each layer a linear least-squares problem.

The first fully connected layer gives its input and the signal at it exactly (see `apart.py`). Going back through
an invertible activation gives a convolution's output z and the signal k at it; its input u then satisfies two sets of
linear equations at once: conv(u) + b = z, and ∇W = the correlation of u with k. Both are solved together in float64.

A ReLU hides what it cut off, so only its open units give equations of the first kind. That is often enough for hidden
layers; open pixels of the image itself are filled in as smoothly as the equations allow.

Needs single images, clean gradients and a straight line of convolutions with sigmoid, tanh or (leaky) ReLU activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import grad as conv_grad

from gradveil.attacks import ClosedForm, attack
from gradveil.attacks.analytic.apart import layer_inputs
from gradveil.attacks.layers import hooked, linear_layers
from gradveil.core.observation import Observation

Matrix = NDArray[np.float64]
_ACTIVATIONS = (nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.ReLU)
_OPEN = 1e-5  # share of the largest activation above which a ReLU counts as open
_NEUTRAL = (nn.Flatten, nn.Identity, nn.Dropout)


@attack("rgap", targets="unused")
class RGAP(ClosedForm):
    """Recursive closed-form inversion of a plain convolutional net.

    Args:
        ridge: added to the diagonal of the equations, as a share of its mean.
        smooth: weight of differences of neighbouring pixels, for the image alone.
    Example: gradveil audit --model lenet --attack rgap
    """

    ridge: float = Field(default=1e-12, ge=0)
    smooth: float = Field(default=1e-8, ge=0)

    def applies(self, observation: Observation) -> str | None:
        if observation.knowledge.batch_size != 1 or observation.update.kind != "gradient":
            return "it needs the gradient of a single image"
        if line(observation) is None:
            return "it needs a straight line of convolutions and activations, without pooling, before a linear layer"
        return None

    def read(self, observation: Observation) -> tuple[Tensor, Tensor]:
        layers = line(observation)
        assert layers is not None
        reading = layer_inputs(observation, layers.pop().path)
        if reading is None or not reading.is_exact:
            return torch.zeros(1, *observation.task.input_shape), torch.tensor(1.0)
        a, signal = reading.inputs.double(), reading.signals_at_inputs(observation).double()
        worst = 0.0
        while layers:
            a, signal, error = self.back(observation, layers.pop(), a, signal)
            worst = max(worst, error)
        return a.float().view(1, *observation.task.input_shape), torch.tensor(worst)

    def back(self, observation: Observation, layer: Layer, a: Tensor, signal: Tensor) -> tuple[Tensor, Tensor, float]:
        """From what left a layer's activation and the signal there (images × width) to what entered the layer and the
        signal there; how far the equations are from being met comes third. Images share the second set of equations."""
        z, slope = _undo(layer.activation, a)
        k = signal * slope
        inputs, error = self._invert(observation, layer, z, k, slope)
        weight = observation.state[f"{layer.path}.weight"].double()
        outputs = k.view(-1, *layer.after)
        signal = conv_grad.conv2d_input((len(a), *layer.before), weight, outputs, **_window(observation, layer))
        return inputs, signal.flatten(1), error

    def _invert(self, observation: Observation, layer: Layer, z: Tensor, k: Tensor, slope: Tensor) -> tuple[Tensor, float]:
        weight = observation.state[f"{layer.path}.weight"].double()
        sent = observation.update.tensors[f"{layer.path}.weight"].double()
        bias = observation.state.get(f"{layer.path}.bias")
        (channels, height, width), out = layer.before, layer.after[0]
        # Which pixel each kernel place reads at each output place; 0 is the padding.
        numbers = torch.arange(1, height * width + 1, dtype=torch.float64).view(1, 1, height, width)
        index = F.unfold(numbers, weight.shape[2:], **_window(observation, layer))[0].long()
        pixels, places = height * width, index.shape[1]
        kernel, entries = weight.shape[2] * weight.shape[3], channels * pixels

        # conv(u) = z − b: a row for every output place, a column for every pixel of every channel.
        row = torch.arange(out * places).view(out, 1, 1, places).expand(-1, channels, kernel, -1)
        column = index + torch.arange(channels).view(1, -1, 1, 1) * (pixels + 1)
        values = weight.view(out, channels, kernel, 1).expand(-1, -1, -1, places)
        forward = _sparse(row, column.expand_as(row), values, (out * places, channels * (pixels + 1)))
        forward = forward[:, (torch.arange(channels * (pixels + 1)) % (pixels + 1) != 0).numpy()]
        trust = slope.abs()  # z came through the activation's inverse: it is as exact as its slope
        wanted = ((z - (bias.double().repeat_interleave(places) if bias is not None else 0)) * trust).numpy()
        forwards = [scipy.sparse.diags(t) @ forward for t in trust.numpy()]

        # ∇W of one input channel reads that channel alone, by the same matrix for all; the images' parts add up.
        row = torch.arange(out * kernel).view(out, kernel, 1).expand(-1, -1, places)
        backs = [
            _sparse(row, index.expand_as(row), part.view(out, 1, places).expand(-1, kernel, -1), (out * kernel, pixels + 1))
            for part in k
        ]
        backs = [back[:, 1:] for back in backs]
        sizes = [max(scipy.sparse.linalg.norm(m) for m in ms) for ms in (forwards, backs)]
        scale = sizes[0] / sizes[1] / channels**0.5 if sizes[1] else 0.0
        target = sent.view(out, channels, kernel).transpose(0, 1).reshape(channels, out * kernel).numpy()
        gram = np.zeros((len(z) * entries, len(z) * entries))
        for i, m in enumerate(forwards):
            gram[i * entries : (i + 1) * entries, i * entries : (i + 1) * entries] = (m.T @ m).toarray()
        right = np.concatenate(
            [f.T @ w + (scale**2 * (target @ b)).ravel() for f, w, b in zip(forwards, wanted, backs, strict=True)]
        )
        blocks = {(i, j): scale**2 * (a.T @ b).toarray() for i, a in enumerate(backs) for j, b in enumerate(backs)}
        size = float((gram.trace() + channels * sum(blocks[i, i].trace() for i in range(len(z)))) / len(gram))
        for (i, j), block in blocks.items():
            if i == j and layer.before == observation.task.input_shape and self.smooth:
                block = block + self.smooth * size * _roughness(height, width)
            for c in range(channels):
                down, across = i * entries + c * pixels, j * entries + c * pixels
                gram[down : down + pixels, across : across + pixels] += block
        u = _solve(gram, right, self.ridge * size).reshape(len(z), entries)
        missed = np.concatenate([f @ part - w for f, part, w in zip(forwards, u, wanted, strict=True)])
        return torch.from_numpy(u), float(np.linalg.norm(missed) / max(float(np.linalg.norm(wanted)), 1e-30))


def _window(observation: Observation, layer: Layer) -> dict[str, tuple[int, ...]]:
    """How a convolution's kernel moves over its input."""
    conv = observation.model.module.get_submodule(layer.path)
    assert isinstance(conv, nn.Conv2d) and not isinstance(conv.padding, str)  # `line` has checked
    return {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}


def _solve(gram: Matrix, right: Matrix, ridge: float) -> Matrix:
    """By Cholesky, with as much more of a ridge as rounding makes it need."""
    for factor in (1, 1e2, 1e4, 1e6):
        gram[np.diag_indices_from(gram)] += factor * ridge
        try:
            return np.asarray(scipy.linalg.cho_solve(scipy.linalg.cho_factor(gram), right))
        except np.linalg.LinAlgError:
            continue
    return np.full_like(right, np.nan)  # recorded as a failure


def _sparse(row: Tensor, column: Tensor, values: Tensor, shape: tuple[int, int]) -> scipy.sparse.csr_array:
    entries = (values.flatten().numpy(), (row.flatten().numpy(), column.flatten().numpy()))
    return scipy.sparse.coo_array(entries, shape=shape).tocsr()


def _roughness(height: int, width: int) -> Matrix:
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
    assert isinstance(activation, nn.LeakyReLU)
    slope = activation.negative_slope
    return torch.where(a >= 0, a, a / slope), torch.where(a >= 0, torch.ones_like(a), torch.full_like(a, slope))


class Layer(NamedTuple):
    """A convolution and the activation behind it; of the linear layer at the end, itself."""

    path: str
    before: torch.Size
    after: torch.Size
    activation: nn.Module


def line(observation: Observation) -> list[Layer] | None:
    """The convolutions up to the first linear layer, which comes last; None where the net is not such a line."""
    linear, sent = linear_layers(observation), observation.model.trainable
    layers: list[Layer] = []
    for layer in _met(observation) if linear else []:
        part = layer.activation
        if layer.path == linear[0]:
            return [*layers, layer] if layers and not _waiting(layers) else None
        if f"{layer.path}.weight" in sent and _plain_convolution(part) and not _waiting(layers):
            layers.append(layer)
        elif isinstance(part, _ACTIVATIONS) and _waiting(layers):
            layers[-1] = layers[-1]._replace(activation=part)
        elif not isinstance(part, _NEUTRAL):
            return None
    return None


def _plain_convolution(part: nn.Module) -> bool:
    plain = isinstance(part, nn.Conv2d) and part.groups == 1 and part.padding_mode == "zeros"
    return plain and not isinstance(part.padding, str)


def linear_tail(observation: Observation) -> list[Layer]:
    """The linear layers with an activation that lead straight to the last one of the net, the nearest to it first."""
    met = [layer for layer in _met(observation) if not isinstance(layer.activation, _NEUTRAL)][:-1]
    tail = []
    while len(met) > 1 and isinstance(met[-1].activation, _ACTIVATIONS) and isinstance(met[-2].activation, nn.Linear):
        activation = met.pop().activation
        tail.append(met.pop()._replace(activation=activation))
    return tail


def back_through_linear(observation: Observation, layer: Layer, a: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
    """As `RGAP.back`: for fewer images than outputs ∇W = Σ k uᵀ gives every u, k being known."""
    k = signal * _undo(layer.activation, a)[1]
    weight, sent = (t[f"{layer.path}.weight"].double() for t in (observation.state, observation.update.tensors))
    return torch.linalg.lstsq(k.T, sent, driver="gelsd").solution, k @ weight


def _met(observation: Observation) -> list[Layer]:
    """The modules without submodules, as a forward pass meets them."""
    met: list[Layer] = []

    def note(path: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        return lambda m, i, o: met.append(Layer(path, _shape(i[0] if i else None), _shape(o), m))

    leaves = [(p, m) for p, m in observation.model.module.named_modules() if not list(m.children())]
    with torch.no_grad(), hooked(m.register_forward_hook(note(p)) for p, m in leaves):
        observation.model(observation.state, torch.zeros(2, *observation.task.input_shape))
    return met


def _shape(value: object) -> torch.Size:
    """The shape for one image; empty where a module, such as a recurrent one, takes or gives no tensor."""
    return value.shape[1:] if isinstance(value, Tensor) else torch.Size()


def _waiting(layers: list[Layer]) -> bool:
    """Whether the last convolution's activation has not been met yet."""
    return bool(layers) and isinstance(layers[-1].activation, nn.Conv2d)
