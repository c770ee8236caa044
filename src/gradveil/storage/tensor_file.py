"""Safetensors files, read without trust: the header is checked whole before memory is taken for any tensor.

Tensors are read into memory, not mapped: a file that is cut off while it is used cannot stop the program.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from gradveil.core.errors import UserError, shown
from gradveil.core.types import Tensors
from gradveil.storage.reading import MAX_JSON, open_regular, parse_json, shown_path, unreadable

MAX_BYTES = 4 << 30  # of a file
MAX_TENSORS = 50_000
MAX_NAME = 1_000  # characters
MAX_AXES = 16
MAX_NUMBERS = 1 << 62  # the product of all sizes, where empty axes count as one: strides must fit 64 bits
METADATA = "__metadata__"
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
}


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class TensorFile:
    """An open file whose header has been checked."""

    path: Path
    metadata: Mapping[str, str]
    places: Mapping[str, TensorPlace]
    file: BufferedReader

    def read(self, name: str, *index: int) -> Tensor:
        """A tensor; with `index`, only its part at these first indices, which are not negative."""
        place = self.places[name]
        shape, before = place.shape[len(index) :], 0
        for i, size in zip(index, place.shape, strict=False):
            if not 0 <= i < size:
                raise IndexError(f"'{name}' has no index {index}")
            before = before * size + i
        count = math.prod(shape)
        buffer = bytearray(count * place.dtype.itemsize)
        try:
            self.file.seek(place.start + before * len(buffer))
            whole = self.file.readinto(buffer) == len(buffer)
        except OSError as error:
            raise unreadable(self.path, error) from None
        if not whole:
            raise UserError(f"{self.path}: it was cut off while it was read.")
        if not buffer:
            return torch.empty(shape, dtype=place.dtype)
        if place.dtype == torch.bool:  # other bytes than 0 and 1 are no valid values
            return torch.frombuffer(buffer, dtype=torch.uint8).ne(0).reshape(shape)
        return torch.frombuffer(buffer, dtype=place.dtype).reshape(shape)

    def tensors(self) -> Tensors:
        return {name: self.read(name) for name in self.places}


@contextmanager
def open_tensors(path: Path, limit: int = MAX_BYTES) -> Iterator[TensorFile]:
    """A safetensors file of at most `limit` bytes: `{name: place}`, the places without gaps and overlaps."""
    with open_regular(path, limit) as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        body = file.seek(0, 2) - 8 - length
        if length < 2 or body < 0:
            _refuse(path, "its header is not whole")
        if length > MAX_JSON:
            _refuse(path, f"its header has {length:,} bytes; at most {MAX_JSON:,} are read")
        file.seek(8)
        header = _parsed(file.read(length), path)
        metadata = header.pop(METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            _refuse(path, "its metadata is not text")
        if len(header) > MAX_TENSORS:
            _refuse(path, f"{len(header):,} tensors; at most {MAX_TENSORS:,} are read")
        places = {name: _place(path, name, entry, 8 + length) for name, entry in header.items()}
        end = 8 + length
        for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].end)):
            if place.start != end:
                _refuse(path, f"tensor {shown(name)} does not begin where the one before it ends")
            end = place.end
        if end != 8 + length + body:
            _refuse(path, "its tensors do not end where the file ends")
        yield TensorFile(path, metadata, places, file)


def read_tensors(path: Path, limit: int = MAX_BYTES) -> Tensors:
    """All tensors of a file."""
    with open_tensors(path, limit) as file:
        return file.tensors()


def _parsed(text: bytes, path: Path) -> dict[str, object]:
    try:
        header = parse_json(text, "the header")
    except UserError as error:
        _refuse(path, str(error).rstrip("."))
    if not isinstance(header, dict):
        _refuse(path, "its header is no mapping")
    return header


def _place(path: Path, name: str, entry: object, offset: int) -> TensorPlace:
    if len(name) > MAX_NAME:
        _refuse(path, f"a name of {len(name):,} characters; at most {MAX_NAME:,} are read")
    values = entry if isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"} else {}
    dtype = DTYPES.get(kind) if isinstance(kind := values.get("dtype"), str) else None
    shape, offsets = (_sizes(values.get(key)) for key in ("shape", "data_offsets"))
    if dtype is None or shape is None or len(shape) > MAX_AXES or offsets is None or len(offsets) != 2:
        _refuse(path, f"tensor {shown(name)} has the entry {shown(entry)}")
    if math.prod(max(1, n) for n in shape) > MAX_NUMBERS:
        _refuse(path, f"tensor {shown(name)} has the shape {shown(shape)}")
    if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        _refuse(path, f"tensor {shown(name)} has {offsets[1] - offsets[0]} bytes, which is not its shape {shown(shape)}")
    return TensorPlace(dtype, shape, offset + offsets[0], offset + offsets[1])


def _sizes(value: object) -> tuple[int, ...] | None:
    """A list of whole numbers that are not negative."""
    if isinstance(value, list) and all(type(n) is int and 0 <= n <= MAX_NUMBERS for n in value):
        return tuple(value)
    return None


def _refuse(path: Path, reason: str) -> NoReturn:
    raise UserError(f"{shown_path(path)} is damaged, or not a safetensors file ({reason}); replace or remove it.")
