from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gradveil.core.errors import UserError
from gradveil.data import load


def records(x: np.ndarray, *labels: np.ndarray) -> bytes:
    columns = [label.astype(np.uint8)[:, None] for label in labels]
    return np.concatenate([*columns, x.transpose(0, 3, 1, 2).reshape(len(x), -1)], axis=1).tobytes()


def test_cifar10_from_the_binary_version(home: Path, made: Callable) -> None:
    folder = home / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    x, y = made(50, 32, 32, 3, classes=10)
    (folder / "data_batch_1.bin").write_bytes(records(x[:20], y[:20]))
    (folder / "data_batch_2.bin").write_bytes(records(x[20:40], y[20:40]))
    (folder / "test_batch.bin").write_bytes(records(x[40:], y[40:]))
    (folder / "batches.meta.txt").write_text("\n".join(f"class{i}" for i in range(10)) + "\n\n")
    data = load("cifar10")
    assert [len(part) for part in (data.private, data.public, data.test)] == [24, 16, 10]
    assert np.array_equal((data.test.x.numpy().transpose(0, 2, 3, 1) * 255).round(), x[40:])
    assert data.test.y.tolist() == y[40:].tolist()
    assert data.class_names[3] == "class3"
    assert data.mean[1].item() == pytest.approx(0.48226)


def test_cifar100_takes_the_fine_label(home: Path, made: Callable) -> None:
    folder = home / "cifar100" / "cifar-100-binary"
    folder.mkdir(parents=True)
    x, fine = made(40, 32, 32, 3, classes=20)
    for name in ("train.bin", "test.bin"):
        (folder / name).write_bytes(records(x if name == "train.bin" else 255 - x, fine // 5, fine))
    data = load("cifar100")
    assert data.test.y.tolist() == fine.tolist()
    assert data.num_classes == 100  # though only twenty of them occur
    assert np.array_equal((data.test.x[7].numpy().transpose(1, 2, 0) * 255).round(), 255 - x[7])


@pytest.mark.parametrize("size", [0, 3072, 3073 * 4 - 1])
def test_a_file_that_is_cut_off(size: int, home: Path) -> None:
    (home / "cifar10").mkdir()
    (home / "cifar10" / "data_batch_1.bin").write_bytes(b"\0" * size)
    with pytest.raises(UserError, match="is the file cut off"):
        load("cifar10")


class Bomb:
    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, (f"open({str(self.trace)!r}, 'w').close()",)


def test_pickles_are_refused_and_never_loaded(home: Path) -> None:
    folder = home / "cifar10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    (folder / "data_batch_1").write_bytes(pickle.dumps(Bomb(home / "loaded")))
    with pytest.raises(UserError, match="binary version"):
        load("cifar10")
    assert not (home / "loaded").exists()
    pickle.loads((folder / "data_batch_1").read_bytes())
    assert (home / "loaded").exists()  # it would have gone off
