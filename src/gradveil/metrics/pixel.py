"""Pixel by pixel: mean squared error and peak signal-to-noise ratio per image, in [0, 1]."""

import torch
from torch import Tensor

from gradveil.metrics.registry import metric

MSE_FLOOR = 1e-16  # an exact match has 160 dB, so that averages stay finite


def as_pixels(images: Tensor) -> Tensor:
    """Images as every metric compares them: double precision, clamped to [0, 1]."""
    return images.detach().to(torch.float64).clamp(0, 1)


def pair(truth: Tensor, reconstruction: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides as pixels; image i of one side belongs to image i of the other."""
    if truth.ndim != 4 or truth.shape != reconstruction.shape:
        raise ValueError(f"truth is {tuple(truth.shape)}, reconstruction {tuple(reconstruction.shape)}")
    return as_pixels(truth), as_pixels(reconstruction)


@metric("mse")
def mse(truth: Tensor, reconstruction: Tensor) -> Tensor:
    """Mean squared error per image (n).

    Args: truth, reconstruction: images n × C × H × W in [0, 1].
    """
    x, y = pair(truth, reconstruction)
    return (x - y).square().flatten(1).mean(dim=1)


@metric("psnr")
def psnr(truth: Tensor, reconstruction: Tensor) -> Tensor:
    """Peak signal-to-noise ratio per image (n) in dB, for peak 1, at most 160.

    Args: truth, reconstruction: images n × C × H × W in [0, 1].
    """
    return -10 * mse(truth, reconstruction).clamp(min=MSE_FLOOR).log10()
