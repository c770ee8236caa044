"""CelebA: aligned faces in one folder, and a list of forty binary attributes, one of which is the label."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gradveil.core.errors import UserError, shown, unknown
from gradveil.data.raw import Images, Options, Raw
from gradveil.data.readers.image_folder import entries
from gradveil.storage.reading import read_text

ATTRIBUTES, PARTITION, FACES = "list_attr_celeba.txt", "list_eval_partition.txt", "img_align_celeba"
DEFAULT = "Male"
MAX_LIST = 1 << 26  # bytes; the published list of attributes has 26 million
TEST = "2"  # in the published partition: 0 training, 1 validation, 2 test


def claims(folder: Path) -> bool:
    return (folder / ATTRIBUTES).is_file()


def read(folder: Path, options: Options) -> Raw:
    attribute = options.attribute or DEFAULT
    faces = folder / FACES
    if not faces.is_dir():
        raise UserError(f"{faces}: no such folder; it holds the faces of CelebA.")
    labels = _labels(folder / ATTRIBUTES, attribute)
    present = {entry.name for entry in entries(faces)}  # some of the 202,599 faces are enough
    files = [name for name in labels if name in present]
    if not files:
        raise UserError(f"{faces}: holds none of the faces listed in {ATTRIBUTES}.")
    partition = _partition(folder / PARTITION)
    train, test = ([f for f in files if (partition.get(f) == TEST) is wanted] for wanted in (False, True))
    parts = [Images([faces / f for f in part], np.array([labels[f] for f in part], dtype=np.int64)) for part in (train, test)]
    return Raw(parts[0], parts[1] if test else None, (f"not {attribute}", attribute))


def _labels(path: Path, attribute: str) -> dict[str, int]:
    """File name → 0 or 1. The list: a count, the names of the attributes, then one line per face with −1 or 1 each."""
    rows = _words(path)
    names = next(rows, []) and next(rows, [])
    if attribute not in names:
        raise unknown("attribute", attribute, names, hint=f"{path} lists all.")
    column, labels = names.index(attribute) + 1, dict[str, int]()
    for row in rows:
        if len(row) != len(names) + 1 or row[column] not in ("-1", "1"):
            raise UserError(f"{path}: the line of {shown(row[0])} does not hold {len(names)} values of -1 or 1.")
        labels[row[0]] = int(row[column] == "1")
    return labels


def _partition(path: Path) -> dict[str, str]:
    return {row[0]: row[-1] for row in _words(path)} if path.is_file() else {}


def _words(path: Path) -> Iterator[list[str]]:
    """The words of each line that is not empty."""
    return (line.split() for line in read_text(path, MAX_LIST).splitlines() if line.strip())
