"""The idx files of MNIST and similar sets: a header of sizes, then bytes; plain or gzipped."""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np

from gradveil.core.errors import UserError, one_line, shape_text
from gradveil.data.raw import MAX_BYTES, Array, Images, Options, Raw
from gradveil.data.validation import checked
from gradveil.storage.reading import open_regular, read_up_to

_BYTES = 8  # the idx type number of unsigned bytes


def claims(folder: Path) -> bool:
    return _locate(folder, "train-images") is not None


def read(folder: Path, options: Options) -> Raw:
    train = _part(folder, "train")
    return Raw(train, _part(folder, "t10k") if _locate(folder, "t10k-images") else None)


def read_idx(path: Path) -> Array:
    """One idx file of bytes; its header must agree with its length."""
    try:
        with open_regular(path, MAX_BYTES) as stored:
            file: IO[bytes] = cast(IO[bytes], gzip.GzipFile(fileobj=stored)) if path.suffix == ".gz" else stored
            start = file.read(4)
            if len(start) < 4 or start[:2] != b"\0\0" or start[2] != _BYTES or start[3] not in (1, 3):
                raise UserError(f"{path}: not an idx file of bytes (images or labels).")
            header = file.read(4 * start[3])
            if len(header) < 4 * start[3]:
                raise UserError(f"{path}: the file ends within its header.")
            shape = struct.unpack(f">{start[3]}I", header)
            size = math.prod(shape)
            if size > MAX_BYTES:
                raise UserError(f"{path}: its header claims {shape_text(shape)} bytes, more than 2 GiB.")
            content = read_up_to(file, size + 1)
    except (OSError, EOFError, MemoryError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}).") from None
    if len(content) != math.prod(shape):
        difference = "fewer" if len(content) < math.prod(shape) else "more"
        raise UserError(f"{path}: its header claims {shape_text(shape)} bytes, the file holds {difference}.")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _locate(folder: Path, stem: str) -> Path | None:
    """The file of the published name (`train-images-idx3-ubyte`, also with a dot), here or where torchvision puts it."""
    patterns = (f"{stem}?idx*", f"*/{stem}?idx*", f"*/raw/{stem}?idx*")
    return next((path for pattern in patterns for path in sorted(folder.glob(pattern))), None)


def _part(folder: Path, part: str) -> Images:
    images, labels = (_locate(folder, f"{part}-{kind}") for kind in ("images", "labels"))
    if images is None or labels is None:
        raise UserError(f"{folder}: {part}-{'labels' if images else 'images'}-idx… is missing.")
    return checked(read_idx(images), read_idx(labels), f"{images.parent}/{part}")
