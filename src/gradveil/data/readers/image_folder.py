"""Folders of pictures, one sub-folder per class; `train` and `test` (or `val`) folders above them are the parts."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from gradveil.core.errors import UserError, one_line
from gradveil.data.raw import MAX_BYTES, Array, Images, Options, Raw
from gradveil.data.resize import resize_square

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
TEST = ("test", "val", "valid", "validation")
MAX_PIXELS = 1 << 26  # per picture file
RANK = 1  # last: it accepts any tree with pictures in it
_BROKEN = (OSError, EOFError, SyntaxError, ValueError, Image.DecompressionBombError)  # what Pillow raises on bad files


def claims(folder: Path) -> bool:
    return any(_pictures(sub, first=True) for sub in subfolders(folder)) or bool(_loose(folder))


def read(folder: Path, options: Options) -> Raw:
    if _loose(folder):
        raise UserError(f"{folder}: pictures lie outside sub-folders; put them into one sub-folder per class.")
    if not (folder / "train").is_dir():
        train, names = by_class(folder)
        return Raw(train, None, names)
    train, names = by_class(folder / "train")
    test = next((folder / name for name in TEST if (folder / name).is_dir()), None)
    return Raw(train, by_class(test, names)[0] if test else None, names)


def subfolders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "__")))


def by_class(folder: Path, names: Sequence[str] | None = None) -> tuple[Images, tuple[str, ...]]:
    """The pictures below each sub-folder. The classes are `names`, or the names of the sub-folders."""
    names = tuple(sub.name for sub in subfolders(folder)) if names is None else tuple(names)
    if extra := {sub.name for sub in subfolders(folder)} - set(names):
        raise UserError(f"{folder}: class '{min(extra)}' does not occur in the training part.")
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        pictures = _pictures(folder / name)
        if not pictures:
            raise UserError(f"{folder / name}: no pictures in this class.")
        files += pictures
        labels += [label] * len(pictures)
    return Images(files, np.array(labels, dtype=np.int64)), names


def decode(files: Sequence[Path], size: int | None) -> Array:
    """The pictures as bytes, n × H × W × C: grey if all are grey, else RGB. Their shapes are equal, or `size` is set."""
    shapes, colours = zip(*(_peek(path) for path in files), strict=True)
    if size is None:
        for path, shape in zip(files, shapes, strict=True):
            if shape != shapes[0]:
                one, other = (f"{s[0]}×{s[1]}" for s in (shapes[0], shape))
                raise UserError(f"{path}: {other} pixels, but {files[0].name} has {one}; set size=N to resize them.")
    height, width = (size, size) if size else shapes[0]
    colour = any(colours)
    if len(files) * height * width * (3 if colour else 1) > MAX_BYTES:
        raise UserError(f"{files[0].parent.parent}: {len(files)} pictures of {height}×{width} take more than 4 GiB; set size=.")
    out = np.empty((len(files), height, width, 3 if colour else 1), dtype=np.uint8)
    for i, path in enumerate(files):
        try:
            with Image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB" if colour else "L"))
        except _BROKEN as error:
            raise UserError(f"{path}: not a readable picture ({one_line(error)}).") from None
        pixels = pixels.reshape(1, *pixels.shape[:2], -1)
        out[i] = (resize_square(pixels, size) if size else pixels)[0]
    return out


def _peek(path: Path) -> tuple[tuple[int, int], bool]:
    """Height and width, and whether the picture has colour, from the header alone."""
    try:
        with Image.open(path) as picture:
            (width, height), mode = picture.size, picture.mode
    except _BROKEN as error:
        raise UserError(f"{path}: not a readable picture ({one_line(error)}).") from None
    if mode.startswith(("I", "F")):  # Pillow would clip these to 8 bits silently
        raise UserError(f"{path}: more than 8 bits per pixel (mode {mode}); convert it to 8 bits.")
    if width * height > MAX_PIXELS:
        raise UserError(f"{path}: {width}×{height} pixels are too many for one picture file.")
    return (height, width), mode not in ("1", "L", "LA")


def _pictures(folder: Path, *, first: bool = False) -> list[Path]:
    """Picture files anywhere below `folder`, sorted; with `first` at most one of them, to see whether there are any."""
    if not folder.is_dir():
        return []
    paths = (p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    return list(islice(paths, 1)) if first else sorted(paths)


def _loose(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith(".")]
