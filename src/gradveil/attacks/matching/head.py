"""What a fully connected layer with a bias gives away about one image: its exact input, and the exact signal behind it.

For one image, ∇b is the signal δ at the layer's output and ∇W = δ aᵀ, so a = ∇Wᵀδ/‖δ‖² is the layer's input and Wᵀδ the
signal at it, whatever comes after: loss, label, or the random draw of a bottleneck. The layers before it can then be
matched as a network of their own whose loss is ⟨features, signal⟩. `reduce_to_head` makes that smaller problem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gradveil.attacks.base import Target
from gradveil.core.gradients import ModelFunction
from gradveil.core.observation import Observation, Sighting
from gradveil.core.types import LocalTraining, Update

if TYPE_CHECKING:
    from gradveil.attacks.matching.engine import Problem

_PREFIX = "inner."


class _Reached(Exception):
    """Raised to leave a forward pass as soon as the features are known."""


class Features(nn.Module):
    """A network cut before one of its layers: what enters `layer`, flattened."""

    def __init__(self, inner: nn.Module, layer: str):
        super().__init__()
        self.inner, self.layer = inner, layer

    def forward(self, x: Tensor) -> Tensor:
        caught: list[Tensor] = []

        def catch(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            caught.append(inputs[0])
            raise _Reached

        handle = self.inner.get_submodule(self.layer).register_forward_pre_hook(catch)
        try:
            self.inner(x)
        except _Reached:
            pass
        finally:
            handle.remove()
        return caught[0].flatten(1)


def inner_product(features: Tensor, signal: Tensor) -> Tensor:
    """The loss whose gradient at the features is `signal`."""
    return (features * signal).sum()


@dataclass(frozen=True)
class FeatureMatch:
    """A prior for the reduced problem: features equal to the exact ones, as a share of their size."""

    features: Tensor  # victims × images × width
    weight: float | Tensor = 1.0

    def __call__(self, x: Tensor, problem: Problem, rows: Tensor | None) -> Tensor:
        found = problem.target.model(problem.target.state, x.flatten(0, 1)).view(*x.shape[:2], -1)
        victims = torch.arange(problem.rows) // problem.restarts
        wanted = self.features[victims if rows is None else victims[rows]]
        weight = self.weight[rows] if isinstance(self.weight, Tensor) and rows is not None else self.weight
        return weight * ((found - wanted) ** 2).sum((1, 2)) / (wanted**2).sum((1, 2)).clamp_min(1e-12)


@dataclass
class Head:
    """The reduced problem and the exact features at the cut."""

    target: Target
    features: Tensor  # victims × images × width
    layer: str


def linear_layers(observation: Observation) -> list[str]:
    """Linear layers with a bias that take part in the update, in the order in which the forward pass meets them."""
    model, order = observation.model, list[str]()

    def note(path: str) -> Callable[..., None]:
        return lambda *_: order.append(path)

    handles = [
        m.register_forward_pre_hook(note(path))
        for path, m in model.module.named_modules()
        if isinstance(m, nn.Linear) and f"{path}.weight" in model.trainable and f"{path}.bias" in model.trainable
    ]
    try:
        with torch.no_grad():
            images = torch.zeros(2, *observation.task.input_shape).to(next(iter(observation.state.values())).dtype)
            model(observation.state, images, model.draw_noise(2, torch.Generator().manual_seed(0)))
    finally:
        for handle in handles:
            handle.remove()
    return order


def exact_input(observation: Observation, layer: str) -> tuple[Tensor, Tensor] | None:
    """The layer's input and the signal at it, or None where its gradients are not those of one image."""
    tensors, state = observation.update.tensors, observation.state
    weight, bias = tensors[f"{layer}.weight"].double(), tensors[f"{layer}.bias"].double()
    size = (bias**2).sum()
    if not size > 1e-24:
        return None
    a = weight.T @ bias / size
    # One image leaves a matrix of rank one, δ aᵀ; noise, pruning or mixing do not.
    if (weight - torch.outer(bias, a)).norm() > 1e-2 * weight.norm():
        return None
    signal = state[f"{layer}.weight"].double().T @ bias
    return a.to(state[f"{layer}.weight"].dtype), signal.to(state[f"{layer}.weight"].dtype)


def reduce_to_head(target: Target, layer: str | None = None) -> Head | None:
    """The problem before the first fully connected layer, for single images whose gradient is exact there."""
    first = target.first
    if target.knowledge.batch_size != 1 or target.training.kind != "gradient":
        return None
    layers = [layer] if layer else linear_layers(first)[:1]
    if not layers:
        return None
    found = [exact_input(o, layers[0]) for o in target.observations]
    if any(f is None for f in found):
        return None
    exact = [f for f in found if f is not None]
    features, signals = torch.stack([a for a, _ in exact]), torch.stack([s for _, s in exact])
    return cut_before(target, layers[0], features[:, None], signals[:, None])


def cut_before(target: Target, layer: str, features: Tensor, signals: Tensor) -> Head | None:
    """The problem before `layer`, of whose inputs and of the signals at them (victims × images × width) all is known."""
    first = target.first
    model = ModelFunction(Features(first.model.module, layer), inner_product, first.model.mode)
    model.drop_penalties()  # they belong to layers behind the cut
    before = _parameters_before(model, target)
    if not before:
        return None
    model.trainable = before
    state = {f"{_PREFIX}{k}": v for k, v in target.state.items()}
    observations = []
    for o in target.observations:
        sent = {f"{_PREFIX}{k}": v for k, v in o.update.tensors.items() if f"{_PREFIX}{k}" in before}
        knowledge = replace(o.knowledge, training=LocalTraining(), batch_size=features.shape[1])
        seen = (Sighting(state, Update(sent, "gradient", features.shape[1])),)
        observations.append(replace(o, task=o.task.with_model(model), seen=seen, knowledge=knowledge))
    return Head(target.about(observations, signals), features, layer)


def _parameters_before(model: ModelFunction, target: Target) -> list[str]:
    """Parameters that the features depend on."""
    state = {f"{_PREFIX}{k}": v for k, v in target.state.items()}
    parameters = {n: state[n].detach().requires_grad_() for n in model.trainable}
    with torch.enable_grad():
        probe = torch.rand((1, *target.task.input_shape), generator=torch.Generator().manual_seed(0))
        out = model({**state, **parameters}, probe.to(next(iter(parameters.values())).dtype)).sum()
    if not out.requires_grad:
        return []
    found = torch.autograd.grad(out, list(parameters.values()), allow_unused=True)
    return [n for n, g in zip(parameters, found, strict=True) if g is not None]
