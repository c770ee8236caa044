from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gradveil.core.errors import UserError
from gradveil.data import load
from gradveil.data.readers.idx import read_idx


@pytest.mark.parametrize("ending", ["-idx{}-ubyte", "-idx{}-ubyte.gz", ".idx{}-ubyte"])
@pytest.mark.parametrize("below", [".", "raw", "MNIST/raw"])
def test_the_publishers_names_are_found(ending: str, below: str, home: Path, made: Callable, write_idx: Callable) -> None:
    folder = home / "mnist" / below
    folder.mkdir(parents=True)
    x, y = made(60, 28, 28, 1, classes=10)
    for part, pick in (("train", slice(0, 50)), ("t10k", slice(50, 60))):
        write_idx(folder / f"{part}-images{ending.format(3)}", x[pick, :, :, 0])
        write_idx(folder / f"{part}-labels{ending.format(1)}", y[pick].astype(np.uint8))
    data = load("mnist")
    assert [len(part) for part in (data.private, data.public, data.test)] == [30, 20, 10]
    assert np.array_equal((data.test.x.numpy()[:, 0] * 255).round(), x[50:, :, :, 0])  # as published, in its order
    assert data.test.y.tolist() == y[50:].tolist()


def test_a_folder_is_enough_and_a_test_part_may_be_missing(tmp_path: Path, made: Callable, write_idx: Callable) -> None:
    x, y = made(50, 6, 5, 1)
    write_idx(tmp_path / "train-images-idx3-ubyte", x[..., 0])
    write_idx(tmp_path / "train-labels-idx1-ubyte", y.astype(np.uint8))
    data = load(tmp_path)
    assert [len(part) for part in (data.private, data.public, data.test)] == [20, 20, 10]
    assert data.input_shape == (1, 6, 5)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("shape", "complaint"),
    [((9, 4, 4), "fewer"), ((7, 4, 4), "more"), ((70000, 70000, 4), "2 GiB"), ((2**31, 2**31), "not an idx file")],
)
def test_a_header_that_lies(shape: tuple[int, ...], complaint: str, suffix: str, tmp_path: Path, write_idx: Callable) -> None:
    path = write_idx(tmp_path / f"images{suffix}", np.zeros((8, 4, 4), dtype=np.uint8), shape)
    with pytest.raises(UserError, match=complaint):
        read_idx(path)


def test_files_that_are_cut_off_or_something_else(tmp_path: Path, write_idx: Callable) -> None:
    whole = write_idx(tmp_path / "a.gz", np.random.default_rng(0).integers(0, 256, (8, 4, 4), dtype=np.uint8))
    whole.write_bytes(whole.read_bytes()[:-30])
    with pytest.raises(UserError, match="cannot be read"):
        read_idx(whole)
    (tmp_path / "b.gz").write_bytes(b"no gzip at all")
    with pytest.raises(UserError, match="cannot be read"):
        read_idx(tmp_path / "b.gz")
    (tmp_path / "c").write_bytes(b"\0\0\x08\x03\0\0")
    with pytest.raises(UserError, match="within its header"):
        read_idx(tmp_path / "c")
    (tmp_path / "d").write_bytes(b"")
    with pytest.raises(UserError, match="not an idx file"):
        read_idx(tmp_path / "d")


def test_labels_that_are_missing_or_too_few(tmp_path: Path, made: Callable, write_idx: Callable) -> None:
    x, y = made(20, 4, 4, 1)
    write_idx(tmp_path / "train-images-idx3-ubyte", x[..., 0])
    with pytest.raises(UserError, match="train-labels-idx… is missing"):
        load(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", y[:15].astype(np.uint8))
    with pytest.raises(UserError, match="20 images but 15 labels"):
        load(tmp_path)
