"""Small made-up data and the ways to put it on disk."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]


@pytest.fixture
def made() -> Callable[..., Arrays]:
    """`made(n, height, width, channels, classes=…)`: random bytes, no two images alike, labels in turn."""

    def make(n: int = 40, height: int = 8, width: int = 8, channels: int = 3, *, classes: int = 4, seed: int = 0) -> Arrays:
        random = np.random.default_rng(seed)
        x = random.integers(0, 256, (n, height, width, channels), dtype=np.uint8)
        return x, np.arange(n, dtype=np.int64) % classes

    return make


@pytest.fixture
def write_idx() -> Callable[..., Path]:
    """An idx file of bytes; `shape` makes its header say something else than what follows."""

    def write(path: Path, array: NDArray[np.uint8], shape: tuple[int, ...] | None = None) -> Path:
        shape = shape or array.shape
        content = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + array.tobytes()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return path

    return write


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for data sets with names."""
    monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path))
    return tmp_path
