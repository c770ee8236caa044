"""One validation of images and labels at every door: an audit, a protected copy, a shield, a Flower client."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradveil as gv
from gradveil.core.errors import UserError
from gradveil.data import load
from gradveil.protection.dataset import protect_files

CLASSES, SHAPE = 3, (1, 6, 6)
RNG = torch.Generator().manual_seed(0)
X, Y = torch.rand(30, *SHAPE, generator=RNG), torch.arange(30) % CLASSES


def changed(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[3] = value
    return tensor


BAD: dict[str, tuple[Tensor, Tensor, str]] = {
    "NaN": (changed(X, float("nan")), Y, "pixels are not finite"),
    "infinite": (changed(X, float("inf")), Y, "pixels are not finite"),
    "normalised": (X * 4 - 2, Y, "pixels run from"),
    "too bright": (changed(X, 1.01), Y, "pixels run from"),
    "complex": (X + 0j, Y, "images are"),
    "whole numbers": ((X * 255).long(), Y, "images are"),
    "no images": (X[:0], Y[:0], "images are"),
    "flat": (X.flatten(1), Y, "images are"),
    "fewer labels": (X, Y[1:], "30 images but 29 labels"),
    "negative label": (X, Y - 1, "label -1 is negative"),
    "NaN labels": (X, changed(Y.float(), float("nan")), "targets are not finite"),
    "complex labels": (X, Y + 0j, "labels are"),
    "labels in boxes": (X, Y[:, None, None], "labels are"),
}


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES))


def by_audit(x: Tensor, y: Tensor, folder: Path) -> None:
    load((x, y), rows=True)


def by_archive(x: Tensor, y: Tensor, folder: Path) -> None:
    np.savez(folder / "a.npz", images=np.moveaxis(x.numpy(), 1, -1) if x.ndim == 4 else x.numpy(), labels=y.numpy())
    protect_files(folder / "a.npz", folder / "b.npz", "mixup")


def by_shield_data(x: Tensor, y: Tensor, folder: Path) -> None:
    gv.protect(network(), "prune:ratio=0.5", data=(x, y), num_classes=CLASSES)


def by_shield_batch(x: Tensor, y: Tensor, folder: Path) -> None:
    gv.protect(network(), "prune:ratio=0.5", data=(X, Y)).backward(x, y)


DOORS = (by_audit, by_archive, by_shield_data, by_shield_batch)


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_bad_images_and_labels_are_refused_alike(door: Callable[..., None], case: str, tmp_path: Path) -> None:
    x, y, words = BAD[case]
    with warnings.catch_warnings(), pytest.raises(UserError) as error:
        warnings.simplefilter("ignore")  # numpy's, about casts
        door(x, y, tmp_path)
    assert "\n" not in str(error.value)
    if not (door is by_archive and "complex" in case):  # no archive holds complex numbers
        assert re.search(words.replace("images are", "images are|tensors|too few"), str(error.value))


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_good_ones_are_taken(door: Callable[..., None], tmp_path: Path) -> None:
    door(X, Y, tmp_path)


def test_a_batch_must_be_of_the_task() -> None:
    model = network()
    shield = gv.protect(model, "none", data=(X, Y))
    for x, y, words in (
        (X[:, :, :5], Y, "give n×1×6×6"),
        (X.repeat(1, 3, 1, 1), Y, "give n×1×6×6"),
        (X, Y + 1, "label 3 is not a class number below 3"),
        ((X * 255).byte(), Y, "give floats"),
        (X.numpy(), Y, "must be tensors"),
    ):
        with pytest.raises(UserError, match=words):
            shield.backward(x, y)
    assert all(p.grad is None for p in model.parameters())


def test_bytes_are_pixels_and_rounding_is_no_fault() -> None:
    shield = gv.protect(network(), "none", data=((X * 255).byte(), Y))
    shield.backward(X + 1e-6, Y)
    assert all(p.grad is not None for p in shield.model.parameters())
