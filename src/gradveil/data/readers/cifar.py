"""CIFAR-10 and CIFAR-100, binary version: one record per image, of its label bytes and 3 × 32 × 32 pixels.

The published "python version" is pickled. Loading a pickle runs code, so it is refused.
"""

from pathlib import Path

import numpy as np

from gradveil.core.errors import UserError
from gradveil.data.raw import MAX_BYTES, Images, Options, Raw, concat
from gradveil.storage.reading import read_bytes, read_text

PIXELS = 3 * 32 * 32
MAX_FILE = MAX_BYTES // 8  # of the publisher's files, the largest has 50,000 records
MAX_FILES = 8


def claims(folder: Path) -> bool:
    return bool(_files(folder, "data_batch_*.bin") or _files(folder, "train.bin") or _pickles(folder))


def read(folder: Path, options: Options) -> Raw:
    if batches := _files(folder, "data_batch_*.bin"):
        label_bytes, tests, names = 1, "test_batch.bin", "batches.meta.txt"
    elif batches := _files(folder, "train.bin"):
        label_bytes, tests, names = 2, "test.bin", "fine_label_names.txt"
    else:
        raise UserError(f"{_pickles(folder)[0]}: the python version of CIFAR is pickled; download the binary version.")
    if len(batches) > MAX_FILES:
        raise UserError(f"{folder}: {len(batches)} files of batches; at most {MAX_FILES} are read.")
    test = [_records(path, label_bytes) for path in _files(folder, tests)]
    train = concat([_records(path, label_bytes) for path in batches])
    return Raw(train, concat(test) if test else None, _names(folder, names))


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern)) or sorted(folder.glob(f"cifar*/{pattern}"))


def _pickles(folder: Path) -> list[Path]:
    """The files that the python version unpacks to."""
    return [*_files(folder, "data_batch_1"), *folder.glob("cifar-100-python"), *folder.glob("cifar-10-batches-py")]


def _records(path: Path, label_bytes: int) -> Images:
    content, record = np.frombuffer(read_bytes(path, MAX_FILE), dtype=np.uint8), label_bytes + PIXELS
    if not content.size or content.size % record:
        raise UserError(f"{path}: {content.size} bytes is not a whole number of {record}-byte records; is the file cut off?")
    table = content.reshape(-1, record)
    pixels = table[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Images(pixels, table[:, label_bytes - 1].astype(np.int64))  # CIFAR-100: coarse label, then fine


def _names(folder: Path, file: str) -> tuple[str, ...] | None:
    paths = _files(folder, file)
    return tuple(read_text(paths[0]).split()) if paths else None
