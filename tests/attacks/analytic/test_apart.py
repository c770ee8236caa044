"""Batches read apart at a fully connected layer: exact where a ReLU closes units, and never claimed where it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.attacks.analytic.apart import layer_inputs
from gradveil.attacks.layers import hooked
from gradveil.core.observation import Observation, Trace


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


@pytest.mark.parametrize(("model", "batch_size"), [("smlp", 2), ("smlp", 8), ("smlp", 16), ("flower-cnn", 4), ("cnn", 2)])
def test_every_input_of_a_batch_is_read(model: str, batch_size: int, observe_victims: Callable) -> None:
    observations, traces = observe_victims(model=model, victims=2, batch_size=batch_size)
    for observation, trace in zip(observations, traces, strict=True):
        reading = layer_inputs(observation)
        assert reading is not None and reading.error < 1e-5
        truth = true_inputs(observation, trace, reading.layer)
        assert relative_errors(truth, reading.inputs).max() < 1e-4
        sent = observation.update.tensors
        assert torch.allclose(reading.signals.sum(0), sent[f"{reading.layer}.bias"], atol=1e-6)
        product = reading.signals.T @ reading.inputs
        assert (product - sent[f"{reading.layer}.weight"]).norm() < 1e-5 * sent[f"{reading.layer}.weight"].norm()
