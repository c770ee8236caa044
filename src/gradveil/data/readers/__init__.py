"""Readers, one per file format. Each recognizes a folder of its files and reads it; the first that does is used."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from gradveil.core.errors import UserError
from gradveil.data.raw import Options, Raw
from gradveil.data.readers import celeba, cifar, idx, image_folder, npz, svhn, tinyimagenet


class Reader(Protocol):
    def claims(self, folder: Path) -> bool: ...

    def read(self, folder: Path, options: Options) -> Raw: ...


# Image folders come last: they would accept any tree with pictures in it.
READERS: tuple[Reader, ...] = (idx, npz, cifar, svhn, celeba, tinyimagenet, image_folder)


def reader_of(folder: Path) -> Reader | None:
    return next((reader for reader in READERS if reader.claims(folder)), None) if folder.is_dir() else None


def read_folder(folder: Path, options: Options, *, expected: str) -> Raw:
    reader = reader_of(folder)
    if reader is None:
        raise UserError(f"{folder}: nothing to read here; expected {expected}.")
    if options.attribute and not celeba.claims(folder):
        raise UserError(f"{folder}: only CelebA has attributes; leave out attribute={options.attribute}.")
    return reader.read(folder, options)
