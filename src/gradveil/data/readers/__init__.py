"""Readers, one per file format. Each recognizes a folder of its files and reads it; the first that does is used."""

import collections
import functools
import importlib
import pkgutil
from pathlib import Path
from typing import Protocol, runtime_checkable

from gradveil.core.errors import UserError
from gradveil.data.raw import Options, Raw
from gradveil.data.readers import celeba, image_folder

MAX_ENTRIES = 100_000  # of the folder itself; readers bound what lies below it


@runtime_checkable
class Reader(Protocol):
    """A module of this package. `RANK` (0 unless it is set) orders readers that recognize the same folder."""

    def claims(self, folder: Path) -> bool: ...

    def read(self, folder: Path, options: Options) -> Raw: ...


@functools.cache
def readers() -> list[Reader]:
    """Every module here that has `claims` and `read`."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return sorted((m for m in modules if isinstance(m, Reader)), key=lambda module: getattr(module, "RANK", 0))


def reader_of(folder: Path) -> Reader | None:
    return next((reader for reader in readers() if reader.claims(folder)), None) if folder.is_dir() else None


def read_folder(folder: Path, options: Options, *, expected: str) -> Raw:
    collections.deque(image_folder.entries(folder, MAX_ENTRIES), maxlen=0)  # counted before every reader looks through it
    reader = reader_of(folder)
    if reader is None:
        raise UserError(f"{folder}: nothing to read here; expected {expected}.")
    if options.attribute and not celeba.claims(folder):
        raise UserError(f"{folder}: only CelebA has attributes; leave out attribute={options.attribute}.")
    return reader.read(folder, options)
