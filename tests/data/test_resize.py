from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from gradveil.data.resize import resize_square


def test_whole_factors_are_box_averages() -> None:
    x = np.random.default_rng(0).integers(0, 256, (1500, 8, 8, 3), dtype=np.uint8)  # more than a chunk
    mean = x.reshape(1500, 4, 2, 4, 2, 3).mean(axis=(2, 4))
    assert np.abs(resize_square(x, 4) - mean).max() <= 0.5
    floats = x / 255
    assert np.allclose(resize_square(floats, 4), mean / 255, atol=1e-6)
    assert resize_square(floats, 4).dtype == floats.dtype


@pytest.mark.parametrize("size", [5, 13, 20])
def test_other_factors_agree_with_pillow(size: int) -> None:
    x = np.random.default_rng(0).integers(0, 256, (4, 12, 12, 1), dtype=np.uint8)
    pillow = [np.asarray(Image.fromarray(i[..., 0]).resize((size, size), Image.Resampling.BILINEAR)) for i in x]
    assert np.abs(resize_square(x, size)[..., 0].astype(int) - np.stack(pillow)).max() <= 1  # rounding


def test_the_middle_square_is_kept() -> None:
    x = np.arange(4 * 10, dtype=np.uint8).reshape(1, 4, 10, 1)
    assert np.array_equal(resize_square(x, 4), x[:, :, 3:7])
    assert np.array_equal(resize_square(x.transpose(0, 2, 1, 3), 4), x.transpose(0, 2, 1, 3)[:, 3:7])


@pytest.mark.filterwarnings("error")
def test_images_of_a_file_that_may_only_be_read_are_resized_without_a_word() -> None:
    x = np.frombuffer(bytes(range(64)), np.uint8).reshape(1, 8, 8, 1)
    assert resize_square(x, 4).shape == (1, 4, 4, 1)
