"""Rebuilt images in a notebook."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import torch
from PIL import Image

from gradveil.auditing.captured import Rebuilt
from gradveil.core.observation import Reconstruction


def pictures(text: str) -> list[np.ndarray]:
    codes = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(code)))) for code in codes]


def test_a_reconstruction_shows_its_images_and_what_it_believes() -> None:
    images = torch.stack([torch.zeros(1, 28, 28), torch.ones(1, 28, 28)])
    text = Reconstruction(images, torch.tensor([3, 7]), 0.125, 40, 1.5, "<b>lost</b>")._repr_html_()
    (shown,) = pictures(text)
    assert shown.shape == (112, 224) and shown[:, :112].max() == 0 and shown[:, 112:].min() == 255
    assert "labels 3, 7 · score 0.125 · 40 iterations" in text and "&lt;b&gt;lost" in text and "<b>" not in text


def test_colour_and_what_is_not_finite() -> None:
    images = torch.full((1, 3, 32, 32), float("nan"))
    images[:, 0] = 2.0
    (shown,) = pictures(Reconstruction(images, None, float("inf"))._repr_html_())
    assert shown.shape == (96, 96, 3) and tuple(shown[0, 0]) == (255, 128, 128)


def test_several_attacks_stand_in_the_order_of_their_fit() -> None:
    answer = Reconstruction(torch.zeros(1, 1, 8, 8), None, 0.0)
    text = Rebuilt({"ig": answer, "rgap": answer}, {}, {"ig": 0.04, "rgap": 0.0001})._repr_html_()
    assert text.index("rgap: differs by 1%") < text.index("ig: differs by 20%") and len(pictures(text)) == 2
