"""Rows of images as one PNG: originals above, what an attack made of them below."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from gradveil.storage.files import write_atomic

MOST = 10  # images a row
SIZE = 64  # pixels an image is enlarged to, at least
GAP = 2


def write(file: Path, rows: Sequence[Tensor]) -> None:
    """Every row is victims × batch × C × H × W in [0, 1]."""
    lines = [row.flatten(0, 1)[:MOST] for row in rows]
    height, width = lines[0].shape[-2:]
    zoom = max(1, SIZE // height)
    columns = max(len(line) for line in lines)
    tall, wide = height * zoom + GAP, width * zoom + GAP
    sheet = torch.ones(3, len(lines) * tall - GAP, columns * wide - GAP)
    for r, line in enumerate(lines):
        for c, image in enumerate(line):
            large = image.clamp(0, 1).expand(3, -1, -1).repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)
            sheet[:, r * tall : r * tall + height * zoom, c * wide : c * wide + width * zoom] = large
    pixels = (sheet * 255).round().byte().permute(1, 2, 0).contiguous()
    write_atomic(file, partial(Image.fromarray(pixels.numpy()).save, format="PNG", optimize=True))
