"""A small made-up data set that can be learned, and networks of every kind that a federation must carry."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradveil.core.types import Batch
from gradveil.data import DataSet

CLASSES, SHAPE = 4, (1, 6, 6)


def images(n: int, seed: int) -> Batch:
    """Each class brightens its own quarter of a noisy picture."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % CLASSES
    x = 0.4 * torch.rand(n, *SHAPE, generator=rng)
    for i, c in enumerate(y.tolist()):
        x[i, :, 3 * (c // 2) : 3 * (c // 2) + 3, 3 * (c % 2) : 3 * (c % 2) + 3] += 0.4
    return Batch(x, y)


@pytest.fixture
def make_data() -> Callable[..., DataSet]:
    def make(private: int = 48) -> DataSet:
        names = tuple(map(str, range(CLASSES)))
        mean, std = torch.tensor([0.3]), torch.tensor([0.2])
        return DataSet("made", images(private, 1), images(40, 2), images(40, 3), CLASSES, names, mean, std)

    return make


@pytest.fixture
def data(make_data: Callable[..., DataSet]) -> DataSet:
    return make_data()


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        return make()


@pytest.fixture
def plain() -> nn.Module:
    return _seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, CLASSES)))


@pytest.fixture
def normed() -> nn.Module:
    """BatchNorm on maps and on features; the latter has one value a channel for each image."""
    return _seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Linear(8, CLASSES),
        )
    )


@pytest.fixture
def dropping() -> nn.Module:
    return _seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, CLASSES)))
