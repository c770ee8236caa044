"""Data that somebody made to do harm: one line, soon, and no memory for what a file only claims."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import refused
from PIL import Image
from scipy.io import savemat

from gradveil.data import load
from gradveil.data.readers import npz

X = np.random.default_rng(0).integers(0, 256, (20, 4, 4), dtype=np.uint8)
Y = np.arange(20) % 4


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=False)
    return file.getvalue()


def claim(shape: object, descr: object = "|u1", content: bytes = b"", fortran: bool = False) -> bytes:
    """An array whose header says what it likes."""
    header = repr({"descr": descr, "fortran_order": fortran, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def archive(path: Path, method: int = zipfile.ZIP_DEFLATED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in {"images": npy(X), "labels": npy(Y), **members}.items():
            file.writestr(f"{name}.npy", content)
    return path


# -- archives ----------------------------------------------------------------------------------------------------------

LIES = {
    "no bytes, many names": (claim((10**11,), "<U0"), "has the type"),
    "no bytes, no type": (claim((10**11,), "|V0"), "has the type"),
    "two million names": (npy(np.zeros(2 * 10**6, dtype="<U1")), "2,000,000 class names"),
    "one long name": (npy(np.array(["x" * 100_000, "y"])), "names of at most 1,000 characters"),
    "many fields": (claim((4,), [("a", "u1"), ("b", "<f8")], b"\0" * 36), "has the type"),
    "an array per item": (claim((4,), [("a", "u1", (10**9,))]), "has the type"),
    "objects": (claim((4,), "|O", b"\0" * 32), "Python objects"),
    "dates": (claim((4,), "<M8[s]", b"\0" * 32), "has the type"),
    "longer than the file": (claim((10**12,), "<U1"), "more than the file holds"),
    "negative": (claim((-4,), "<U1", b"\0" * 16), "more than the file holds"),
    "truth values as sizes": (claim((True, 4), "<U1", b"\0" * 16), "more than the file holds"),
    "no sizes": (claim("4", "<U1", b"\0" * 16), "not an .npz archive"),
    "a size of 5,000 digits": (claim((10**4000,), "<U1"), "more than the file holds"),
    "a header of 4 GiB": (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 100_000, "4,294,967,295 bytes"),
    "a deep header": (b"\x93NUMPY\x01\x00" + struct.pack("<H", 9000) + b"(" * 9000, "not an .npz archive"),
    "a header in unicode": (b"\x93NUMPY\x03\x00" + claim((4,), "<U1")[8:], "not in a format for plain numbers"),
    "no array": (b"", "not in a format for plain numbers"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_array_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    content, words = LIES[lie]
    with refused(words):
        load(archive(tmp_path / "a.npz", class_names=content))


def test_rows_in_fortran_order_keep_their_places(tmp_path: Path) -> None:
    data = load(archive(tmp_path / "a.npz", images=npy(np.asfortranarray(X)))).pool()
    pixels = {(image * 255).round().byte().numpy().tobytes(): int(y) for image, y in zip(data.x, data.y, strict=True)}
    assert pixels == {image.tobytes(): int(y) for image, y in zip(X, Y, strict=True)}


def test_a_bomb_of_many_arrays_is_refused(tmp_path: Path) -> None:
    with refused("more than 1,000 arrays"):
        load(archive(tmp_path / "a.npz", **{f"a{i}": b"" for i in range(1001)}))
    with refused("list of members is too long"):
        load(archive(tmp_path / "b.npz", zipfile.ZIP_STORED, **{"x" * 200 + str(i): b"" for i in range(5000)}))


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    """The list of members claims it, so nothing is unpacked."""
    content = archive(tmp_path / "a.npz").read_bytes()
    entry = content.index(b"PK\x01\x02")
    (tmp_path / "a.npz").write_bytes(content[: entry + 24] + struct.pack("<I", 0xFFFFFFF0) + content[entry + 28 :])
    with refused("more than 2 GiB"):
        load(tmp_path / "a.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compression_that_numpy_does_not_write_is_refused(method: int, tmp_path: Path) -> None:
    with refused("numpy does not write"):
        load(archive(tmp_path / "a.npz", method))


def test_an_array_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.npz")
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("labels.npy", npy(Y))
    with refused("holds an array twice"):
        load(path)


def test_an_archive_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.npz", zipfile.ZIP_STORED, images=npy(np.zeros((1000, 32, 32), dtype=np.uint8)))
    with refused("not an .npz archive"), npz.open_npz(path) as opened:
        os.truncate(path, 100)
        opened.read("images")


@pytest.mark.parametrize("labels", [Y + np.nan, np.where(Y == 0, np.inf, Y), Y * 1e300])
def test_labels_that_are_not_finite_are_refused(labels: np.ndarray, tmp_path: Path) -> None:
    with refused("targets are not finite"):
        load(archive(tmp_path / "a.npz", labels=npy(labels)), rows=True)


@pytest.mark.parametrize("kind", ["named pipe", "folder", "link to itself", "link to nothing", "device", "sparse"])
@pytest.mark.parametrize("name", ["x.npz", "set/a/x.png", "set/train-images-idx3-ubyte", "set/data_batch_1.bin", "set/x.npz"])
def test_special_files_are_refused_without_waiting(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "named pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
        (path / "README").touch()
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 42)
    else:
        path.symlink_to({"link to itself": path, "link to nothing": "nowhere", "device": "/dev/zero"}[kind])
    if "idx" in name:
        (path.parent / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\0")
    if "png" in name:
        for label in "ab":
            (path.parents[1] / label).mkdir(exist_ok=True)
            for i in range(6):
                Image.new("L", (4, 4), 20 * i).save(path.parents[1] / label / f"{i}.png")
    with refused(""):
        load(tmp_path / name.split("/", maxsplit=1)[0])


# -- the publishers' files ---------------------------------------------------------------------------------------------


def test_a_list_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    for label in ("n1", "n2"):
        (tmp_path / "train" / label).mkdir(parents=True)
        for i in range(8):
            Image.new("L", (6, 6), 10 * i).save(tmp_path / "train" / label / f"{i}.png")
    (tmp_path / "wnids.txt").write_text("n1\nn2\n")
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "val_annotations.txt").write_text(f"{tmp_path}/train/n1/0.png\tn1\n../../train/n1/1.png\tn1\n")
    with refused("is not the name of a picture"):
        load(tmp_path)


def test_parts_without_images_are_left_out_or_refused(tmp_path: Path, made: Callable) -> None:
    (tmp_path / "img_align_celeba").mkdir()
    for i, image in enumerate(made(12, 8, 8, 3)[0]):
        Image.fromarray(image).save(tmp_path / "img_align_celeba" / f"{i}.jpg")
    (tmp_path / "list_attr_celeba.txt").write_text("12\nMale\n" + "".join(f"{i}.jpg {i % 2 * 2 - 1}\n" for i in range(12)))
    assert len(load(tmp_path).pool()) == 12
    (tmp_path / "list_eval_partition.txt").write_text("".join(f"{i}.jpg 2\n" for i in range(12)))
    with refused("holds no training images"):
        load(tmp_path)
    with refused("20 images but 0 labels"):
        load(archive(tmp_path / "a.npz", labels=npy(np.zeros(0))))


def test_an_idx_file_that_unpacks_to_less_takes_no_memory(tmp_path: Path) -> None:
    header = bytes([0, 0, 8, 3]) + struct.pack(">3I", 32 << 10, 256, 255)  # almost 2 GiB
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + b"\0" * 1000))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\0")
    with refused("the file holds fewer"):
        load(tmp_path)


def element(kind: int, content: bytes) -> bytes:
    return struct.pack("<II", kind, len(content)) + content + b"\0" * (-len(content) % 8)


def matrix(name: bytes, sizes: tuple[int, ...], values: bytes, kind: int = 2) -> bytes:
    shape = struct.pack(f"<{len(sizes)}i", *sizes)
    return element(14, element(6, struct.pack("<II", 9, 0)) + element(5, shape) + element(1, name) + element(kind, values))


def compressed(content: bytes) -> bytes:
    packed = zlib.compress(content)
    return struct.pack("<II", 15, len(packed)) + packed


START = b"MATLAB 5.0".ljust(124) + b"\x00\x01IM"
MATLAB = {
    "sizes that lie": (matrix(b"X", (32, 32, 3, 10**9), b"\0" * 8), "has 8 bytes"),
    "negative sizes": (matrix(b"X", (-32, -32, 3, 1), b"\0" * 3072), "has 3,072 bytes"),
    "an unknown type": (matrix(b"X", (1, 8), b"\0" * 8, kind=16), "of type 16"),
    "a bomb": (compressed(matrix(b"X" * (1 << 25), (1, 1), b"\0")), "an element has 33,554,432 bytes"),
    "cut off": (matrix(b"X", (8, 1000), b"\0" * 8000)[:-100], "cut off"),
    "many variables": (b"".join(matrix(b"z", (1, 1), b"\0") for _ in range(200)), "more than 100 variables"),
    "other variables": (compressed(matrix(b"z", (1, 1), b"\0")), "needs the variables X and y"),
    "damaged": (struct.pack("<II", 15, 100) + b"\xff" * 100, "not a readable MATLAB file"),
}


@pytest.mark.parametrize("case", MATLAB)
def test_a_matlab_file_that_lies_is_refused(case: str, tmp_path: Path) -> None:
    content, words = MATLAB[case]
    (tmp_path / "train_32x32.mat").write_bytes(START + content)
    with refused(words):
        load(tmp_path)


@pytest.mark.parametrize("packed", [True, False])
def test_a_matlab_file_of_another_writer_is_read(packed: bool, tmp_path: Path, made: Callable) -> None:
    x, y = made(40, 32, 32, 3, classes=10)
    content = {"X": x.transpose(1, 2, 3, 0), "y": np.where(y == 0, 10, y)[:, None].astype(float), "note": "text"}
    savemat(tmp_path / "train_32x32.mat", content, do_compression=packed)
    data = load(tmp_path, rows=True).pool()
    pixels = {
        (i * 255).round().byte().numpy().transpose(1, 2, 0).tobytes(): int(t) for i, t in zip(data.x, data.y, strict=True)
    }
    assert pixels == {image.tobytes(): int(label) for image, label in zip(x, y, strict=True)}


# -- memory ------------------------------------------------------------------------------------------------------------

LIMITED = """
import json, resource, sys
from gradveil.core.errors import UserError
from gradveil.data import load
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (300 << 20), size + (300 << 20)))
for path in json.loads(sys.argv[1]):
    try:
        load(path)
        print("result")
    except UserError as error:
        print("refused", error)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are those of Linux")
