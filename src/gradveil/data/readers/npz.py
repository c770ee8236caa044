"""NumPy archives: `images` (n × H × W [× C], uint8 or floats in [0, 1]) and `labels`; never pickled objects.

One file may also hold the parts, as `train_images`, `train_labels`, `val_images` … (the layout of MedMNIST). Sizes and
types of all arrays are checked before anything but their headers is unpacked.
"""

import io
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from gradveil.core.errors import UserError, one_line, shape_text, shown
from gradveil.data.raw import MAX_BYTES, MAX_CLASSES, Array, Images, Options, Raw, concat
from gradveil.data.validation import checked
from gradveil.storage.reading import open_regular, read_up_to

TEST = ("test", "val")
RANK = -1  # an archive that somebody made is preferred to the publisher's files beside it
MAX_MEMBERS = 1_000
MAX_DIRECTORY = 1 << 20  # bytes of the list of members, and of one read
MAX_HEADER = 10_000  # bytes; it is a Python literal, which takes far more memory than its text
_NUMBERS = "biufU"  # kinds of numpy types that are read; U for the names of classes
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the two that numpy writes
# Exceptions of damaged archives, of their compression and of numpy headers (which are Python literals); an encrypted
# member raises RuntimeError.
_BROKEN: tuple[type[Exception], ...] = (
    *(OSError, EOFError, ValueError, SyntaxError, TypeError, RuntimeError, MemoryError, OverflowError, LookupError),
    *(zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError),
)


