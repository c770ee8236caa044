"""Batches read apart at a fully connected layer: exact where a ReLU closes units, and never claimed where it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from gradveil.attacks import parse
from gradveil.attacks.analytic.apart import layer_inputs
from gradveil.attacks.layers import hooked
from gradveil.attacks.unit_length import unit_length
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Observation, Sighting, Trace, observe
from gradveil.core.task import Task
from gradveil.core.types import Update


def true_inputs(observation: Observation, trace: Trace, layer: str) -> Tensor:
    caught: list[Tensor] = []
    module = observation.model.module.get_submodule(layer)
    with torch.no_grad(), hooked([module.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))]):
        observation.model(observation.state, observation.task.normalize(trace.fed.x))
    return caught[0]


def relative_errors(truth: Tensor, recovered: Tensor) -> Tensor:
    """Of every row of the truth, its distance to the recovered row that it is paired with, as a share of its length."""
    gaps = torch.cdist(truth.double(), recovered.double()) / truth.double().norm(dim=1)[:, None]
    rows, columns = linear_sum_assignment(gaps.numpy())
    return gaps[rows, columns]


@pytest.mark.parametrize(
    ("model", "batch_size"), [("smlp", 2), ("smlp", 8), ("smlp", 32), ("flower-cnn", 4), ("flower-cnn", 16), ("cnn", 2)]
)
def test_every_input_of_a_batch_is_read(model: str, batch_size: int, observe_victims: Callable) -> None:
    observations, traces = observe_victims(model=model, victims=2, batch_size=batch_size)
    for observation, trace in zip(observations, traces, strict=True):
        reading = layer_inputs(observation)
        assert reading is not None and reading.error < 1e-5
        truth = true_inputs(observation, trace, reading.layer)
        assert len(reading.inputs) == batch_size and relative_errors(truth, reading.inputs).max() < 1e-4
        sent = observation.update.tensors
        assert torch.allclose(reading.signals.sum(0), sent[f"{reading.layer}.bias"], atol=1e-6)
        product = reading.signals.T @ reading.inputs
        assert (product - sent[f"{reading.layer}.weight"]).norm() < 1e-5 * sent[f"{reading.layer}.weight"].norm()


@pytest.mark.parametrize("batch_size", [4, 8])
def test_linear_reads_a_batch_and_not_a_noised_one(batch_size: int, observe_victims: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_victims(model="smlp", victims=2, batch_size=batch_size)
    assert best_psnr(parse("linear")(seen), truth).min() >= 60
    noisy, hidden = observe_victims(model="smlp", victims=2, batch_size=batch_size, defense="gaussian:std=1.0")
    assert best_psnr(parse("linear")(noisy), hidden).max() < 16
    for observation in noisy:
        reading = layer_inputs(observation)
        assert reading is not None and reading.error > 0.3


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ("smlp", LocalTraining(lr=0.1)),
        ("smlp", LocalTraining(lr=0.01, epochs=3)),
        ("smlp", LocalTraining(lr=0.01, epochs=2, batch_size=4, optimizer="sgd:momentum=0.9")),
        ("flower-cnn", LocalTraining(lr=0.001, epochs=3)),
    ],
)
def test_weight_differences_do_not_stop_it(model: str, training: LocalTraining, observe_victims: Callable) -> None:
    (observation,), (trace,) = observe_victims(model=model, victims=1, batch_size=8, training=training)
    reading = layer_inputs(observation)
    assert reading is not None and reading.is_exact
    assert relative_errors(true_inputs(observation, trace, reading.layer), reading.inputs).max() < 2e-2


def test_sixteen_images_are_told_apart_after_local_epochs_with_momentum_and_not_under_noise(observe_victims: Callable) -> None:
    training = LocalTraining(lr=0.001, epochs=2, batch_size=4, optimizer="sgd:momentum=0.9")

    def read(**defense: str) -> Tensor:
        (observation,), (trace,) = observe_victims(model="flower-cnn", victims=1, batch_size=16, training=training, **defense)
        reading = layer_inputs(unit_length(observation))
        assert reading is not None
        truth = true_inputs(observation, trace, reading.layer)
        return relative_errors(truth - truth.mean(0), reading.inputs - truth.mean(0))

    assert read().median() < 0.1
    assert read(defense="gaussian:std=0.1").median() > 0.6


def test_adam_is_not_read(observe_victims: Callable) -> None:
    """It divides every entry by its own size, which leaves no matrix of low rank."""
    (observation,), _ = observe_victims(
        model="smlp", victims=1, batch_size=4, training=LocalTraining(lr=0.001, optimizer="adam")
    )
    assert layer_inputs(observation) is None


def test_a_single_image_is_divided_out(observe_victims: Callable) -> None:
    (observation,), (trace,) = observe_victims(model="lenet", victims=1)
    reading = layer_inputs(observation)
    assert reading is not None and reading.error < 1e-5
    assert relative_errors(true_inputs(observation, trace, reading.layer), reading.inputs).max() < 1e-5
    assert torch.equal(reading.signals[0], observation.update.tensors["fc.bias"])


def test_without_a_relu_a_batch_is_not_read(observe_victims: Callable) -> None:
    (observation,), _ = observe_victims(model="lenet", victims=1, batch_size=4)
    assert layer_inputs(observation) is None


def layer_observation(inputs: Tensor, signals: Tensor, weight: Tensor, bias: Tensor, images: int) -> Observation:
    """A network of one hidden layer with ReLU whose update at that layer is signalsᵀ · inputs."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(inputs.shape[1], len(weight)), nn.ReLU(), nn.Linear(len(weight), 2))
    with torch.no_grad():
        module[1].weight.copy_(weight)
        module[1].bias.copy_(bias)
    model = ModelFunction(module)
    state = model.state()
    tensors = {name: torch.zeros_like(state[name]) for name in model.trainable}
    tensors |= {"1.weight": (signals.T @ inputs).float(), "1.bias": signals.sum(0).float()}
    shape = (1, 1, inputs.shape[1])
    task = Task(model, shape, 2, torch.zeros(1), torch.ones(1))
    return observe(task, [Sighting(state, Update(tensors, "gradient", images))])


