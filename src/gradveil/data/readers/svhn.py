"""SVHN, cropped digits: MATLAB files with `X` (32 × 32 × 3 × n bytes) and `y` (digits; 10 stands for zero).

Of MATLAB's format (level 5) only what the publisher uses is read: matrices of numbers, plain or compressed. A general
reader would unpack and build whatever a file claims.
"""

import math
import struct
import zlib
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from gradveil.core.errors import UserError, one_line, shape_text, shown
from gradveil.data.raw import MAX_BYTES, Array, Images, Options, Raw
from gradveil.data.validation import checked
from gradveil.storage.reading import Readable, open_regular, read_up_to

HEADER = 128  # bytes before the first element
MAX_VARIABLES = 100
_MATRIX, _COMPRESSED = 14, 15
_TYPES = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
_PIECE = 1 << 16


class Element(NamedTuple):
    """A typed piece of a file, before its content."""

    kind: int
    size: int
    inline: bytes | None  # the content of a piece of at most four bytes


class _Inflated:
    """The content of a compressed element, unpacked as far as it is read."""

    def __init__(self, file: Readable, size: int):
        self._file, self._left, self._decoder = file, size, zlib.decompressobj()

    def read(self, size: int, /) -> bytes:
        content = bytearray()
        while len(content) < size and not self._decoder.eof:
            piece = self._decoder.unconsumed_tail
            if not piece:
                piece = self._file.read(min(_PIECE, self._left))
                self._left -= len(piece)
            if not piece:
                break
            content += self._decoder.decompress(piece, size - len(content))
        return bytes(content)


def claims(folder: Path) -> bool:
    return (folder / "train_32x32.mat").is_file()


def read(folder: Path, options: Options) -> Raw:
    test = folder / "test_32x32.mat"
    return Raw(_mat(folder / "train_32x32.mat"), _mat(test) if test.is_file() else None)


def _mat(path: Path) -> Images:
    try:
        with open_regular(path, MAX_BYTES) as file:
            arrays = _matrices(file)
    except (OSError, EOFError, ValueError, MemoryError, struct.error, zlib.error) as error:
        raise UserError(f"{path}: not a readable MATLAB file ({one_line(error)}).") from None
    if not {"X", "y"} <= arrays.keys():
        raise UserError(f"{path}: needs the variables X and y; is the file cut off?")
    x, y = arrays["X"], arrays["y"].reshape(-1)
    if x.ndim != 4 or x.shape[3] != len(y):
        raise UserError(f"{path}: X is {shape_text(x.shape)}, y {shape_text(arrays['y'].shape)}; these do not fit.")
    return checked(x.transpose(3, 0, 1, 2), np.where(y == 10, 0, y), str(path))


def _matrices(file: IO[bytes]) -> dict[str, Array]:
    """The matrices X and y; others are passed over."""
    start = file.read(HEADER)
    if len(start) < HEADER or start[124:128] != b"\x00\x01IM":
        raise ValueError("it does not begin like MATLAB's format of level 5")
    arrays: dict[str, Array] = {}
    for _ in range(MAX_VARIABLES):
        if len(tag := file.read(8)) < 8:
            return arrays
        kind, size = struct.unpack("<II", tag)
        end = file.tell() + size
        stream: Readable = _Inflated(file, size) if kind == _COMPRESSED else file
        kind = _element(stream).kind if kind == _COMPRESSED else kind
        if kind == _MATRIX and (matrix := _matrix(stream)) is not None:
            arrays[matrix[0]] = matrix[1]
        file.seek(end)
    raise ValueError(f"more than {MAX_VARIABLES} variables")


def _matrix(stream: Readable) -> tuple[str, Array] | None:
    _content(stream, _element(stream), 8)  # flags
    sizes = _content(stream, _element(stream), 4 * 8)
    shape = struct.unpack(f"<{len(sizes) // 4}i", sizes)
    name = _content(stream, _element(stream), 64).decode("ascii", errors="replace")
    if name not in ("X", "y"):
        return None
    values = _element(stream)
    dtype = np.dtype(_TYPES[values.kind]) if values.kind in _TYPES else None
    if dtype is None or min(shape, default=-1) < 0 or math.prod(shape) * dtype.itemsize != values.size:
        raise ValueError(f"'{name}' of the shape {shown(shape)} has {values.size:,} bytes of type {values.kind}")
    return name, np.frombuffer(_content(stream, values, MAX_BYTES), dtype=dtype).reshape(shape, order="F")


def _element(stream: Readable) -> Element:
    tag = stream.read(8)
    kind, size = struct.unpack("<II", tag)
    return Element(kind & 0xFFFF, kind >> 16, tag[4:]) if kind >> 16 else Element(kind, size, None)


def _content(stream: Readable, element: Element, limit: int) -> bytearray:
    if element.size > limit:
        raise ValueError(f"an element has {element.size:,} bytes")
    if element.inline is not None:
        return bytearray(element.inline[: element.size])
    content = read_up_to(stream, element.size)
    if len(content) < element.size:
        raise EOFError("it ends within a variable; is the file cut off?")
    stream.read(-element.size % 8)  # padding
    return content
