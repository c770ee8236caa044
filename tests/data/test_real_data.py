"""Real files, where there are any: facts that their publishers state."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from gradveil.data import load, names
from gradveil.data.resize import resize_square

HERE = {entry.name for entry in names() if entry.available} if os.environ.get("GRADVEIL_DATA") else set()


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(name not in HERE, reason=f"GRADVEIL_DATA has no {name}")


def images(part) -> set[bytes]:  # type: ignore[no-untyped-def]
    return {image.numpy().tobytes() for image in part.x}


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_full_idx_sets(name: str) -> None:
    if name not in HERE:
        pytest.skip(f"GRADVEIL_DATA has no {name}")
    data = load(f"{name}:limit=7000")
    assert data.input_shape == (1, 28, 28)
    assert [len(part) for part in (data.private, data.public, data.test)] == [3600, 2400, 1000]


@needs("mnist")
def test_the_embedded_digits_are_of_mnists_training_part() -> None:
    data = load("mnist")
    known = images(data.private) | images(data.public)
    assert len(known) == 60_000
    assert images(load("mnist-5k").pool()) <= known
    # Published constants of the training part.
    x = torch.cat([data.private.x, data.public.x])
    assert x.mean().item() == pytest.approx(0.13066, abs=1e-4)
    assert x.std().item() == pytest.approx(0.30811, abs=1e-4)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn", "tinyimagenet", "tinyimagenet:size=64", "olivetti", "mednist"])
def test_parts_are_disjoint_and_pixels_sane(name: str) -> None:
    if name.partition(":")[0] not in HERE:
        pytest.skip(f"GRADVEIL_DATA has no {name}")
    data = load(name)
    private, public, test = (images(part) for part in (data.private, data.public, data.test))
    assert private
    assert public
    assert test
    assert not (private & public or private & test or public & test)
    assert 0.2 < data.pool().x.mean() < 0.7
    assert int(data.pool().y.max()) < data.num_classes == len(data.class_names)
    assert data.input_shape[1] == (64 if "64" in name or name in ("olivetti", "mednist") else 32)


@needs("mednist")
def test_copies_in_mednist_stay_together() -> None:
    data = load("mednist")
    pool = data.pool()
    assert len(pool) - len(images(pool)) == 3  # as its makers' files have them
    assert sum(len(part) - len(images(part)) for part in (data.private, data.public, data.test)) == 3


@needs("tinyimagenet")
def test_resizing_gives_the_small_pictures_from_the_large_ones() -> None:
    folder = Path(os.environ["GRADVEIL_DATA"]) / "tinyimagenet"
    large, small = folder / "tinyimagenet64_train_600.npz", folder / "tinyimagenet32_train_3000.npz"
    if not (large.is_file() and small.is_file()):
        pytest.skip("the folder has not both sizes")
    shrunk = resize_square(np.load(large)["images"][:6], 32).astype(int)
    whole = np.load(small)["images"].astype(int)
    nearest = [np.abs(whole - image).reshape(len(whole), -1).max(axis=1).min() for image in shrunk]
    assert max(nearest) <= 1  # rounding of halves


@needs("olivetti")
def test_people_apart() -> None:
    data = load("olivetti:split=person")
    assert len(set(data.public.y.tolist())) == 16
    assert len(data.public) == 160
    assert not set(data.public.y.tolist()) & set(data.private.y.tolist())


@needs("cifar10")
@needs("tinyimagenet")
def test_photographs_of_another_set_as_the_public_part() -> None:
    data = load("cifar10:public=tinyimagenet")
    assert data.public.x.shape[1:] == (3, 32, 32)
    assert data.public_from == "tinyimagenet"
    assert data.num_classes == 10
    assert data.class_names[3] == "cat"
