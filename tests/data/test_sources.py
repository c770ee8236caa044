"""What may be written, or handed over, as data."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from gradveil.core.errors import UserError
from gradveil.data import load
from gradveil.data.source import resolve


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("mnst", "no data set 'mnst'; did you mean 'mnist'"),
        ("", "no data set ''"),
        ("mnist-5k:privat=3", "no setting 'privat'"),
        ("mnist-5k:private", "is not a setting"),
        ("mnist-5k:private=many", "private='many'"),
        ("mnist-5k:private=1,private=2", "given twice"),
        ("./nowhere", "no such file or folder"),
        ("nowhere/set.npz:size=32", "nowhere/set.npz: no such file"),
        (r"C:\data\set.npz", "no such file or folder"),
        ("no_such_module:make", "cannot import"),
        ("torchvision:CIFAR10", "torchvision"),
    ],
)
def test_text_that_means_nothing(text: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        load(text)
    assert "\n" not in str(caught.value)


def test_where_named_sets_are_looked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="create it and add"):
        load("cifar10")
    (home / "cifar10").mkdir()
    with pytest.raises(UserError, match="nothing to read here; expected the binary version"):
        load("cifar10")
    monkeypatch.delenv("GRADVEIL_DATA")
    with pytest.raises(UserError, match="GRADVEIL_DATA names, which is not set"):
        load("cifar10")


def test_only_celeba_has_attributes(home: Path, made: Callable) -> None:
    (home / "olivetti").mkdir()
    np.savez(home / "olivetti" / "a.npz", images=made(40, classes=40)[0], labels=made(40, classes=40)[1])
    assert load("olivetti").num_classes == 40
    with pytest.raises(UserError, match="only CelebA has attributes"):
        load("olivetti:attribute=Male")


def test_colons_and_equals_signs_in_a_path(tmp_path: Path, made: Callable) -> None:
    x, y = made()
    odd = tmp_path / "a:b c.npz"
    np.savez(odd, images=x, labels=y)
    assert len(load(str(odd)).pool()) == 40
    assert len(load(f"{odd}:limit=20,size=4").pool()) == 20
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match=r"not an \.npz file"):
        load(tmp_path / "notes.txt")
    assert resolve(f"{odd}:public=pkg.mod:make,limit=20").options.public == "pkg.mod:make"


X = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 4


class Items(Dataset):  # type: ignore[type-arg]
    classes = ("a", "b", "c", "d")

    def __init__(self, image: Callable[[int], object], n: int = 40):
        self.image, self.n = image, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[object, object]:
        return self.image(i), int(Y[i])


LAST = X.permute(0, 2, 3, 1)
SAME = {
    "tensors": (X, Y),
    "list": [X, Y],
    "arrays, channels last": (LAST.numpy(), Y.numpy()),
    "arrays, channels first": (X.numpy(), Y.numpy()),
    "tensors, channels last": (LAST, Y),
    "double": (X.double(), Y.int()),
    "labels in a column": (X, Y[:, None]),
    "TensorDataset": TensorDataset(X, Y),
    "items": Items(lambda i: X[i]),
    "items as arrays": Items(lambda i: LAST[i].numpy()),
    "factory": lambda: (X, Y),
}


@pytest.mark.parametrize("kind", SAME)
def test_objects_of_every_kind_are_the_same_data(kind: str) -> None:
    data = load(SAME[kind], seed=3)
    expected = load((X, Y), seed=3)
    assert torch.allclose(data.private.x, expected.private.x, atol=1e-7)
    assert torch.equal(data.private.y, expected.private.y)
    pool = {image.numpy().tobytes() for image in expected.pool().x}
    assert pool == {image.numpy().tobytes() for image in X}


def test_pictures_as_items() -> None:
    pictures = (LAST * 255).round().to(torch.uint8).numpy()
    data = load(Items(lambda i: Image.fromarray(pictures[i])))
    assert data.class_names == ("a", "b", "c", "d")
    assert {i.tobytes() for i in pictures} == {
        (i * 255).round().to(torch.uint8).permute(1, 2, 0).numpy().tobytes() for i in data.pool().x
    }
    grey = load(Items(lambda i: Image.fromarray(pictures[i]).convert("L")))
    assert grey.input_shape == (1, 8, 8)


def test_nothing_is_shared_with_the_caller() -> None:
    x = X.clone()
    data = load((x, Y))
    before = data.pool().x.clone()
    x.zero_()
    assert torch.equal(data.pool().x, before)


def failing(i: int) -> object:
    if i == 7:
        raise ValueError("no such\nslide")
    return X[i]


BAD = {
    "not normalised": (X * 4 - 2, Y),
    "int64": ((X * 255).long(), Y),
    "labels are 40×4": (X, torch.eye(4)[Y]),
    "40 images but 39 labels": (X, Y[1:]),
    "not list and list": (X.tolist(), Y.tolist()),
    "a int is not data": 3,
    "item 7 raised ValueError: no such slide": Items(failing),
    "item 5 is 4×4×3": Items(lambda i: X[i, :, :4, :4] if i == 5 else X[i]),
    "must be a tensor": Items(lambda i: "picture"),
    "the Dataset is empty": Items(lambda i: X[i], n=0),
    "raised ZeroDivisionError": lambda: 1 / 0,
}


@pytest.mark.parametrize("complaint", BAD)
def test_one_clear_line_about(complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        load(BAD[complaint])
    assert "\n" not in str(caught.value)


def test_a_factory_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hospital_slides.py").write_text(
        "import torch\ndef slides():\n    return torch.rand(40, 1, 8, 8), torch.arange(40) % 2\nnumber = 3\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    data = load("hospital_slides:slides:private=10")
    assert len(data.private) == 10
    assert data.name == "hospital_slides:slides:private=10"
    with pytest.raises(UserError, match="has no 'slide'"):
        load("hospital_slides:slide")
    with pytest.raises(UserError, match="not data"):
        load("hospital_slides:number")


def test_torchvision_where_it_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with torchvision's interface: a `train` switch, PIL items, files that may be missing."""
    pictures = (LAST * 255).round().to(torch.uint8).numpy()

    class Digits(Items):
        def __init__(self, root: str, train: bool = True, download: bool = False):
            assert root == str(home)
            assert not download
            super().__init__(lambda i: Image.fromarray(pictures[i] if train else 255 - pictures[i]), 40 if train else 12)

    class Absent:
        def __init__(self, root: str, split: str = "train"):
            raise RuntimeError("Dataset not found.\nUse download=True")

    datasets = types.ModuleType("torchvision.datasets")
    datasets.Digits, datasets.Absent = Digits, Absent  # type: ignore[attr-defined]
    package = types.ModuleType("torchvision")
    package.datasets = datasets  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)

    data = load("torchvision:Digits:private=10")
    assert [len(part) for part in (data.private, data.public, data.test)] == [10, 30, 12]
    assert np.array_equal((data.test.x[3].numpy().transpose(1, 2, 0) * 255).round(), 255 - pictures[3])
    with pytest.raises(UserError, match=r"Dataset not found\. Use download=True"):
        load("torchvision:Absent")
    with pytest.raises(UserError, match="did you mean 'Digits'"):
        load("torchvision:Digit")


def test_files_that_may_not_be_read_as_text(home: Path) -> None:
    (home / "celeba" / "img_align_celeba").mkdir(parents=True)
    (home / "celeba" / "list_attr_celeba.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(UserError, match=r"list_attr_celeba.txt: not UTF-8 text"):
        load("celeba")


def test_a_number_of_classes_that_makes_no_sense() -> None:
    with pytest.raises(UserError, match="1 classes are too few"):
        load((X, Y), num_classes=1)
    assert load((X, Y * 2), num_classes=9).num_classes == 9
