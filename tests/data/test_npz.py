from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gradveil.core.errors import UserError
from gradveil.data import load
from gradveil.data.readers import npz

X = np.random.default_rng(0).integers(0, 256, (20, 4, 4, 3), dtype=np.uint8)
Y = np.arange(20) % 4


def together(data) -> dict[bytes, int]:  # type: ignore[no-untyped-def]
    """Every image of a data set as bytes, with its label."""
    pool = data.pool()
    pixels = (pool.x * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    return {image.numpy().tobytes(): int(label) for image, label in zip(pixels, pool.y, strict=True)}


@pytest.mark.parametrize("images", [X, X[..., :1], X[..., 0], X.astype(np.float32) / 255, X.astype(">f8") / 255])
@pytest.mark.parametrize("labels", [Y, Y.astype(np.uint8)[:, None]])
def test_every_image_and_label_arrives(images: np.ndarray, labels: np.ndarray, tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", images=images, labels=labels)
    data = load(str(tmp_path / "a.npz"))
    whole = X if images.ndim == 4 and images.shape[3] == 3 else X[..., :1]
    assert together(data) == {image.tobytes(): int(label) for image, label in zip(whole, Y, strict=True)}
    assert data.num_classes == 4
    assert data.class_names == ("0", "1", "2", "3")
    assert torch.allclose(data.mean, data.public.x.mean((0, 2, 3)))  # measured on what anyone may have
    assert torch.allclose(data.std, data.public.x.std((0, 2, 3), correction=0))


BAD = {
    "needs the arrays": {"pictures": X, "labels": Y},
    "Python objects": {"images": np.array([object()] * 20), "labels": Y},
    "int16": {"images": X.astype(np.int16), "labels": Y},
    "bool": {"images": X > 100, "labels": Y},
    "give n×H×W": {"images": X[0, 0], "labels": Y},
    "transpose": {"images": np.zeros((20, 3, 9, 9), dtype=np.uint8), "labels": Y},
    "20 images but 19 labels": {"images": X, "labels": Y[1:]},
    "label -1 is negative": {"images": X, "labels": Y - 1},
    "not a class number": {"images": X, "labels": Y + 2**40},
    "labels are floats": {"images": X, "labels": Y.astype(float)},
    "labels are <U21": {"images": X, "labels": Y.astype(str)},
    "labels are 20×4": {"images": X, "labels": np.eye(4, dtype=int)[Y]},
    "from 0 to 2": {"images": np.where(X > 250, 2.0, 0.0), "labels": Y},
    "from -0.5 to": {"images": X / 255 - 0.5, "labels": Y},
    "not finite": {"images": np.where(X > 250, np.nan, 0.5), "labels": Y},
    "no image has label 1": {"images": X, "labels": Y * 2},
    "one class": {"images": X, "labels": Y * 0},
    "5 images are too few": {"images": X[:5], "labels": Y[:5]},
    "so they are empty": {"images": X[:, :0], "labels": Y},
    "too large": {"images": np.zeros((10, 1025, 4), dtype=np.uint8), "labels": Y[:10]},
}


@pytest.mark.parametrize("complaint", BAD)
def test_one_clear_line_about(complaint: str, tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "bad.npz", **BAD[complaint])
    with pytest.raises(UserError, match=complaint) as caught:
        load(tmp_path / "bad.npz")
    assert "\n" not in str(caught.value)


def test_the_number_of_classes_can_be_given(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=X, labels=Y * 2, class_names=["a", "b"])
    with pytest.raises(UserError, match="labels reach 6, but there are 2 classes"):
        load(tmp_path / "a.npz")
    data = load(tmp_path / "a.npz", num_classes=14)
    assert data.num_classes == 14
    assert data.class_names[:4] == ("a", "b", "2", "3")
    with pytest.raises(UserError, match="there are 5 classes"):
        load(tmp_path / "a.npz", num_classes=5)


def test_the_layout_of_medmnist(tmp_path: Path) -> None:
    parts = {"train": slice(0, 10), "val": slice(10, 15), "test": slice(15, 20)}
    arrays = {f"{part}_{what}": a[pick] for part, pick in parts.items() for what, a in (("images", X), ("labels", Y))}
    np.savez(tmp_path / "a.npz", **arrays)
    data = load(tmp_path / "a.npz")
    assert len(together(data)) == 20
    assert len(data.test) == 5
    assert data.test.y.tolist() == Y[15:].tolist()


def test_a_folder_of_archives_by_name_and_size(tmp_path: Path, made: Callable) -> None:
    large, labels = made(30, 16, 16, 3)
    np.savez(tmp_path / "a_train_small.npz", images=X, labels=Y)
    np.savez(tmp_path / "a_train_large.npz", images=large, labels=labels)
    np.savez(tmp_path / "a_test_large.npz", images=255 - large[:12], labels=labels[:12])
    with pytest.raises(UserError, match="4 and 16 pixels; choose with size="):
        load(tmp_path)
    small, exact, between = (load(f"{tmp_path}:size={size}") for size in (4, 16, 8))
    assert [len(part) for part in (small.private, small.public, small.test)] == [8, 8, 4]
    assert [len(part) for part in (exact.private, exact.public, exact.test)] == [18, 12, 12]
    assert between.input_shape == (3, 8, 8)  # from the larger images
    assert len(between.test) == 12


def test_a_bomb_is_refused_by_its_headers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "bomb.npz", images=np.zeros((1000, 32, 32), dtype=np.uint8), labels=np.zeros(1000, int))
    assert (tmp_path / "bomb.npz").stat().st_size < 10_000
    monkeypatch.setattr(npz, "MAX_BYTES", 1_000_000)
    monkeypatch.setattr(npz, "read_up_to", lambda *_, **__: pytest.fail("unpacked"))
    with pytest.raises(UserError, match="more than 2 GiB"):
        npz.read_npz(tmp_path / "bomb.npz")


def test_an_array_that_claims_more_than_it_holds(tmp_path: Path) -> None:
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, {"descr": "|u1", "fortran_order": False, "shape": (10**9, 28, 28)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", member.getvalue() + b"\0" * 100)
    with pytest.raises(UserError, match="more than the file holds"):
        npz.read_npz(tmp_path / "a.npz")


def test_files_that_are_cut_off_or_something_else(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", images=X, labels=Y)
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.npz").write_bytes(b"no archive")
    (tmp_path / "worn.npz").write_bytes(whole[:300] + bytes(b ^ 0xFF for b in whole[300:340]) + whole[340:])
    for name in ("cut.npz", "text.npz", "worn.npz"):
        with pytest.raises(UserError, match=name):
            load(tmp_path / name)
