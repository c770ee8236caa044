"""What entered the classifier, image by image, from the gradient of a batch with fewer images than classes. Ours; no paper.

The gradient of a classifier with bias is [∇W ∇b] = Sᵀ [X 1] / κ: X holds the inputs of K images, S the signals p − y, κ the
size that the update lost. It has rank K, so every invertible A gives another pair of factors: with an orthonormal basis U of
its columns, [∇W ∇b] = U R, the inputs are [X 1] = A R. But the probabilities are no unknowns of their own: p = softmax(W x + b)
for the very inputs. So A solves

    S(A)ᵀ A = κ U   and   A r = 1,   r the last column of R:

K · C equations for K² + 1 unknowns. No activation has to be sparse, as behind a ReLU (see `apart.py`), and clipping only
changes κ. Labels are inferred first; their order does not matter, and wrong ones are corrected on the way, as y = p − S.

Many starts are solved at once by damped Gauss–Newton steps. Whether a reading is right shows without the truth: the equations
hold, and all starts for which they do end at the same inputs. A trained classifier that is nearly sure of an image leaves it a
signal too small to be found by these starts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.attacks.analytic.apart import factored
from gradveil.attacks.labels import infer_labels
from gradveil.attacks.labels.beliefs import size_is_true
from gradveil.attacks.layers import classifier_name, noting_inputs, probe
from gradveil.attacks.matching.surrogate import as_gradient
from gradveil.core.local_training import LocalSGD, optimizer
from gradveil.core.observation import Observation
from gradveil.core.randomness import generator

_READABLE = 0.3  # error above which nothing was read
_STARTS, _STEPS = 64, 80
_WORK = 4e10  # multiplications of all steps from all starts
_FEWEST = 4  # starts below which it is not tried
_RELABEL = 20  # steps after which every other start gets corrected labels
_SOLVED = 1e-7  # error below which no further step is taken
_ALIKE = 10.0  # factor on the smallest error within which starts must agree
_SAME = 0.05  # distance of inputs that agree, as a share of their length


class ClassifierReading(NamedTuple):
    """What a gradient says about K images."""

    inputs: Tensor  # K × width
    error: float  # share of the gradient that they do not explain; 1: others explain it as well


def classifier_inputs(observation: Observation) -> ClassifierReading | None:
    """The inputs of the classifier, or None where they cannot be read.

    A weight difference of SGD is read as one gradient in the middle of the steps.
    """
    name = classifier_name(observation)
    if name is None or not _is_readable(observation, name):
        return None
    size = observation.knowledge.norm if size_is_true(observation) else None
    if observation.update.kind == "delta":
        observation = as_gradient(observation)
    sent, state, knowledge = observation.update.tensors, observation.state, observation.knowledge
    gradient, bias_gradient = (sent[f"{name}.{part}"].double() for part in ("weight", "bias"))
    weight, bias = (state[f"{name}.{part}"].double() for part in ("weight", "bias"))
    labels = infer_labels(observation) if knowledge.labels is None else knowledge.labels
    if labels.ndim != 1 or not bool(bias_gradient.any()):
        return None
    return read_gradient(gradient, bias_gradient, weight, bias, labels, size)


def _is_readable(observation: Observation, name: str) -> bool:
    """Whether a gradient of the cross entropy was sent, of fewer images than classes, for a classifier with a bias."""
    sent, count = observation.update.tensors, observation.knowledge.batch_size
    if any(f"{name}.{part}" not in sent for part in ("weight", "bias")):
        return False
    # Adam divides every entry by its size, which leaves no matrix of low rank.
    if not isinstance(optimizer(observation.knowledge.training.optimizer), LocalSGD):
        return False
    classes, width = sent[f"{name}.weight"].shape
    if count >= min(classes, width) or not observation.task.has_classes:
        return False
    return _is_cross_entropy(observation, classes) and _is_last(observation, name)


def read_gradient(
    gradient: Tensor, bias_gradient: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, size: float | None = None
) -> ClassifierReading | None:
    """The inputs from the gradient of a mean loss, up to its size, and likely labels in any order, all in double precision.

    `size` is the factor by which the gradient is too small; None: unknown.
    """
    if affordable_starts(len(labels), len(bias)) < _FEWEST:
        return None
    whole = torch.cat([gradient, bias_gradient[:, None]], 1)
    length = float(whole.norm())
    lost = None if size is None else len(labels) * size * length
    reading = _Equations(whole / length, weight, bias, labels, lost).solve()
    return reading if reading.error <= _READABLE else None


def affordable_starts(images: int, classes: int) -> int:
    return min(_STARTS, int(_WORK / (_STEPS * images**5 * classes)))


class _Equations:
    """Those of the docstring, for many starts at once. The last unknown is κ; where it is known, it stays."""

    def __init__(self, gradient: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, scale: float | None):
        self.rng = generator(0, "classifier")
        self.u, self.sizes, self.rest, _ = factored(gradient, len(labels))
        self.rank, self.classes = len(self.sizes), len(bias)
        self.logits = self.rest @ torch.cat([weight, bias[:, None]], 1).T  # of an image with mixing a: a · logits
        self.rest_of_one = self.rest[:, -1]
        self.labels, self.scale = labels, scale
        present = F.one_hot(labels, self.classes).double().mean(0)
        mean = (present + (scale or 0.0) / len(labels) * gradient[:, -1]).clamp_min(1e-6)
        self.mean = mean / mean.sum()  # of the probabilities, as the bias tells where κ is known

    def solve(self) -> ClassifierReading:
        unknowns, labels = self._start()
        damping = torch.full((len(unknowns),), 1e-2, dtype=torch.float64)
        error = self._error(unknowns, labels)
        for step in range(1, _STEPS + 1):
            moved = unknowns - self._step(unknowns, labels, damping)
            after = self._error(moved, labels)
            is_better = after < error
            unknowns = torch.where(is_better[:, None], moved, unknowns)
            error = torch.where(is_better, after, error)
            damping = torch.where(is_better, 0.2 * damping, 4 * damping).clamp(1e-12, 1e8)
            if float(error.min()) < _SOLVED * self.rank**0.5:
                break
            if step % _RELABEL == 0:
                labels = self._corrected(unknowns, labels)
                error = self._error(unknowns, labels)
        return self._reading(unknowns, labels, error)

    def _start(self) -> tuple[Tensor, Tensor]:
        """Signals of any probabilities, and the mixing and κ that go with them."""
        count = affordable_starts(self.rank, self.classes)
        order = torch.rand(count, len(self.labels), generator=self.rng).argsort(1)[:, : self.rank]
        labels = F.one_hot(self.labels[order], self.classes).double()
        logits = torch.randn(count, self.rank, self.classes, generator=self.rng, dtype=torch.float64)
        logits[::2] = 0.5 * logits[::2] + self.mean.log()
        mixing = torch.linalg.pinv((logits.softmax(-1) - labels).mT) @ self.u
        if self.scale is None:
            ones = mixing @ self.rest_of_one
            scale = ones.sum(1) / ones.square().sum(1).clamp_min(1e-12)  # least squares of scale · ones = 1
        else:
            scale = torch.full((count,), self.scale, dtype=torch.float64)
        return torch.cat([(mixing * scale[:, None, None]).flatten(1), scale[:, None]], 1), labels

    def _signals(self, mixing: Tensor, labels: Tensor) -> Tensor:
        return (mixing @ self.logits).softmax(-1) - labels

    def _residual(self, unknowns: Tensor, labels: Tensor) -> Tensor:
        """What is left of the equations, starts × equations."""
        mixing, scale = self._split(unknowns)
        left = self._signals(mixing, labels).mT @ mixing - scale[:, None, None] * self.u
        return torch.cat([left.flatten(1), mixing @ self.rest_of_one - 1], 1)

    def _derivative(self, unknowns: Tensor, labels: Tensor) -> Tensor:
        """Starts × equations × unknowns."""
        mixing, _ = self._split(unknowns)
        signals = self._signals(mixing, labels)
        p, rank = signals + labels, self.rank
        slope = p[..., None] * (self.logits.mT - (p @ self.logits.mT)[:, :, None])  # of p by the mixing: image, class, entry
        by_mixing = torch.einsum("nicl,nik->nckil", slope, mixing)
        by_mixing.diagonal(dim1=2, dim2=4).add_(signals.permute(0, 2, 1)[..., None])
        by_scale = -self.u.flatten().expand(len(mixing), -1)[..., None]
        ones = torch.einsum("ij,l->ijl", torch.eye(rank, dtype=torch.float64), self.rest_of_one).flatten(1)
        if self.scale is not None:
            by_scale = torch.zeros_like(by_scale)
        first = torch.cat([by_mixing.flatten(3).flatten(1, 2), by_scale], 2)
        return torch.cat([first, F.pad(ones, (0, 1)).expand(len(mixing), -1, -1)], 1)

    def _split(self, unknowns: Tensor) -> tuple[Tensor, Tensor]:
        """Mixing and κ."""
        return unknowns[:, :-1].view(-1, self.rank, self.rank), unknowns[:, -1]

    def _error(self, unknowns: Tensor, labels: Tensor) -> Tensor:
        """The length of what is left of the equations; not finite is infinite."""
        return torch.nan_to_num(self._residual(unknowns, labels).norm(dim=1), nan=torch.inf, posinf=torch.inf)

    def _step(self, unknowns: Tensor, labels: Tensor, damping: Tensor) -> Tensor:
        """Of Levenberg and Marquardt."""
        derivative, left = self._derivative(unknowns, labels), self._residual(unknowns, labels)
        square = derivative.mT @ derivative
        diagonal = square.diagonal(dim1=1, dim2=2)
        floor = 1e-14 * diagonal.amax(1, keepdim=True) + 1e-30
        damped = square + torch.diag_embed(damping[:, None] * diagonal + floor)
        step: Tensor = torch.linalg.solve_ex(damped, derivative.mT @ left[..., None])[0][..., 0]
        return torch.nan_to_num(step, nan=torch.inf)

    def _corrected(self, unknowns: Tensor, labels: Tensor) -> Tensor:
        """Labels y = p − S, with the signals that the gradient has in this mixing; kept where these are not finite."""
        mixing, scale = unknowns[:, :-1].view(-1, self.rank, self.rank), unknowns[:, -1:, None]
        signals = torch.linalg.lstsq(mixing.mT, (scale * self.u).mT.expand(len(mixing), -1, -1)).solution
        implied = (mixing @ self.logits).softmax(-1) - signals
        usable = implied.isfinite().flatten(1).all(1)[:, None, None].clone()
        usable[::2] = False
        return torch.where(usable, F.one_hot(implied.nan_to_num().argmax(-1), self.classes).double(), labels)

    def _reading(self, unknowns: Tensor, labels: Tensor, left: Tensor) -> ClassifierReading:
        """Of the best start; the error is 1 where others explain the gradient as well by other inputs."""
        best = int(left.argmin())
        error = self._unexplained(unknowns[best], labels[best])
        inputs = self._inputs(unknowns[best])
        others = [i for i in range(len(left)) if left[i] <= _ALIKE * left[best] and i != best]
        lengths = inputs.norm(dim=1)
        for i in others:
            distance = torch.cdist(inputs, self._inputs(unknowns[i])).amin(1)
            if bool((distance > _SAME * lengths).any()):
                error = 1.0
        return ClassifierReading(inputs[:, :-1], error)

    def _inputs(self, unknowns: Tensor) -> Tensor:
        return unknowns[:-1].view(self.rank, self.rank) @ self.rest

    def _unexplained(self, unknowns: Tensor, labels: Tensor) -> float:
        """‖Sᵀ [X 1] / κ − gradient‖, as a share of the gradient."""
        mixing, scale = unknowns[:-1].view(self.rank, self.rank), unknowns[-1]
        signals = (mixing @ self.logits).softmax(-1) - labels
        wrong = (signals.mT @ mixing / scale - self.u) * self.sizes
        share = float(wrong.norm() / self.sizes.norm())
        return share if scale > 0 and math.isfinite(share) else 1.0


def _is_cross_entropy(observation: Observation, classes: int) -> bool:
    """Whether the derivative of the loss by the outputs is (p − y) / images."""
    outputs = torch.randn(2, classes, generator=generator(0, "probe"), requires_grad=True)
    labels = torch.tensor([0, classes - 1])
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(observation.model.loss_fn(outputs, labels), outputs)
    expected = (outputs.detach().softmax(-1) - F.one_hot(labels, classes)) / 2
    return torch.allclose(slope, expected, atol=1e-5)


def _is_last(observation: Observation, name: str) -> bool:
    """Whether the outputs of the network are those of the classifier, for one row of inputs per image."""
    inputs: dict[str, Tensor] = {}
    layer = observation.model.module.get_submodule(name)
    outputs = probe(observation, noting_inputs({name: layer}, inputs))
    if name not in inputs or inputs[name].ndim != 2:
        return False
    weight, bias = (observation.state[f"{name}.{part}"] for part in ("weight", "bias"))
    return torch.allclose(outputs, F.linear(inputs[name], weight, bias), atol=1e-4, rtol=1e-4)
