"""A weight difference as one gradient: the point between the weights at which it is nearest to one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradveil.attacks.matching.surrogate import as_gradient
from gradveil.attacks.unit_length import unit_length
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Observation, Trace


def agreement(observation: Observation, trace: Trace, sent: dict[str, Tensor]) -> float:
    """The cosine between the gradient of the true images at the observation's weights and what was sent."""
    task = observation.task
    gradient = task.model.gradient(observation.state, task.normalize(trace.fed.x), trace.fed.y)
    ours, theirs = (torch.cat([side[name].flatten() for name in sent]) for side in (gradient, sent))
    return float(torch.cosine_similarity(ours, theirs, dim=0))


@pytest.mark.parametrize("optimizer", ["sgd", "sgd:momentum=0.9"])
def test_the_gradient_in_the_middle_is_nearer_than_those_at_both_ends(optimizer: str, observe_victims: Callable) -> None:
    training = LocalTraining(epochs=4, lr=0.02, optimizer=optimizer)
    (seen,), (trace,) = observe_victims(model="smlp", victims=1, batch_size=4, training=training)
    seen = unit_length(seen)
    middle = as_gradient(seen)
    assert middle.update.kind == "gradient" and middle.knowledge.training == LocalTraining()
    sent = middle.update.tensors
    weights = {**seen.state, **{n: seen.state[n] - seen.knowledge.norm * sent[n] for n in sent}}
    after = as_gradient(seen)
    after.seen[0].state.update(weights)
    assert agreement(middle, trace, sent) > max(agreement(seen, trace, sent), agreement(after, trace, sent))
