"""What a client does with its images in a round: one description for audits, trainings, protection and captured updates.

The same functions run the client's own training (one client, with its random orders) and the adversary's simulation of
it (many victims at once, differentiable in the images). So they are written without side effects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from gradveil.core.errors import UserError
from gradveil.core.randomness import Stream
from gradveil.core.settings import choose, settings
from gradveil.core.types import BatchSampling, Kind, Mode, Tensors

MiniBatch = slice | Tensor  # which images of the client: a mini-batch
LocalGradient = Callable[[Tensors, MiniBatch], Tensors]  # of the parameters on a mini-batch


# -- optimisers ------------------------------------------------------------------------------------------------------


class LocalOptimizer(ABC):
    """One step of an optimiser as torch.optim computes it. `memory` is what it keeps from step to step, empty at first."""

    @abstractmethod
    def step(self, parameters: Tensors, gradients: Tensors, lr: float, memory: dict[str, Tensors]) -> Tensors: ...


@settings
class LocalSGD(LocalOptimizer):
    """Stochastic gradient descent, as torch.optim.SGD."""

    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def step(self, parameters: Tensors, gradients: Tensors, lr: float, memory: dict[str, Tensors]) -> Tensors:
        moved, before = {}, memory.get("velocity", {})
        for name, value in parameters.items():
            g = gradients[name] + self.weight_decay * value if self.weight_decay else gradients[name]
            if self.momentum:
                velocity = self.momentum * before[name] + g if name in before else g
                memory.setdefault("velocity", {})[name] = velocity
                g = g + self.momentum * velocity if self.nesterov else velocity
            moved[name] = value - lr * g
        return moved


@settings
class LocalAdam(LocalOptimizer):
    """Adam, as torch.optim.Adam: weight decay is added to the gradient."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def step(self, parameters: Tensors, gradients: Tensors, lr: float, memory: dict[str, Tensors]) -> Tensors:
        moved, mean, square = {}, memory.setdefault("mean", {}), memory.setdefault("square", {})
        done = memory.setdefault("steps", {"": torch.zeros((), dtype=torch.float64)})
        done[""] = done[""] + 1
        steps = float(done[""])
        for name, value in parameters.items():
            value, g = self._decayed(value, gradients[name], lr)
            mean[name] = (1 - self.beta1) * g + (self.beta1 * mean[name] if name in mean else 0)
            square[name] = (1 - self.beta2) * g * g + (self.beta2 * square[name] if name in square else 0)
            # The square root has no derivative at zero, where units are dead; the second choice keeps it finite.
            positive = square[name] > 0
            root = torch.where(positive, torch.where(positive, square[name], 1.0).sqrt(), 0.0)
            scale = lr / (1 - self.beta1**steps)
            moved[name] = value - scale * mean[name] / (root / (1 - self.beta2**steps) ** 0.5 + self.eps)
        return moved

    def _decayed(self, value: Tensor, gradient: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        return value, gradient + self.weight_decay * value if self.weight_decay else gradient


@settings
class LocalAdamW(LocalAdam):
    """Adam with weight decay on the weights themselves, as torch.optim.AdamW."""

    weight_decay: float = Field(default=0.01, ge=0, allow_inf_nan=False)

    def _decayed(self, value: Tensor, gradient: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        return value * (1 - lr * self.weight_decay), gradient


OPTIMIZERS: dict[str, type[LocalOptimizer]] = {"sgd": LocalSGD, "adam": LocalAdam, "adamw": LocalAdamW}


def optimizer(text: str) -> LocalOptimizer:
    """The optimiser that `text` writes, such as `sgd:momentum=0.9,weight_decay=1e-4`."""
    return choose("optimizer", text, OPTIMIZERS)


# -- a round ---------------------------------------------------------------------------------------------------------


@settings
class LocalTraining:
    """One gradient (no `lr`), or epochs of mini-batches with an optimiser; then the weight difference is sent.

    The first epoch takes the images in the order in which they come, each further one in a new random order. With Poisson
    sampling, every mini-batch holds each image with probability batch size / images, independently of all others; its
    gradients are divided by the batch size, whatever the number of images in it. The optimiser begins anew in every round.
    Dropout and BatchNorm do what they do in this mode.
    """

    epochs: int = Field(default=1, ge=1, description="Passes over the images.")
    batch_size: int | None = Field(default=None, ge=1, description="Images in a mini-batch. [all]")
    lr: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="Learning rate. [none: a gradient is sent]")
    optimizer: str = Field(default="sgd", description="sgd:momentum=0.9, adam, adamw:weight_decay=0.01")
    mode: Mode = Field(default="train", description="train or eval: what dropout and BatchNorm do.")
    shuffle: bool = Field(default=True, description="A new order of the images in each epoch.")
    sampling: BatchSampling = Field(default="shuffled", description="poisson: each mini-batch draws each image by itself.")
    accumulate: int = Field(default=1, ge=1, description="Mini-batches whose mean gradient makes one step.")
    frozen: tuple[str, ...] = Field(default=(), description="Parameters that are not trained, such as features.*")
    sends_statistics: bool = Field(default=False, description="BatchNorm's running statistics are sent too.")

    def __post_init__(self) -> None:
        optimizer(self.optimizer)  # refuses one that there is not
        if self.lr is None and (self.epochs, self.batch_size, self.accumulate, self.optimizer) != (1, None, 1, "sgd"):
            raise UserError("local training needs a learning rate; without one a client sends a single gradient.")
        if self.sampling == "poisson" and (self.lr is None or self.batch_size is None):
            raise UserError("Poisson sampling draws mini-batches of local training; set a learning rate and a batch size.")

    @property
    def kind(self) -> Kind:
        return "gradient" if self.lr is None else "delta"

    def is_single_step(self, images: int) -> bool:
        """Whether one step of SGD is made, so that the weight difference is a gradient in other units."""
        return self.number_of_mini_batches(images) == 1 and isinstance(optimizer(self.optimizer), LocalSGD)

    def steps(self, images: int, rng: Stream | None = None) -> list[list[MiniBatch]]:
        """The mini-batches of each step of a round. Without `rng` no epoch has a new order: an adversary does not know it."""
        size = images if self.lr is None else self.batch_size or images
        parts: list[MiniBatch] = []
        if self.sampling == "poisson" and rng is not None:
            draws = (rng.uniform((images,), torch.float64) for _ in range(self.number_of_mini_batches(images)))
            parts += [(draw < size / images).nonzero().squeeze(1) for draw in draws]
        for epoch in range(0 if parts else self.epochs):
            places = [slice(i, min(i + size, images)) for i in range(0, images, size)]
            if epoch and self.shuffle and rng is not None and size < images:
                order = rng.permutation(images)
                parts += [order[place] for place in places]
            else:
                parts += places
        return [parts[i : i + self.accumulate] for i in range(0, len(parts), self.accumulate)]

    def expected_size(self, images: int) -> int | None:
        """By what the gradients of a mini-batch are divided under Poisson sampling; None: by the number of its images."""
        return min(self.batch_size or images, images) if self.sampling == "poisson" else None

    def number_of_mini_batches(self, images: int) -> int:
        """How often a gradient is computed in a round. Counted without a list, which others could make long."""
        size = images if self.lr is None else self.batch_size or images
        return self.epochs * -(-images // size)

    def number_of_steps(self, images: int) -> int:
        """Steps of the optimiser in a round."""
        return -(-self.number_of_mini_batches(images) // self.accumulate)

    def difference(self, start: Tensors, steps: Sequence[Sequence[MiniBatch]], gradient: LocalGradient) -> Tensors:
        """Weights after the steps minus weights before."""
        assert self.lr is not None
        method, memory, parameters = optimizer(self.optimizer), dict[str, Tensors](), dict(start)
        for parts in steps:
            gradients = [gradient(parameters, part) for part in parts]
            parameters = method.step(parameters, _mean(gradients), self.lr, memory)
        return {name: parameters[name] - start[name] for name in start}

    def as_gradient(self, difference: Tensors, start: Tensors, images: int) -> Tensors:
        """What steps of SGD moved the weights by, as a gradient up to its size: the sum over the steps, each with a factor
        that is the same for all weights. What weight decay alone moved is taken out."""
        method = optimizer(self.optimizer)
        assert isinstance(method, LocalSGD)
        if not method.weight_decay:
            return {name: -moved for name, moved in difference.items()}
        still = {name: torch.zeros_like(value) for name, value in start.items()}
        decayed = self.difference(start, self.steps(images), lambda *_: still)
        return {name: decayed[name] - moved for name, moved in difference.items()}

    def gradient_weights(self, images: int) -> Tensor:
        """How often the gradient of each step is in a weight difference of SGD, in units of −lr; momentum repeats early ones.

        Of Adam the shares of the steps, which all have about one length, are alike.
        """
        count, method = self.number_of_steps(images), optimizer(self.optimizer)
        if not isinstance(method, LocalSGD):
            return torch.ones(count, dtype=torch.float64)
        weights, memory = {"": torch.zeros(count, dtype=torch.float64)}, dict[str, Tensors]()
        plain = LocalSGD(momentum=method.momentum, nesterov=method.nesterov)
        for one in torch.eye(count, dtype=torch.float64):
            weights = plain.step(weights, {"": -one}, 1.0, memory)
        return weights[""]

    def middle(self, images: int) -> float:
        """Where between the weights before (0) and after (1) the gradients were computed on average, if they stay alike."""
        weights = self.gradient_weights(images)
        moves = weights.flip(0)  # of the steps under gradients that are alike
        return float((weights * (moves.cumsum(0) - moves)).sum() / weights.sum() ** 2)

    def single_gradient(self) -> LocalTraining:
        """The same, but one gradient is sent."""
        return LocalTraining(mode=self.mode, frozen=self.frozen, sends_statistics=self.sends_statistics)

    def in_words(self, images: int) -> str:
        """For the scope of a verdict."""
        if self.lr is None:
            return f"one gradient per update, model in {self.mode} mode"
        passes = "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"
        size, drawn = min(self.batch_size or images, images), "Poisson " if self.sampling == "poisson" else ""
        return (
            f"weight differences after {passes} of {drawn}mini-batches of {size} with {self.optimizer} at learning rate "
            f"{self.lr:g}, model in {self.mode} mode"
        )


def _mean(gradients: Sequence[Tensors]) -> Tensors:
    if len(gradients) == 1:
        return gradients[0]
    return {name: sum((g[name] for g in gradients[1:]), gradients[0][name]) / len(gradients) for name in gradients[0]}


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Take the parameters whose names fit a pattern (`features.*`) out of training."""
    for pattern in patterns:
        fitting = [p for name, p in module.named_parameters() if fnmatchcase(name, pattern)]
        if not fitting:
            raise UserError(f"no parameter of the model is named like '{pattern}'.")
        for parameter in fitting:
            parameter.requires_grad_(False)


# -- running statistics ----------------------------------------------------------------------------------------------


class Moments(NamedTuple):
    """Mean and unbiased variance of a mini-batch at the input of a BatchNorm layer."""

    path: str  # of the layer, with a dot at its end
    momentum: float | None  # None: running statistics are a plain average
    mean: Tensor
    variance: Tensor

    @classmethod
    def of(cls, path: str, momentum: float | None, inputs: Tensor) -> Moments:
        values = inputs.detach().transpose(0, 1).flatten(1)
        return cls(path, momentum, values.mean(dim=1), values.var(dim=1))


def moved_statistics(buffers: Tensors, moments: Iterable[Moments]) -> Tensors:
    """All buffers, with BatchNorm's running statistics after one mini-batch, as torch moves them."""
    moved = dict(buffers)
    for moment in moments:
        count, mean, variance = (f"{moment.path}{name}" for name in ("num_batches_tracked", "running_mean", "running_var"))
        moved[count] = moved[count] + 1
        share = 1 / float(moved[count]) if moment.momentum is None else moment.momentum
        moved[mean] = torch.lerp(moved[mean], moment.mean.to(moved[mean]), share)
        moved[variance] = torch.lerp(moved[variance], moment.variance.to(moved[variance]), share)
    return moved
