"""The smaller problem before a fully connected layer whose exact input and signal are known (see `analytic/apart.py`).

The layers before it are matched as a network by itself, whose loss is ⟨features, signal⟩.
"""

from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gradveil.attacks.analytic.apart import layer_inputs
from gradveil.attacks.base import Target
from gradveil.attacks.layers import hooked, linear_layers
from gradveil.attacks.matching.rows import Rows
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Sighting
from gradveil.core.types import Update

PREFIX = "inner."  # of the names of tensors in the reduced problem


class _Reached(Exception):
    """Raised to leave a forward pass as soon as the features are known."""


class Features(nn.Module):
    """A network cut before one of its layers: the inputs of `layer`, flattened."""

    def __init__(self, inner: nn.Module, layer: str):
        super().__init__()
        self.inner, self.layer = inner, layer

    def forward(self, x: Tensor) -> Tensor:
        caught: list[Tensor] = []

        def catch(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            caught.append(inputs[0])
            raise _Reached

        with hooked([self.inner.get_submodule(self.layer).register_forward_pre_hook(catch)]), suppress(_Reached):
            self.inner(x)
        return caught[0].flatten(1)


def inner_product(features: Tensor, signal: Tensor) -> Tensor:
    """The loss whose gradient at the features is `signal`."""
    return (features * signal).sum()


@dataclass(frozen=True)
class FeatureMatch:
    """A prior for the reduced problem: features equal to the exact ones, as a share of their size."""

    features: Tensor  # victims × images × width

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        wanted = self.features[rows.victims]
        error = ((self.outputs(x, rows).view_as(wanted) - wanted) ** 2).sum((1, 2))
        return error / (wanted**2).sum((1, 2)).clamp_min(1e-12)

    def outputs(self, x: Tensor, rows: Rows) -> Tensor:
        """The features of images."""
        return rows.outputs(x)


@dataclass
class Head:
    """The reduced problem and the exact features at the cut."""

    target: Target
    features: Tensor  # victims × images × width
    layer: str


def reduce_to_head(target: Target, layer: str | None = None) -> Head | None:
    """The problem before the first fully connected layer, for single images whose gradient is exact there.

    Of a batch, `layer_inputs` has the rows too, but not which label belongs to which row.
    """
    first = target.first
    if target.knowledge.batch_size != 1 or target.training.kind != "gradient":
        return None
    layers = [layer] if layer else linear_layers(first)[:1]
    if not layers:
        return None
    readings = [layer_inputs(o, layers[0]) for o in target.observations]
    exact = [(r.inputs, r.signals_at_inputs(target.first)) for r in readings if r is not None and r.is_exact]
    if len(exact) < len(target.observations):
        return None
    return cut_before(target, layers[0], *(torch.stack(part) for part in zip(*exact, strict=True)))


def cut_before(target: Target, layer: str, features: Tensor, signals: Tensor) -> Head | None:
    """The problem before `layer`, whose inputs and the signals at them (victims × images × width) are known."""
    first = target.first
    model = ModelFunction(Features(first.model.module, layer), inner_product, first.model.mode)
    model.drop_penalties()  # they belong to layers behind the cut
    before = _parameters_before(model, target)
    if not before:
        return None
    model.trainable = before
    state = {f"{PREFIX}{k}": v for k, v in target.state.items()}
    observations = []
    for o in target.observations:
        sent = {f"{PREFIX}{k}": v for k, v in o.update.tensors.items() if f"{PREFIX}{k}" in before}
        knowledge = replace(o.knowledge, training=LocalTraining(), batch_size=features.shape[1])
        seen = (Sighting(state, Update(sent, "gradient", features.shape[1])),)
        observations.append(replace(o, task=o.task.with_model(model), seen=seen, knowledge=knowledge))
    return Head(target.about(observations, signals), features, layer)


def _parameters_before(model: ModelFunction, target: Target) -> list[str]:
    """Parameters that the features depend on."""
    state = {f"{PREFIX}{k}": v for k, v in target.state.items()}
    parameters = {n: state[n].detach().requires_grad_() for n in model.trainable}
    with torch.enable_grad():
        probe = torch.rand((1, *target.task.input_shape), generator=torch.Generator().manual_seed(0))
        out = model({**state, **parameters}, probe.to(next(iter(parameters.values())).dtype)).sum()
    if not out.requires_grad:
        return []
    gradients = torch.autograd.grad(out, list(parameters.values()), allow_unused=True)
    return [n for n, g in zip(parameters, gradients, strict=True) if g is not None]
