from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from gradveil.core.errors import UserError
from gradveil.data import load


def write(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    savemat(path, {"X": x.transpose(1, 2, 3, 0), "y": np.where(y == 0, 10, y)[:, None].astype(np.uint8)}, do_compression=True)


def test_the_zero_is_written_as_ten(home: Path, made: Callable) -> None:
    (home / "svhn").mkdir()
    x, y = made(60, 32, 32, 3, classes=10)
    write(home / "svhn" / "train_32x32.mat", x[:40], y[:40])
    write(home / "svhn" / "test_32x32.mat", x[40:], y[40:])
    data = load("svhn")
    assert data.test.y.tolist() == y[40:].tolist()
    assert np.array_equal((data.test.x.numpy().transpose(0, 2, 3, 1) * 255).round(), x[40:])
    assert [len(data.private), len(data.public)] == [24, 16]


def test_files_that_are_wrong(home: Path, made: Callable) -> None:
    (home / "svhn").mkdir()
    path = home / "svhn" / "train_32x32.mat"
    x, y = made(40, 32, 32, 3, classes=10)
    write(path, x, y)
    whole = path.read_bytes()
    for content, complaint in ((whole[:20_000], "cut off"), (whole[:-10], "not a readable"), (b"text", "not a readable")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=complaint):
            load("svhn")
    savemat(path, {"X": x})
    with pytest.raises(UserError, match="variables X and y"):
        load("svhn")
    savemat(path, {"X": x, "y": y})
    with pytest.raises(UserError, match="do not fit"):
        load("svhn")
