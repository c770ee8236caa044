"""Structural similarity (Wang et al. 2004) of each image: Gaussian window, population covariance, no padding.

The definition is scikit-image's `structural_similarity(data_range=1, gaussian_weights=True, sigma=1.5,
use_sample_covariance=False)`: 11 × 11 taps, averaged where the whole window lies inside the image, then over channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from pytorch_msssim import ssim as windowed_ssim
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.metrics.pixel import pair
from gradveil.metrics.registry import metric


class Window(NamedTuple):
    """The Gaussian window SSIM looks through."""

    size: int
    sigma: float

    def __str__(self) -> str:
        return f"{self.size}×{self.size} Gaussian window, σ {self.sigma:.3g}"


def ssim_window(height: int, width: int) -> Window:
    """11 × 11 with σ 1.5; in smaller images the largest odd window that fits, with σ shrunk alike.

    σ shrinks so that the window keeps its shape, and so that scikit-image given that σ chooses the same window.
    """
    side = min(height, width)
    if side < 3:
        raise UserError(f"images are {height}×{width}; SSIM needs at least 3×3 pixels.")
    size = min(11, side - 1 + side % 2)
    return Window(size, 1.5 * size / 11)


@metric("ssim")
def ssim(truth: Tensor, reconstruction: Tensor) -> Tensor:
    """Structural similarity of each image (n), 1 for an exact match; not cut off at 0."""
    x, y = pair(truth, reconstruction)
    window = ssim_window(*x.shape[-2:])
    # The package's own window is single precision: on smooth images, off in the sixth place.
    taps = torch.arange(window.size, dtype=x.dtype, device=x.device) - window.size // 2
    weights = torch.softmax(-taps.square() / (2 * window.sigma**2), dim=0)
    values: Tensor = windowed_ssim(x, y, data_range=1.0, size_average=False, win=weights.expand(x.shape[1], 1, 1, -1))
    return values
