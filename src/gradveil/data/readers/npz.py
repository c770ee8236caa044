"""NumPy archives: `images` (n × H × W [× C], uint8 or floats in [0, 1]) and `labels`; never pickled objects.

One file may also hold the parts, as `train_images`, `train_labels`, `val_images` … (the layout of MedMNIST).
"""

import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from gradveil.core.errors import UserError, one_line, shape_text
from gradveil.data.raw import MAX_BYTES, Array, Images, Options, Raw, checked, concat

Header = tuple[tuple[int, ...], np.dtype[np.generic]]
TEST = ("test", "val")
RANK = -1  # an archive that somebody made is preferred to the publisher's files beside it
# Exceptions of damaged archives, of their compression and of numpy headers (which are Python literals); an encrypted
# member raises RuntimeError.
_BROKEN: tuple[type[Exception], ...] = (
    *(OSError, EOFError, ValueError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, KeyError, struct.error),
)


def claims(folder: Path) -> bool:
    return any(folder.glob("*.npz"))


def read(folder: Path, options: Options) -> Raw:
    """The archives of a folder. The file name tells the test part; of several image sizes one is read."""
    paths = sorted(folder.glob("*.npz"))
    if len(paths) == 1:
        return read_npz(paths[0])
    heights = {path: headers(path)["images"][0][1] for path in paths if "images" in headers(path)}
    tests = [path for path in heights if any(word in path.stem.lower() for word in TEST)]
    trains = [path for path in heights if path not in tests]
    if not trains:
        raise UserError(f"{folder}: no archive of training images (an .npz file with 'images' and 'labels').")
    height = _height({heights[path] for path in trains}, options.size, folder)
    train = [read_npz(path) for path in trains if heights[path] == height]
    test = [read_npz(path).train for path in tests if heights[path] == height]
    return Raw(concat([raw.train for raw in train]), concat(test) if test else None, train[0].class_names)


def read_npz(path: Path) -> Raw:
    arrays = headers(path)
    if "images" in arrays and "labels" in arrays:
        names = ["class_names"] if "class_names" in arrays else []
        images, labels, *rest = _load(path, ["images", "labels", *names])
        class_names = tuple(str(name) for name in rest[0].reshape(-1)) if rest else None
        return Raw(checked(images, labels, str(path)), None, class_names)
    if {"train_images", "train_labels", "test_images", "test_labels"} <= arrays.keys():
        return Raw(concat([_part(path, part) for part in ("train", "val") if f"{part}_images" in arrays]), _part(path, "test"))
    have = ", ".join(f"'{name}'" for name in list(arrays)[:6]) or "nothing"
    raise UserError(f"{path}: needs the arrays 'images' and 'labels', has {have}.")


def headers(path: Path) -> dict[str, Header]:
    """Shape and type of every array, checked before anything is unpacked: no objects, no more than 4 GiB, no false sizes."""
    result: dict[str, Header] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
            if sum(member.file_size for member in members) > MAX_BYTES:
                raise UserError(f"{path}: would unpack to more than 4 GiB.")
            for member in members:
                name = member.filename.removesuffix(".npy")
                with archive.open(member) as file:
                    shape, dtype = _header(file)
                if dtype.hasobject:
                    raise UserError(f"{path}: '{name}' holds Python objects, which are never loaded; save plain numbers.")
                if math.prod(shape) * dtype.itemsize > member.file_size:
                    raise UserError(f"{path}: '{name}' claims {shape_text(shape)} {dtype}, more than the file holds.")
                result[name] = shape, dtype
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except _BROKEN as error:
        raise UserError(f"{path}: not a readable .npz archive ({one_line(error)}).") from None
    return result


def _header(file: IO[bytes]) -> Header:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"array format {version} is not for plain numbers")
    first = version == (1, 0)
    shape, _, dtype = (np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0)(file)
    return shape, dtype


def _load(path: Path, names: list[str]) -> list[Array]:
    try:
        with zipfile.ZipFile(path) as archive:
            return [_array(archive, name) for name in names]
    except _BROKEN as error:
        raise UserError(f"{path}: damaged ({one_line(error)}).") from None


def _array(archive: zipfile.ZipFile, name: str) -> Array:
    with archive.open(f"{name}.npy") as file:
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def _part(path: Path, part: str) -> Images:
    images, labels = _load(path, [f"{part}_images", f"{part}_labels"])
    return checked(images, labels, f"{path} ({part})")


def _height(heights: set[int], size: int | None, folder: Path) -> int:
    """Which of several image sizes to read: the smallest that is at least `size`, else the largest."""
    if len(heights) > 1 and size is None:
        raise UserError(f"{folder}: holds images of {' and '.join(map(str, sorted(heights)))} pixels; choose with size=.")
    enough = [h for h in heights if size is None or h >= size]
    return min(enough) if enough else max(heights)