@given(seed=st.integers(0, 10_000), images=st.integers(2, 10))
@settings(max_examples=25)
def test_random_sparse_factors_are_recovered(seed: int, images: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(images, 40, generator=draw, dtype=torch.float64)
    weight, bias = torch.randn(120, 40, generator=draw), torch.randn(120, generator=draw)
    open_units = inputs.float() @ weight.T + bias > 0
    signals = torch.randn(images, 120, generator=draw, dtype=torch.float64) * open_units
    reading = layer_inputs(layer_observation(inputs, signals, weight, bias, images))
    assert reading is not None and reading.error < 1e-5
    assert relative_errors(inputs, reading.inputs).max() < 1e-4
    assert relative_errors(signals, reading.signals).max() < 1e-4


def test_equal_images_share_a_row_and_one_without_a_signal_has_none() -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(5, 40, generator=draw, dtype=torch.float64)
    inputs[1] = inputs[0]
    weight, bias = torch.randn(120, 40, generator=draw), torch.randn(120, generator=draw)
    signals = torch.randn(5, 120, generator=draw, dtype=torch.float64) * (inputs.float() @ weight.T + bias > 0)
    signals[4] = 0
    reading = layer_inputs(layer_observation(inputs, signals, weight, bias, 5))
    assert reading is not None and reading.error < 1e-5 and len(reading.inputs) == 3
    assert relative_errors(inputs[1:4], reading.inputs).max() < 1e-4


def test_too_few_closed_units_are_not_called_exact() -> None:
    """Two images that close no unit can be mixed at will: no inputs are right, and none are claimed."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.rand(2, 40, generator=draw, dtype=torch.float64)
    weight, bias = torch.rand(60, 40, generator=draw), torch.ones(60)
    signals = torch.randn(2, 60, generator=draw, dtype=torch.float64)
    reading = layer_inputs(layer_observation(inputs, signals, weight, bias, 2))
    assert reading is None or not reading.is_exact


def test_the_size_of_an_update_does_not_matter(observe_victims: Callable, scaled: Callable) -> None:
    (observation,), _ = observe_victims(model="smlp", victims=1, batch_size=4)
    one, small = (layer_inputs(o) for o in (observation, scaled(observation, 1e-12, torch.float32)))
    assert one is not None and small is not None
    assert relative_errors(one.inputs, small.inputs).max() < 1e-4
    assert relative_errors(one.signals, small.signals * 1e12).max() < 1e-4
