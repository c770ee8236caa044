"""Tiny ImageNet as published: training pictures by class, validation pictures by a list; the test part has no labels."""

from pathlib import Path

import numpy as np

from gradveil.core.errors import UserError, shown
from gradveil.data.raw import Images, Options, Raw
from gradveil.data.readers.image_folder import by_class
from gradveil.storage.reading import read_text

MAX_LIST = 1 << 24  # bytes; the published lists have 2.6 million


def claims(folder: Path) -> bool:
    return _root(folder) is not None


def read(folder: Path, options: Options) -> Raw:
    root = _root(folder)
    assert root is not None
    train, ids = by_class(root / "train")
    return Raw(train, _validation(root / "val", ids) if (root / "val").is_dir() else None, _words(root, ids))


def _root(folder: Path) -> Path | None:
    for root in (folder, folder / "tiny-imagenet-200"):
        if (root / "wnids.txt").is_file() and (root / "train").is_dir():
            return root
    return None


def _validation(folder: Path, ids: tuple[str, ...]) -> Images:
    listing = folder / "val_annotations.txt"
    if not listing.is_file():
        raise UserError(f"{listing}: no such file; it holds the labels of the validation pictures.")
    labels = {name: i for i, name in enumerate(ids)}
    rows = [line.split("\t") for line in read_text(listing, MAX_LIST).splitlines() if line.strip()]
    if bad := next((row for row in rows if len(row) < 2 or row[1] not in labels), None):
        raise UserError(f"{listing}: line {shown(' '.join(bad))} names no class of the training part.")
    if bad := next((row for row in rows if Path(row[0]).name != row[0]), None):
        raise UserError(f"{listing}: {shown(bad[0])} is not the name of a picture.")  # it may lead anywhere
    return Images([folder / "images" / row[0] for row in rows], np.array([labels[row[1]] for row in rows], dtype=np.int64))


def _words(root: Path, ids: tuple[str, ...]) -> tuple[str, ...]:
    """Readable names for WordNet numbers, where the file that lists them exists."""
    path = root / "words.txt"
    lines = read_text(path, MAX_LIST).splitlines() if path.is_file() else []
    words = dict(line.split("\t", 1) for line in lines if "\t" in line)
    return tuple(words.get(name, name) for name in ids)
