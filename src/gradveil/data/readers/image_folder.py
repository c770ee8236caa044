"""Folders of pictures, one sub-folder per class; `train` and `test` (or `val`) folders above them are the parts.

Pillow recognizes a picture by its content, not by its name, and runs another program for some formats. So it is told
which formats to try, and gets an open regular file.
"""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from gradveil.core.errors import UserError, one_line
from gradveil.data.raw import MAX_BYTES, MAX_FILES, Array, Images, Options, Raw
from gradveil.data.resize import resize_square
from gradveil.storage.reading import open_regular, unreadable

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # what Pillow may take a file for
SINGLE = ("PNG", "GIF", "WEBP", "TIFF")  # formats with frames; a JPEG may hold a preview besides
TEST = ("test", "val", "valid", "validation")
MAX_PIXELS = 1 << 26  # per picture file
MAX_PICTURE = 1 << 28  # bytes per picture file
MAX_PICTURE_HEADER = 1 << 23  # bytes of it that are read before its pixels
MAX_READS = 400_000  # per picture file
MAX_TILES = 1 << 16  # that a picture is stored in
MAX_SCANS = 100  # of a JPEG, each of which goes over all of its pixels; programs write at most about 15
MAX_DECODED = 1 << 35  # pixels of all pictures together, before they are resized: about ten minutes of work
MAX_DEPTH = 16  # of folders
RANK = 1  # last: it accepts any tree with pictures in it


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


def entries(folder: Path, limit: int = MAX_FILES) -> Iterator[os.DirEntry[str]]:
    """What lies in a folder, as long as it is not too much."""
    try:
        with os.scandir(folder) as listing:
            for number, entry in enumerate(listing):
                if number >= limit:
                    raise UserError(f"{folder}: more than {limit:,} files; give fewer, or put them into sub-folders.")
                yield entry
    except OSError as error:
        raise unreadable(folder, error) from None


def subfolders(folder: Path) -> list[Path]:
    return sorted(folder / e.name for e in entries(folder) if not e.name.startswith((".", "__")) and os.path.isdir(e))


def by_class(folder: Path, names: Sequence[str] | None = None) -> tuple[Images, tuple[str, ...]]:
    """The pictures below each sub-folder. The classes are `names`, or the names of the sub-folders."""
    present = [sub.name for sub in subfolders(folder)]
    names = tuple(present) if names is None else tuple(names)
    if extra := set(present) - set(names):
        raise UserError(f"{folder}: class '{min(extra)}' does not occur in the training part.")
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        pictures = _pictures(folder / name)
        if not pictures:
            raise UserError(f"{folder / name}: no pictures in this class.")
        files += pictures
        labels += [label] * len(pictures)
        if len(files) > MAX_FILES:
            raise UserError(f"{folder}: more than {MAX_FILES:,} pictures; give fewer.")
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
    mode, channels = ("RGB", 3) if any(colours) else ("L", 1)
    folder = files[0].parent.parent
    if len(files) * height * width * channels > MAX_BYTES:
        raise UserError(f"{folder}: {len(files)} pictures of {height}×{width} take more than 2 GiB; set size=.")
    if sum(h * w for h, w in shapes) > MAX_DECODED:
        raise UserError(f"{folder}: the {len(files)} pictures have too many pixels together; set limit=, or shrink them.")
    out = np.empty((len(files), height, width, channels), dtype=np.uint8)
    for i, (path, shape) in enumerate(zip(files, shapes, strict=True)):
        with _picture(path) as picture:
            if (picture.height, picture.width) != shape:
                raise UserError(f"{path}: it changed while it was read; give files that nobody writes to.")
            pixels = np.asarray(picture.convert(mode)).reshape(1, *shape, channels)
        out[i] = (resize_square(pixels, size) if size else pixels)[0]
    return out


def _peek(path: Path) -> tuple[tuple[int, int], bool]:
    """Height and width, and whether the picture has colour, from the header alone."""
    with _picture(path) as picture:
        return (picture.height, picture.width), picture.mode not in ("1", "L", "LA")


class _CountedReads(io.BufferedReader):
    """A file whose reads are counted: Pillow goes through the parts of a picture in Python, and there may be millions."""

    reads, size = MAX_READS, MAX_PICTURE_HEADER  # what is left

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self.reads -= 1
        self.size -= 0 if size is None or size < 0 else len(content)  # the rest of a file in one piece is no header
        if min(self.reads, self.size) < 0:
            raise ValueError("it has too many parts, or too large a header")
        return content

    def scans(self) -> int:
        """How often the marker of a scan occurs, which pixels never hold."""
        before, count, end = self.tell(), 0, b""
        self.seek(0)
        while piece := super().read(1 << 20):
            count += (end + piece).count(b"\xff\xda")
            end = piece[-1:]
        self.seek(before)
        return count


@contextmanager
def _picture(path: Path) -> Iterator[Image.Image]:
    """A picture whose header has been checked; its pixels are not decoded yet."""
    with open_regular(path, MAX_PICTURE) as plain_file:
        file = _CountedReads(plain_file.raw)
        try:
            with Image.open(file, formats=FORMATS) as picture:
                file.size = 2 * MAX_PICTURE
                if len(picture.tile) > MAX_TILES or (picture.format in ("JPEG", "MPO") and file.scans() > MAX_SCANS):
                    raise UserError(f"{path}: stored in too many parts; save the picture again.")
                if picture.mode.startswith(("I", "F")):  # Pillow would clip these to 8 bits silently
                    raise UserError(f"{path}: more than 8 bits per pixel (mode {picture.mode}); convert it to 8 bits.")
                if picture.width * picture.height > MAX_PIXELS:
                    size = f"{picture.width}×{picture.height}"
                    raise UserError(f"{path}: {size} pixels are too many for one picture file.")
                if picture.format in SINGLE and getattr(picture, "is_animated", False):
                    raise UserError(f"{path}: holds several pictures (an animation or pages); give one per file.")
                yield picture
        except UserError:
            raise
        except Exception as error:  # Pillow's readers raise all kinds on damaged files, and the text is passed on
            raise UserError(f"{path}: not a readable picture ({one_line(error)}).") from None


def _pictures(folder: Path, *, first: bool = False) -> list[Path]:
    """Picture files anywhere below `folder`, sorted; with `first` at most one of them, to see whether there are any."""
    return sorted(islice(_walk(folder), 1 if first else MAX_FILES + 1)) if folder.is_dir() else []


def _walk(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Links to folders are not followed, so a cycle ends."""
    if depth > MAX_DEPTH:
        raise UserError(f"{folder}: folders inside each other more than {MAX_DEPTH} deep; put pictures into class folders.")
    for entry in entries(folder):
        if _is_picture(entry.name):
            yield folder / entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(folder / entry.name, depth + 1)


def _loose(folder: Path) -> list[Path]:
    return [folder / entry.name for entry in entries(folder) if _is_picture(entry.name)]


def _is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")
