"""Structural similarity (Wang et al. 2004) per image: Gaussian window, population covariance, no padding.

The definition is scikit-image's `structural_similarity(data_range=1, gaussian_weights=True, sigma=1.5,
use_sample_covariance=False)`: 11 × 11 taps, averaged where the whole window lies inside the image, then over channels.
"""

from typing import NamedTuple

import torch
from pytorch_msssim import ssim as windowed_ssim
from torch import Tensor

from gradveil.core.errors import UserError
from gradveil.metrics.pixel import pair
from gradveil.metrics.registry import metric


class Window(NamedTuple):
    """The Gaussian window of SSIM."""

    size: int
    sigma: float

    def __str__(self) -> str:
        return f"{self.size}×{self.size} Gaussian window, σ {self.sigma:.3g}"


def ssim_window(height: int, width: int) -> Window:
    """11 × 11 with σ 1.5. For smaller images the largest odd size that fits, with σ reduced in proportion.

    So the window keeps its shape, and scikit-image chooses the same window for this σ.

    Args: height, width: of the images.
    """
    side = min(height, width)
    if side < 3:
        raise UserError(f"images are {height}×{width}; SSIM needs at least 3×3 pixels.")
    size = min(11, side - 1 + side % 2)
    return Window(size, 1.5 * size / 11)


@metric("ssim")
def ssim(truth: Tensor, reconstruction: Tensor) -> Tensor:
    """Structural similarity per image (n), 1 for an exact match; negative values are kept.

    Args: truth, reconstruction: images n × C × H × W in [0, 1].
    """
    x, y = pair(truth, reconstruction)
    window = ssim_window(*x.shape[-2:])
    # The window of pytorch_msssim is single precision: on smooth images the sixth decimal would be wrong.
    taps = torch.arange(window.size, dtype=x.dtype, device=x.device) - window.size // 2
    weights = torch.softmax(-taps.square() / (2 * window.sigma**2), dim=0)
    values: Tensor = windowed_ssim(x, y, data_range=1.0, size_average=False, win=weights.expand(x.shape[1], 1, 1, -1))
    return values
