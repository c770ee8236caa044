"""What most tests stand on: victims of a small federation, and how much of them an attack got back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import hypothesis
import pytest
import torch
from torch import Tensor, nn

from gradveil import attacks, metrics, models
from gradveil.client import prepare_client
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Observation, Reconstruction, Sighting, Trace, observe
from gradveil.core.randomness import generator
from gradveil.core.types import Batch, Level, Tensors
from gradveil.data import DataSet, load
from gradveil.defenses import parse
from gradveil.defenses.base import Setup
from gradveil.storage.files import write_atomic

torch.set_num_threads(1)
# No deadline: on a busy machine one example may take any time.
hypothesis.settings.register_profile("gradveil", deadline=None, max_examples=60, derandomize=True)
hypothesis.settings.load_profile("gradveil")

ONE_GRADIENT = LocalTraining()
Victims = tuple[list[Observation], list[Trace]]


@lru_cache
def _data(source: str | DataSet) -> DataSet:
    return load(source)


@lru_cache
def _network(
    data: DataSet, model: str | nn.Module, defense: str, tampering: str | None, batch_size: int, seed: int
) -> tuple[ModelFunction, Tensors]:
    """One function and one state for all who ask alike, so that their victims can be attacked in one stack."""
    module = models.build(model, input_shape=data.input_shape, num_classes=data.num_classes, seed=seed)
    if tampering:
        public = Batch(data.task(ModelFunction(module)).normalize(data.public.x), data.public.y)
        module = attacks.parse(tampering).tamper(module, data.input_shape, public, batch_size)
    function = ModelFunction(parse(defense).model(module, data.input_shape))
    return function, function.state()


def _observe_victims(
    data: str | DataSet = "mnist-5k",
    model: str | nn.Module = "lenet",
    defense: str = "none",
    victims: int = 4,
    batch_size: int = 1,
    training: LocalTraining = ONE_GRADIENT,
    level: Level = "realistic",
    seed: int = 0,
    tampering: str | None = None,
    updates: int = 1,
) -> Victims:
    found, method = _data(data), parse(defense)
    on_model = defense if "model" in method.stages else "none"
    function, state = _network(found, model, on_model, tampering, batch_size if tampering else 0, seed)
    task = found.task(function)
    client = prepare_client(method, training, Setup(task, state, found.private, found.public, seed))
    places = torch.randperm(len(found.private), generator=generator(seed, "victims")).split(batch_size)
    observations, traces = [], []
    for victim in range(victims):
        batch = found.private[places[victim]]
        update, trace = client.round(state, batch, victim)
        seen = [Sighting(state, update)]
        seen += [Sighting(state, client.round(state, batch, victim, u)[0]) for u in range(1, updates)]
        known = {"level": level, "training": training, "defense": method, "public": found.public, "trace": trace}
        observations.append(observe(task, seen, **known))
        traces.append(trace)
    return observations, traces


def _matched(measure: Callable[[Tensor, Tensor], Tensor], found: Sequence[Reconstruction], traces: Sequence[Trace]) -> Tensor:
    rows = []
    for reconstruction, trace in zip(found, traces, strict=True):
        truth = trace.original.x
        rows.append(measure(truth, reconstruction.images[metrics.match(truth, reconstruction.images)]))
    return torch.stack(rows)


@pytest.fixture(scope="session")
def observe_victims() -> Callable[..., Victims]:
    """`observe_victims(model="lenet", defense="none", victims=4, …)`: what a server sees of each, and what is true.

    `tampering` names an attack by which a malicious server changes the model first.
    """
    return _observe_victims


@pytest.fixture(scope="session")
def best_psnr() -> Callable[[Sequence[Reconstruction], Sequence[Trace]], Tensor]:
    """PSNR of every image against its original (victims × batch), the images of a batch matched first."""
    return lambda found, traces: _matched(metrics.psnr, found, traces)


@pytest.fixture(scope="session")
def best_ssim() -> Callable[[Sequence[Reconstruction], Sequence[Trace]], Tensor]:
    return lambda found, traces: _matched(metrics.ssim, found, traces)


@pytest.fixture(scope="session")
def shapes() -> DataSet:
    """Small smooth pictures of three classes, 1 × 12 × 12: quick to make, and no file is read."""

    def made(n: int, purpose: str) -> Batch:
        coarse = torch.rand(n, 1, 4, 4, generator=generator(0, "shapes", purpose))
        x = torch.nn.functional.interpolate(coarse, scale_factor=3, mode="bilinear", align_corners=False)
        return Batch((x * 255).round() / 255, torch.arange(n) % 3)

    names, mean, std = ("a", "b", "c"), torch.tensor([0.5]), torch.tensor([0.25])
    return DataSet("shapes", made(60, "private"), made(64, "public"), made(10, "test"), 3, names, mean, std)


@pytest.fixture
def killed_writer() -> Callable[[Path], Path]:
    """Kills a process in the middle of writing a file; returns the file that it leaves behind."""

    def run(path: Path) -> Path:
        before = set(path.parent.iterdir()) if path.parent.is_dir() else set()
        child = os.fork()
        if not child:
            write_atomic(path, lambda temporary: os.kill(os.getpid(), signal.SIGKILL))
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        (leftover,) = set(path.parent.iterdir()) - before
        return leftover

    return run
