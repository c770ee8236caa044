"""Noise and pruning at every gradient, as papers have it, and on the weight difference, as users have it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradveil import defenses
from gradveil.client import prepare_client
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors
from gradveil.defenses.base import Setup

BATCH = Batch(torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3)


def update(defense: str, training: LocalTraining) -> Tensors:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    task = Task(ModelFunction(module), (1, 4, 4), 3, torch.zeros(1), torch.ones(1))
    client = prepare_client(defenses.parse(defense), training, Setup(task, task.model.state(), BATCH))
    sent, _ = client.round(task.model.state(), BATCH, 0)
    return sent.tensors


@pytest.mark.parametrize("text", ["gaussian:std=0.1", "laplace:scale=0.1", "prune:ratio=0.5"])
def test_of_one_gradient_both_forms_are_the_same_size_and_stage_differs(text: str) -> None:
    assert defenses.parse(text).stages == ["update"]
    assert defenses.parse(f"{text},at=gradient").stages == ["gradient"]
    plain, gradient, sent = (update(t, LocalTraining()) for t in ("none", f"{text},at=gradient", text))
    change = [torch.cat([(d[n] - plain[n]).flatten() for n in plain]).norm() for d in (gradient, sent)]
    assert change[0] == pytest.approx(change[1], rel=0.5) and change[0] > 0


def test_at_every_gradient_noise_is_scaled_by_the_learning_rate() -> None:
    training = LocalTraining(epochs=1, batch_size=2, lr=0.01)
    plain = update("none", training)
    sizes = []
    for text in ("gaussian:std=1,at=gradient", "gaussian:std=1"):
        sent = update(text, training)
        sizes.append(torch.cat([(sent[n] - plain[n]).flatten() for n in plain]).std())
    # Four steps of 0.01 against one addition of 1: 0.02 and 1, up to how the steps themselves differ.
    assert 0.01 < sizes[0] < 0.05 and 0.7 < sizes[1] < 1.4


def test_at_every_gradient_pruned_entries_are_not_zero_in_the_weight_difference() -> None:
    training = LocalTraining(epochs=2, batch_size=2, lr=0.1)
    sent, every = update("prune:ratio=0.9", training), update("prune:ratio=0.9,at=gradient", training)
    assert int(sent["1.weight"].count_nonzero()) == 5  # of 48
    assert int(every["1.weight"].count_nonzero()) > 8
