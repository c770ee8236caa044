"""What a page with blurred pictures gives away: counted in bits, and measured by who is identified from it."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.metrics.identification import identify
from gradveil.report import pictures, write_report


@pytest.mark.parametrize("shape", [(1, 12, 12), (3, 9, 8), (3, 200, 160), (2, 6, 6)])
def test_a_blurred_page_holds_two_bits_per_channel_of_every_picture(
    run: Callable[..., Path], shape: tuple[int, int, int]
) -> None:
    folder = run(shape=shape, victims=3, leak={"none": 0.9, "loda": 0.5})
    source = write_report(folder, "blurred").read_text(encoding="utf-8")
    strips = [Image.open(io.BytesIO(base64.b64decode(code))) for code in re.findall(r"image/png;base64,([^)]*)", source)]
    assert len(strips) == 2 * 3 + 2  # attacks on each defense, the originals, and what loda fed
    for strip in strips:
        assert strip.size == (3, 1) and not strip.info, "one pixel per picture, and no text in the file"
        assert set(np.asarray(strip).flatten()) <= {0, 85, 170, 255}
    clear = re.findall(r"image/png;base64,([^)]*)", write_report(folder, "shown").read_text(encoding="utf-8"))
    assert len(clear) == len(strips) and not any(code in source for code in clear)


def test_nobody_is_identified_from_a_blurred_picture_by_correlation_and_few_by_their_colour() -> None:
    data = load("mnist-5k")
    victims, pool = data.private[:200], Batch(data.private.x[200:], data.private.y[200:])
    colours = torch.stack([colour_of(image) for image in victims.x])
    blurred = colours[:, :, None, None].expand_as(victims.x)
    ranks = identify(victims.x, victims.y, blurred, pool)
    assert int(ranks.identified.sum()) == 0 and float(ranks.chance.mean()) < 0.01
    # A reader who has the candidates can blur them in the same way: one in a hundred is right, guessing one in 200.
    candidates = torch.stack([colour_of(image) for image in pool.x])
    same = (colours[:, None] == candidates[None]).all(2) & (victims.y[:, None] == pool.y[None])
    assert float((1 / (1 + same.sum(1))).mean()) < 0.02


def colour_of(image: Tensor) -> Tensor:
    tile = pictures._tile(image.numpy(), (28, 28))
    return torch.from_numpy(pictures._mean_colour(tile).astype(np.float32)).flatten() / 255