@dataclass(frozen=True)
class Header:
    """What an array says about itself, and the member of the archive that holds it."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    fortran: bool
    member: zipfile.ZipInfo


@dataclass(frozen=True)
class Archive:
    """An open archive whose arrays have been checked."""

    path: Path
    headers: dict[str, Header]
    file: zipfile.ZipFile

    def read(self, name: str) -> Array:
        header = self.headers[name]
        size = math.prod(header.shape) * header.dtype.itemsize
        with _damage_told(self.path), self.file.open(header.member) as file:
            _header(file, header.member)
            content = read_up_to(file, size)
            if len(content) != size:
                raise EOFError(f"'{name}' ends early")
        array = np.frombuffer(content, dtype=header.dtype)
        return array.reshape(header.shape, order="F" if header.fortran else "C")

    def part(self, prefix: str = "") -> Images:
        where = f"{self.path} ({prefix.rstrip('_')})" if prefix else str(self.path)
        return checked(self.read(f"{prefix}images"), self.read(f"{prefix}labels"), where)


class _SmallReads(io.BufferedReader):
    """A file that is read in small pieces: the list of members, too, is asked for in one piece."""

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(min(MAX_DIRECTORY + 1 if size is None or size < 0 else size, MAX_DIRECTORY + 1))
        if len(content) > MAX_DIRECTORY:
            raise ValueError("its list of members is too long")
        return content


def claims(folder: Path) -> bool:
    return any(folder.glob("*.npz"))


def read(folder: Path, options: Options) -> Raw:
    """The archives of a folder. The file name tells the test part; of several image sizes one is read."""
    paths = sorted(folder.glob("*.npz"))
    if len(paths) == 1:
        return read_npz(paths[0])
    heights = {path: height for path in paths if (height := _height_in(path)) is not None}
    tests = [path for path in heights if any(word in path.stem.lower() for word in TEST)]
    trains = [path for path in heights if path not in tests]
    if not trains:
        raise UserError(f"{folder}: no archive of training images (an .npz file with 'images' and 'labels').")
    height = _height({heights[path] for path in trains}, options.size, folder)
    train = [read_npz(path) for path in trains if heights[path] == height]
    test = [read_npz(path).train for path in tests if heights[path] == height]
    return Raw(concat([raw.train for raw in train]), concat(test) if test else None, train[0].class_names)


def read_npz(path: Path) -> Raw:
    with open_npz(path) as archive:
        arrays = archive.headers
        if "images" in arrays and "labels" in arrays:
            return Raw(archive.part(), None, _class_names(archive) if "class_names" in arrays else None)
        if {"train_images", "train_labels", "test_images", "test_labels"} <= arrays.keys():
            parts = [part for part in ("train_", "val_") if {f"{part}images", f"{part}labels"} <= arrays.keys()]
            return Raw(concat([archive.part(part) for part in parts]), archive.part("test_"))
    have = ", ".join(shown(name) for name in list(arrays)[:6]) or "nothing"
    raise UserError(f"{path}: needs the arrays 'images' and 'labels', has {have}.")


@contextmanager
def open_npz(path: Path) -> Iterator[Archive]:
    """An archive with the shape and type of every array: no objects, no false sizes, not too many and not too much."""
    with open_regular(path, MAX_BYTES) as file:
        with _damage_told(path):
            archive = zipfile.ZipFile(_SmallReads(file.raw))
            members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
            if len(members) > MAX_MEMBERS or len({m.filename for m in members}) < len(members):
                raise UserError(f"{path}: holds an array twice, or more than {MAX_MEMBERS:,} arrays.")
            if sum(member.file_size for member in members) > MAX_BYTES:
                raise UserError(f"{path}: would unpack to more than 2 GiB; give fewer or smaller images.")
            headers = {member.filename.removesuffix(".npy"): _checked_header(archive, member, path) for member in members}
        yield Archive(path, headers, archive)


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    try:
        yield
    except _BROKEN as error:
        raise UserError(f"{path}: damaged, or not an .npz archive ({one_line(error)}).") from None


def _checked_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> Header:
    name = shown(member.filename.removesuffix(".npy"))
    if member.compress_type not in _METHODS:
        raise UserError(f"{path}: {name} is compressed in a way that numpy does not write; save it with numpy.")
    with archive.open(member) as file:
        header = _header(file, member)
    shape, dtype = header.shape, header.dtype
    if dtype.hasobject:
        raise UserError(f"{path}: {name} holds Python objects, which are never loaded; save plain numbers.")
    if dtype.kind not in _NUMBERS or not dtype.itemsize:
        raise UserError(f"{path}: {name} has the type {shown(str(dtype))}; save plain numbers.")
    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) * dtype.itemsize > member.file_size:
        raise UserError(f"{path}: {name} claims {shown(shape_text(shape))} {dtype}, more than the file holds.")
    return header


def _header(file: IO[bytes], member: zipfile.ZipInfo) -> Header:
    """The header, whose own length is checked before it is read."""
    magic = file.read(8)
    if magic not in (b"\x93NUMPY\x01\x00", b"\x93NUMPY\x02\x00"):
        raise ValueError("an array is not in a format for plain numbers")
    field, parse = ("<H", np.lib.format.read_array_header_1_0) if magic[6] == 1 else ("<I", np.lib.format.read_array_header_2_0)
    prefix = file.read(struct.calcsize(field))
    if (length := struct.unpack(field, prefix)[0]) > MAX_HEADER:
        raise ValueError(f"the header of an array has {length:,} bytes")
    shape, fortran, dtype = parse(io.BytesIO(prefix + file.read(length)))
    return Header(shape, dtype, fortran, member)


def _class_names(archive: Archive) -> tuple[str, ...]:
    header = archive.headers["class_names"]
    if math.prod(header.shape) > MAX_CLASSES:
        raise UserError(f"{archive.path}: {math.prod(header.shape):,} class names; at most {MAX_CLASSES:,} are read.")
    return tuple(str(name) for name in archive.read("class_names").reshape(-1))


def _height_in(path: Path) -> int | None:
    with open_npz(path) as archive:
        header = archive.headers.get("images")
    return header.shape[1] if header and len(header.shape) > 1 else None


def _height(heights: set[int], size: int | None, folder: Path) -> int:
    """Which of several image sizes to read: the smallest that is at least `size`, else the largest."""
    if len(heights) > 1 and size is None:
        raise UserError(f"{folder}: holds images of {' and '.join(map(str, sorted(heights)))} pixels; choose with size=.")
    enough = [h for h in heights if size is None or h >= size]
    return min(enough) if enough else max(heights)
