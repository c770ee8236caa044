"""Updates without a gradient of any weight: attacks answer with pictures, or say in one line why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from small_vit import ViT
from torch import nn

from gradveil.attacks import parse
from gradveil.attacks.batch_statistics import sent_moments
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Observation, Sighting, observe
from gradveil.core.types import Update
from gradveil.data import DataSet


def without_weights(observation: Observation) -> Observation:
    (sighting,) = observation.seen
    tensors = {n: t * (t.ndim < 2) for n, t in sighting.update.tensors.items()}
    update = dataclasses.replace(sighting.update, tensors=tensors)
    return dataclasses.replace(observation, seen=(dataclasses.replace(sighting, update=update),))


def test_linear_reads_nothing_from_nothing(observe_victims: Callable, shapes: DataSet) -> None:
    dense = nn.Sequential(nn.Flatten(), nn.Linear(144, 10), nn.ReLU(), nn.Linear(10, 3))
    seen, _ = observe_victims(data=shapes, victims=1, model=dense, batch_size=2)
    (answer,) = parse("linear")([without_weights(seen[0])], seed=0)
    assert torch.isfinite(answer.images).all()


def test_patch_span_says_that_patches_are_missing(observe_victims: Callable, shapes: DataSet) -> None:
    seen, _ = observe_victims(data=shapes, victims=1, model=ViT(), batch_size=2)
    with pytest.raises(UserError, match="tells of fewer than"):
        parse("patch-span")([without_weights(seen[0])], seed=0)


def test_statistics_that_never_move_tell_no_moments(shapes: DataSet) -> None:
    function = ModelFunction(nn.Sequential(nn.BatchNorm2d(1, momentum=0.0), nn.Flatten(), nn.Linear(144, 3)), mode="train")
    state = function.state()
    sent = {n: t for n, t in state.items() if "running" in n}
    update = Update({n: torch.ones_like(t) for n, t in function.parameters(state).items()}, "gradient", 2, sent)
    training = LocalTraining(sends_statistics=True)
    assert sent_moments(observe(shapes.task(function), [Sighting(state, update)], training=training)) == {}
