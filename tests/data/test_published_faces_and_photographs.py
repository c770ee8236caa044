"""CelebA and Tiny ImageNet as their publishers lay them out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gradveil.core.errors import UserError
from gradveil.data import load
from gradveil.data.readers import image_folder
from gradveil.storage.reading import open_regular


@pytest.fixture
def celeba(home: Path, made: Callable) -> Path:
    faces = home / "celeba" / "img_align_celeba"
    faces.mkdir(parents=True)
    x, _ = made(30, 22, 18, 3)
    lines = ["30", "Smiling Male Young"]
    for i, image in enumerate(x):
        Image.fromarray(image).save(faces / f"{i:06d}.jpg")
        lines.append(f"{i:06d}.jpg  {1 if i % 3 == 0 else -1}  {1 if i % 2 else -1} 1")
    (home / "celeba" / "list_attr_celeba.txt").write_text("\n".join(lines))
    return home / "celeba"


def test_celeba_by_attribute(celeba: Path) -> None:
    data = load("celeba")
    assert data.input_shape == (3, 32, 32)  # the size of published attacks
    assert data.num_classes == 2
    assert data.class_names == ("not Male", "Male")
    assert data.pool().y.sum() == 15
    assert load("celeba:attribute=Smiling,size=16").pool().y.sum() == 10
    with pytest.raises(UserError, match="no attribute 'Smilling'; did you mean 'Smiling'"):
        load("celeba:attribute=Smilling")


def test_celeba_test_part_and_missing_faces(celeba: Path) -> None:
    (celeba / "list_eval_partition.txt").write_text("\n".join(f"{i:06d}.jpg {i // 10}" for i in range(30)))
    data = load("celeba")
    assert len(data.test) == 10
    assert data.test.y.tolist() == [0, 1] * 5
    for i in range(20, 30):
        (celeba / "img_align_celeba" / f"{i:06d}.jpg").unlink()
    assert len(load("celeba").pool()) == 20
    broken = (celeba / "list_attr_celeba.txt").read_text().replace("000003.jpg  1", "000003.jpg  ")
    (celeba / "list_attr_celeba.txt").write_text(broken)
    with pytest.raises(UserError, match=r"000003\.jpg"):
        load("celeba")


def test_only_what_a_limit_asks_for_is_decoded(celeba: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(image_folder, "open_regular", lambda path, limit: (opened.append(path), open_regular(path, limit))[1])
    assert len(load("celeba:limit=12").pool()) == 12
    assert len(set(opened)) == 12


def test_tiny_imagenet(home: Path, made: Callable) -> None:
    root = home / "tinyimagenet" / "tiny-imagenet-200"
    x, y = made(40, 64, 64, 3)
    ids = ["n01", "n02", "n03", "n04"]
    for part in ("train", "val"):
        (root / part / "images").mkdir(parents=True)
    (root / "train" / "images").rmdir()
    for i in range(32):
        folder = root / "train" / ids[y[i]] / "images"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[i]).save(folder / f"{i}.png")
    for i in range(32, 40):
        Image.fromarray(x[i]).save(root / "val" / "images" / f"{i}.png")
    (root / "wnids.txt").write_text("\n".join(ids))
    (root / "words.txt").write_text("n02\tfrog, toad\nn99\tno one\n")
    listing = root / "val" / "val_annotations.txt"
    listing.write_text("".join(f"{i}.png\t{ids[y[i]]}\t0\t0\t63\t63\n" for i in range(32, 40)))

    data = load("tinyimagenet:size=64")
    assert data.class_names[:4] == ("n01", "frog, toad", "n03", "n04")
    assert data.num_classes == 200
    assert data.test.y.tolist() == y[32:].tolist()
    assert np.array_equal((data.test.x.numpy().transpose(0, 2, 3, 1) * 255).round(), x[32:])
    assert load("tinyimagenet").input_shape == (3, 32, 32)
    listing.write_text("32.png\tn77\n")
    with pytest.raises(UserError, match="names no class"):
        load("tinyimagenet")
