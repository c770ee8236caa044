"""Spoilt images: npz archives, idx files and folders of pictures."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
from pathlib import Path

import numpy as np
from damage import HUGE, Job, Random, damaged, text
from PIL import Image

from gradveil.data import load


def npz(rng: Random, folder: Path) -> Job:
    draw = np.random.default_rng(rng.randrange(2**32))
    shape = rng.choice(
        [(12, 6, 6)] * 6 + [(12, 6, 6, 1), (12, 6, 6, 3), (12, 3, 6, 6), (12, 36), (0, 6, 6), (12, 0, 6), (3, 6, 6)]
    )
    kind = rng.choice(["u1"] * 6 + ["f4"] * 6 + ["f8", "f2", "i8", "c8", "U3", "S2", "?", "M8[s]", "O"])
    images = draw.integers(0, 2, shape).astype(kind) if kind not in ("f4", "f8", "f2") else draw.random(shape).astype(kind)
    if kind.startswith("f") and images.size and rng.random() < 0.3:
        images.flat[0] = rng.choice([np.nan, np.inf, -1.0, 255.0])
    labels = (np.arange(len(images)) % 3).astype(rng.choice(["i8"] * 6 + ["u1", "u8", "f4", "?", "U1"]))
    if rng.random() < 0.2 and labels.dtype.kind in "iu" and len(labels):
        labels[0] = rng.choice([2**31, 255, 100]) if labels.dtype.itemsize == 8 else 200
    arrays = {"images": images, "labels": labels}
    if rng.random() < 0.3:
        arrays[rng.choice(["class_names", "train_images", "labels ", "../x", text(rng, 5)])] = draw.random(3)
    if rng.random() < 0.1:
        arrays.pop(rng.choice(list(arrays)))
    buffer = io.BytesIO()
    (np.savez if rng.random() < 0.5 else np.savez_compressed)(buffer, **arrays)  # type: ignore[arg-type]
    content = buffer.getvalue()
    if rng.random() < 0.25:  # a member whose own header lies
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
            for name, array in arrays.items():
                member = io.BytesIO()
                np.save(member, array)
                archive.writestr(f"{name}.npy".replace("\0", "0"), damaged(rng, member.getvalue()))
        content = buffer.getvalue()
    elif rng.random() < 0.4:
        content = damaged(rng, content)
    file = folder / "data.npz"
    file.write_bytes(content)
    return lambda: load(str(file) + rng.choice(["", "", ":size=8", ":private=4", ":limit=11"]))


def idx(rng: Random, folder: Path) -> Job:
    count = rng.choice([12, 12, 12, 3, 0])
    sizes = [rng.choice([6, 6, 6, *HUGE]) % 2**32 if rng.random() < 0.1 else n for n in (count, 6, 6)]
    images = bytes([0, 0, 8, 3]) + struct.pack(">3I", *sizes) + rng.randbytes(count * 36)
    labels = bytes([0, 0, 8, 1]) + struct.pack(">I", count) + bytes(i % 3 for i in range(count))
    packed = rng.random() < 0.3
    for name, content in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        if rng.random() < 0.5:
            content = damaged(rng, content)
        if packed:
            content = gzip.compress(content)
            content = damaged(rng, content) if rng.random() < 0.5 else content
        if rng.random() < 0.95:
            (folder / (name + ".gz" * packed)).write_bytes(content)
    return lambda: load(str(folder))


def picture(rng: Random) -> tuple[str, bytes]:
    ending = rng.choice(["png", "png", "png", "jpg", "bmp", "gif", "webp", "tif", "ppm"])
    mode = rng.choice(["L"] * 12 + ["RGB", "RGBA", "P", "1", "I", "F", "LA"])
    size = rng.choice([(6, 6)] * 60 + [(7, 5), (1, 1), (40, 3)])
    buffer = io.BytesIO()
    formats = {"jpg": "JPEG", "tif": "TIFF"}
    try:
        Image.frombytes("L", size, rng.randbytes(size[0] * size[1])).convert(mode).save(
            buffer, formats.get(ending, ending.upper())
        )
    except (OSError, KeyError, ValueError):  # not every format knows every mode
        ending, buffer = "png", io.BytesIO()
        Image.new("L", (6, 6)).save(buffer, "PNG")
    content = buffer.getvalue()
    return ending, damaged(rng, content) if rng.random() < 0.05 else content


def folder_of_pictures(rng: Random, folder: Path) -> Job:
    plain = rng.random() < 0.2
    root = folder / rng.choice(["", "", "train", "a/b"])
    for label in range(rng.choice([2, 2, 2, 3, 1])):
        below = root / rng.choice([f"class{label}", f"class{label}", f"\x1b[31m{label}", f" {label}", f".{label}"])
        below.mkdir(parents=True, exist_ok=True)
        for i in range(rng.choice([6, 7, 8, 7, 8, 0])):
            ending, content = ("png", PLAIN[i % len(PLAIN)]) if plain else picture(rng)
            (below / f"{i}.{ending}").write_bytes(content)
        if rng.random() < 0.1:
            odd = below / rng.choice(["notes.txt", "link.png", "dir.png", "gone.png"])
            if odd.name == "dir.png":
                odd.mkdir()
            elif odd.name == "gone.png":
                odd.symlink_to("nowhere.png")
            elif odd.name == "link.png":
                odd.symlink_to(below, target_is_directory=True)
            else:
                odd.write_text("hello")
    return lambda: load(str(folder) + rng.choice(["", "", ":size=8", ":limit=10"]))


def _plain(grey: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (6, 6), grey).save(buffer, "PNG")
    return buffer.getvalue()


PLAIN = [_plain(grey) for grey in range(0, 250, 20)]
