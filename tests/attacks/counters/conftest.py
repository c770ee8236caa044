"""A client with a private set of its own that the server sees several updates of, as an audit with `--updates` does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradveil import models
from gradveil.client import prepare_client
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Observation, Sighting, Trace, observe
from gradveil.core.randomness import generator
from gradveil.core.types import Level
from gradveil.data import load
from gradveil.defenses import parse
from gradveil.defenses.base import Setup


def _observe_often(
    defense: str, *, victims: int, updates: int = 1, private: int | None = None, level: Level = "realistic", seed: int
) -> tuple[list[Observation], list[Trace]]:
    data, method = load("mnist-5k"), parse(defense)
    module = models.build("lenet", input_shape=data.input_shape, num_classes=data.num_classes, seed=seed)
    task = data.task(ModelFunction(module))
    state = task.model.state()
    own = data.private[torch.randperm(len(data.private), generator=generator(seed, "victims"))[:private]]
    client = prepare_client(method, LocalTraining(), Setup(task, state, own, data.public, seed))
    observations, traces = [], []
    for victim in range(victims):
        batch = own[victim : victim + 1]
        protected, hidden = client.protect(state, batch, victim)
        rounds = [client.round(state, batch, victim, u, protected=protected) for u in range(updates)]
        named = [{**hidden, **trace.secrets} for _, trace in rounds]
        secrets = {n + (f"@{u}" if u else ""): t for u, found in enumerate(named) for n, t in found.items()}
        trace = Trace(batch, rounds[0][1].fed, secrets)
        seen = [Sighting(state, update) for update, _ in rounds]
        granted = {"level": level, "defense": method, "public": data.public, "trace": trace}
        observations.append(observe(task, seen, **granted))
        traces.append(trace)
    return observations, traces


@pytest.fixture(scope="session")
def observe_often() -> Callable[..., tuple[list[Observation], list[Trace]]]:
    """`observe_often("mixup", victims=6, updates=3, private=6, level="realistic", seed=100)`."""
    return _observe_often
