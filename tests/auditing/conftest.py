from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from gradveil.data import DataSet

SECONDS = {"seconds", "seconds_per_round", "cpu_seconds_per_round", "overhead"}


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """600 small smooth images of three classes, as the path of an archive."""
    random = np.random.default_rng(0)
    waves = random.normal(size=(600, 4, 4))
    images = np.kron(waves, np.ones((1, 3, 3)))
    images = (images - images.min((1, 2), keepdims=True)) / np.ptp(images, axis=(1, 2), keepdims=True)
    path = tmp_path_factory.mktemp("data") / "small.npz"
    np.savez(path, images=images.astype(np.float32), labels=np.arange(600) % 3)
    return str(path)


@pytest.fixture
def command_environment() -> dict[str, str]:
    """For commands in a process of their own: this source tree, one thread."""
    source = Path(__file__).parents[2] / "src"
    path = os.pathsep.join([str(source), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def without_seconds(value: Any) -> Any:
    """A summary as it must be for the same seed, however it came about."""
    if isinstance(value, dict):
        return {k: without_seconds(v) for k, v in value.items() if k not in SECONDS}
    return [without_seconds(v) for v in value] if isinstance(value, list) else value


@pytest.fixture
def comparable():  # type: ignore[no-untyped-def]
    return lambda folder: without_seconds(json.loads((Path(folder) / "summary.json").read_text()))


@pytest.fixture
def image(shapes: DataSet) -> Tensor:
    """One private image, as a batch."""
    return shapes.private.x[7:8]