def test_claims_take_no_memory(tmp_path: Path) -> None:
    """With 300 MB to spare, every file ends in one line, also where its claim is within the limits of the format."""
    paths = [archive(tmp_path / f"{i}.npz", class_names=content) for i, (content, _) in enumerate(LIES.values())]
    paths.append(archive(tmp_path / "images.npz", images=claim((10**6, 32, 32), content=b"\0" * 100)))
    paths.append(archive(tmp_path / "whole.npz", images=claim((1000, 1000, 1000), content=b"\0" * 1000)))
    (tmp_path / "idx").mkdir()
    header = bytes([0, 0, 8, 3]) + struct.pack(">3I", 32 << 10, 256, 255)
    (tmp_path / "idx" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + b"\0" * 1000))
    (tmp_path / "idx" / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\0")
    for i, (content, _) in enumerate(MATLAB.values()):
        (tmp_path / f"mat{i}").mkdir()
        (tmp_path / f"mat{i}" / "train_32x32.mat").write_bytes(START + content)
    paths += [tmp_path / "idx", *(tmp_path / f"mat{i}" for i in range(len(MATLAB)))]
    command = [sys.executable, "-c", LIMITED, json.dumps([str(path) for path in paths])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(paths) and all(line.startswith("refused") for line in lines), done.stdout


# -- the one validation ------------------------------------------------------------------------------------------------


def test_many_classes_are_refused_before_a_model_is_built() -> None:
    images = torch.rand(40, 1, 4, 4)
    with refused("at most 32,768 classes"):
        load((images, torch.arange(40)), num_classes=40_000_000)
