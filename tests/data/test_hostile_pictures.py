"""Pictures from strangers: bombs, animations, links, and formats that would start another program."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from hostile import refused
from PIL import Image

from gradveil.data import load, readers
from gradveil.data.readers import image_folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for label in "ab":
        (tmp_path / "set" / label).mkdir(parents=True)
        for i in range(8):
            Image.new("L", (6, 6), 10 * i + ord(label)).save(tmp_path / "set" / label / f"{i}.png")
    return tmp_path / "set"


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(*chunks: tuple[bytes, bytes], width: int = 6, height: int = 6, bits: int = 8) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0))
    rows = zlib.compress(b"\0" * 7 * 6)
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunk(*c) for c in chunks) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def frames(kind: str) -> bytes:
    file = io.BytesIO()
    pages = [Image.new("L", (6, 6), grey) for grey in (0, 90, 200)]
    pages[0].save(file, kind, save_all=True, append_images=pages[1:])
    return file.getvalue()


BOMB = zlib.compress(b"\0" * (1 << 26))
PICTURES = {
    "2^31 pixels wide": (png(width=1 << 31, height=1 << 31), "not a readable picture"),
    "65535 pixels wide": (png(width=65535, height=1100), "too many for one picture"),
    "nothing wide": (png(width=0), "not a readable picture"),
    "a colour profile of 64 MiB": (png((b"iCCP", b"x\0\0" + BOMB)), "not a readable picture"),
    "a text of 64 MiB": (png((b"zTXt", b"x\0\0" + BOMB)), "not a readable picture"),
    "sixteen bits": (png(bits=16), "more than 8 bits"),
    "animated GIF": (frames("GIF"), "several pictures"),
    "animated PNG": (frames("PNG"), "several pictures"),
    "animated WebP": (frames("WEBP"), "several pictures"),
    "pages of TIFF": (frames("TIFF"), "several pictures"),
    "an icon": (b"\0\0\1\0" + b"\0" * 100, "not a readable picture"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 6\n%%EndComments\nshowpage\n", "not a readable picture"),
    "nothing": (b"", "not a readable picture"),
}


@pytest.mark.parametrize("case", PICTURES)
def test_a_picture_that_does_harm_is_refused(case: str, pictures: Path) -> None:
    content, words = PICTURES[case]
    (pictures / "a" / "0.png").write_bytes(content)
    with refused(words):
        load(f"{pictures}:size=8")


def test_no_other_program_is_run(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow itself would call Ghostscript for this file, whatever its name says."""
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("a program was started"))
    content = PICTURES["postscript"][0]
    (pictures / "a" / "0.png").write_bytes(content)
    assert Image.open(io.BytesIO(content)).format == "EPS"
    with refused("not a readable picture"):
        load(pictures)


def test_links_between_folders_do_not_run_in_circles(pictures: Path) -> None:
    (pictures / "a" / "again").symlink_to(pictures, target_is_directory=True)
    (pictures / "a" / "self").symlink_to(pictures / "a" / "self")
    (pictures / "loop").symlink_to(pictures / "loop")
    assert len(load(pictures).pool()) == 16


def test_folders_of_too_many_files_are_refused(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_folder, "MAX_FILES", 10)
    with refused("more than 10 pictures"):
        load(pictures)
    monkeypatch.setattr(image_folder.entries, "__defaults__", (6,))
    with refused("a: more than 6 files"):
        load(pictures)
    monkeypatch.setattr(readers, "MAX_ENTRIES", 1)
    with refused("set: more than 1 files"):
        load(pictures)


def test_folders_inside_each_other_have_a_limit(pictures: Path) -> None:
    (pictures / "a" / Path(*"x" * 30)).mkdir(parents=True)
    with refused("more than 16 deep"):
        load(pictures)


def test_pictures_with_too_many_pixels_together_are_refused(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_folder, "MAX_DECODED", 16 * 36 - 1)
    with refused("too many pixels together"):
        load(pictures)


def test_a_picture_that_changes_after_the_first_look_is_refused(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peek = image_folder._peek

    def replaced(path: Path) -> tuple[tuple[int, int], bool]:
        size = peek(path)
        Image.new("L", (5, 7)).save(path)
        return size

    monkeypatch.setattr(image_folder, "_peek", replaced)
    with refused("changed while it was read"):
        load(pictures)
