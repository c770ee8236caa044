from __future__ import annotations

import io
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gradveil.core.errors import UserError
from gradveil.data import load
from gradveil.data.readers.image_folder import decode


def write(folder: Path, x: np.ndarray, y: np.ndarray, names: str = "abcd") -> list[Path]:
    paths = []
    for i, (image, label) in enumerate(zip(x, y, strict=True)):
        path = folder / names[label] / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.squeeze()).save(path)
        paths.append(path)
    return paths


@pytest.mark.parametrize("channels", [1, 3])
def test_sub_folders_are_classes(channels: int, tmp_path: Path, made: Callable) -> None:
    x, y = made(channels=channels)
    write(tmp_path, x, y)
    data = load(str(tmp_path))
    assert data.class_names == ("a", "b", "c", "d")
    pool = data.pool()
    pixels = (pool.x.numpy().transpose(0, 2, 3, 1) * 255).round().astype(np.uint8)
    found = {image.tobytes(): int(label) for image, label in zip(pixels, pool.y, strict=True)}
    assert found == {image.tobytes(): int(label) for image, label in zip(x, y, strict=True)}


def test_train_and_test_above_the_classes(tmp_path: Path, made: Callable) -> None:
    x, y = made()
    write(tmp_path / "train", x[:28], y[:28])
    write(tmp_path / "val", x[28:], y[28:])
    data = load(tmp_path)
    assert len(data.test) == 12
    assert len(data.private) == 17
    (tmp_path / "val" / "e").mkdir()
    with pytest.raises(UserError, match="class 'e' does not occur"):
        load(tmp_path)


def test_mixed_colour_and_grey_become_colour(tmp_path: Path, made: Callable) -> None:
    x, y = made(channels=1)
    paths = write(tmp_path, x, y)
    Image.fromarray(x[0].squeeze()).convert("RGBA").save(paths[0])
    data = load(tmp_path)
    assert data.input_shape == (3, 8, 8)
    assert bool((data.pool().x.std(dim=1) == 0).all())  # grey in all three channels


def test_sizes_must_agree_or_be_made_to(tmp_path: Path, made: Callable) -> None:
    paths = write(tmp_path, *made())
    wide = np.zeros((16, 32, 3), dtype=np.uint8)
    wide[:, 8:24] = 200  # the middle square is all that a crop keeps
    Image.fromarray(wide).save(paths[5])
    with pytest.raises(UserError, match=r"005\.png: 16×32 pixels, but .* 8×8; set size=N"):
        load(tmp_path)
    data = load(f"{tmp_path}:size=8")
    assert data.input_shape == (3, 8, 8)
    assert any(bool(((image * 255).round() == 200).all()) for image in data.pool().x)


def test_the_file_that_cannot_be_read_is_named(tmp_path: Path, made: Callable) -> None:
    paths = write(tmp_path, *made())
    good = paths[7].read_bytes()
    for content in (b"no picture", good[:-40], b""):
        paths[7].write_bytes(content)
        with pytest.raises(UserError, match=r"007\.png: not a readable picture"):
            load(tmp_path)


def test_sixteen_bits_are_refused_rather_than_clipped(tmp_path: Path, made: Callable) -> None:
    paths = write(tmp_path, *made(channels=1))
    Image.fromarray(np.full((8, 8), 4000, dtype=np.uint16)).save(paths[3])
    with pytest.raises(UserError, match=r"003\.png: more than 8 bits"):
        load(tmp_path)


def test_empty_classes_loose_pictures_and_empty_folders(tmp_path: Path, made: Callable) -> None:
    with pytest.raises(UserError, match="nothing to read here"):
        load(tmp_path)
    paths = write(tmp_path / "set", *made())
    (tmp_path / "set" / "e").mkdir()
    with pytest.raises(UserError, match="e: no pictures in this class"):
        load(tmp_path / "set")
    paths[0].rename(tmp_path / "set" / "loose.png")
    with pytest.raises(UserError, match="one sub-folder per class"):
        load(tmp_path / "set")


def test_pictures_of_absurd_size(tmp_path: Path, made: Callable) -> None:
    paths = write(tmp_path, *made(channels=1))
    Image.new("1", (9000, 9000)).save(paths[0])
    with pytest.raises(UserError, match="9000×9000 pixels are too many"):
        load(f"{tmp_path}:size=8")


def _many_scans(scans: int) -> bytes:
    """A JPEG of 2000×2000 pixels whose last scan (36 bytes) is repeated."""
    file = io.BytesIO()
    Image.new("L", (2000, 2000), 128).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    last = content[content.rindex(b"\xff\xc4") : -2]
    return content[:-2] + last * scans + b"\xff\xd9"


def _many_strips(strips: int) -> bytes:
    """A TIFF of one column, each pixel in a strip of its own."""
    offsets = 200
    tags = {256: (4, 1, 1), 257: (4, 1, strips), 258: (3, 1, 8), 259: (3, 1, 1), 262: (3, 1, 1)}
    tags |= {273: (4, strips, offsets), 277: (3, 1, 1), 278: (4, 1, 1), 279: (4, strips, offsets + 4 * strips)}
    entries = b"".join(struct.pack("<HHII", tag, *value) for tag, value in tags.items())
    header = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    return header.ljust(offsets, b"\0") + struct.pack("<I", 8) * strips + struct.pack("<I", 1) * strips


def _many_chunks(chunks: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "PNG")
    content, name = file.getvalue(), b"aaAa"
    return content[:33] + (bytes(4) + name + struct.pack(">I", zlib.crc32(name))) * chunks + content[33:]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (_many_scans(2000), "stored in too many parts"),
        (_many_strips(70_000), "stored in too many parts"),
        (_many_strips(2_000_000), "too large a header"),
        (_many_chunks(200_000), "too many parts"),
    ],
    ids=["scans", "strips", "offsets", "chunks"],
)
def test_pictures_of_too_many_parts(content: bytes, words: str, tmp_path: Path) -> None:
    """Each of these takes minutes or gigabytes in files that are not much larger."""
    (tmp_path / "a.png").write_bytes(content)
    began = time.process_time()
    with pytest.raises(UserError, match=words) as refused:
        decode([tmp_path / "a.png"], 8)
    assert "\n" not in str(refused.value) and time.process_time() - began < 5


@pytest.mark.parametrize(
    "content", [_many_scans(20), _many_strips(1000), _many_chunks(1000)], ids=["scans", "strips", "chunks"]
)
def test_pictures_of_several_parts_are_read(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(content)
    assert decode([tmp_path / "a.png"], 8).shape == (1, 8, 8, 1)
