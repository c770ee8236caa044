"""A client with a private set of its own that the server sees several updates of, as an audit with `--updates` does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradveil import models
from gradveil.client import Client
from gradveil.core.gradients import ModelFunction
from gradveil.core.types import Level, LocalTraining, Observation, Sighting, Trace, generator, observe
from gradveil.data import load
from gradveil.defenses import parse


def _observe_often(
    defense: str, *, victims: int, updates: int = 1, private: int | None = None, level: Level = "realistic", seed: int
) -> tuple[list[Observation], list[Trace]]:
    data, method = load("mnist-5k"), parse(defense)
    known = {"num_classes": data.num_classes, "mean": data.mean, "std": data.std}
    module = models.build("lenet", input_shape=data.input_shape, num_classes=data.num_classes, seed=seed)
    function = ModelFunction(module)
    state = function.state()
    own = data.private[torch.randperm(len(data.private), generator=generator(seed, "victims"))[:private]]
    client = Client(function, method, LocalTraining(), state=state, private=own, public=data.public, seed=seed, **known)
    observations, traces = [], []
    for victim in range(victims):
        batch = own[victim : victim + 1]
        protected, hidden = client.protect(state, batch, victim)
        rounds = [client.round(state, batch, victim, u, protected=protected) for u in range(updates)]
        named = [{**hidden, **trace.secrets} for _, trace in rounds]
        secrets = {n + (f"@{u}" if u else ""): t for u, found in enumerate(named) for n, t in found.items()}
        trace = Trace(batch, rounds[0][1].fed, secrets)
        seen = [Sighting(state, update) for update, _ in rounds]
        shape = data.input_shape
        granted = {"level": level, "defense": method, "public": data.public, "trace": trace}
        observations.append(observe(function, seen, input_shape=shape, **known, **granted))
        traces.append(trace)
    return observations, traces


@pytest.fixture(scope="session")
def observe_often() -> Callable[..., tuple[list[Observation], list[Trace]]]:
    """`observe_often("mixup", victims=6, updates=3, private=6, level="realistic", seed=100)`."""
    return _observe_often
