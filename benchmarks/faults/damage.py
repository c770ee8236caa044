"""Ways to spoil a file: what a broken disk, a broken writer or somebody's ill will leaves behind."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable

Random = random.Random
Job = Callable[[], object]  # reads the input
SHAPE, CLASSES = (1, 6, 6), 3  # of all images that are made here
HUGE = (0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
TEXTS = ("", " ", "\0", "\x1b[31m", "\ud800", "é" * 300, "../../x", "/", "nan", "-1", "1e999", "{}", "[", "=", ":", "+", "%s")


def damaged(rng: random.Random, content: bytes) -> bytes:
    """One to three kinds of damage, or none."""
    data = bytearray(content)
    for _ in range(rng.randrange(4)):
        if not data:
            return b""
        at = rng.randrange(len(data))
        kind = rng.randrange(8)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 40))
        elif kind == 3:
            del data[at : at + rng.randrange(1, 40)]
        elif kind == 4:  # a size or an offset that lies
            form = rng.choice(("<I", ">I", "<Q", ">Q"))
            size = struct.calcsize(form)
            data[at : at + size] = struct.pack(form, rng.choice(HUGE) % 256**size)
        elif kind == 5:
            data[at : at + 64] = bytes(64)
        elif kind == 6:
            data += data[at:]
        else:  # headers stand at the front
            early = rng.randrange(min(len(data), 128))
            data[early] = rng.randrange(256)
    return bytes(data)


def value(rng: random.Random, depth: int = 0) -> object:
    """Anything that JSON or YAML can hold."""
    kind = rng.randrange(9 if depth < 3 else 7)
    if kind == 0:
        return None
    if kind == 1:
        return rng.random() < 0.5
    if kind == 2:
        return rng.choice((-1, 1)) * rng.choice((*HUGE, 3, 10, 28))
    if kind == 3:
        return rng.choice((0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), rng.random()))
    if kind in (4, 5):
        return rng.choice(TEXTS)
    if kind == 6:
        return text(rng, 30)
    if kind == 7:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {text(rng, 8): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def text(rng: random.Random, longest: int) -> str:
    letters = "abcdefghijklmnop0123456789_-+:=,./\\ \t\n'\"{}[]()*%$#@!?é‰\0\x1b"
    return "".join(rng.choice(letters) for _ in range(rng.randrange(longest)))


def safetensors(rng: random.Random, header: dict[str, object], body: bytes) -> bytes:
    """A safetensors file with any header, and now and then a length that lies about it."""
    head = json.dumps(header).encode("utf-8", "surrogatepass")
    length = len(head) if rng.random() < 0.9 else rng.choice((*HUGE, len(head) - 1, len(head) + 1))
    return struct.pack("<Q", length % 2**64) + head + body
