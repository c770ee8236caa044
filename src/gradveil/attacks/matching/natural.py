"""Natural images as a normal distribution, and the coordinates in which its numbers are independent.

Amplitudes of natural images fall with the frequency f, about as 1/f (Field 1987), and colours vary much less than brightness
(Ruderman et al. 1998). Here amplitudes fall as 1/f^1.5, by which more images were identified on CIFAR-10. A search that steps
in these coordinates builds an image from coarse to fine, and one that penalises their squares fills in what an update leaves
open by the most likely image. Both need no data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.base import Target
from gradveil.attacks.matching.rows import Rows

CONTRAST = 0.25  # standard deviation of a pixel, as a share of the range from black to white
POWER = 1.5  # by which amplitudes fall
LUMINANCE = 0.92  # share of the variance of colour images that is in their brightness


@dataclass(frozen=True)
class Coordinates:
    """A linear map between images (as the network takes them) and numbers that are standard normal for natural images."""

    centre: Tensor  # C × 1 × 1: mid-grey
    colours: Tensor  # C × C
    filter: Tensor  # H × (W // 2 + 1)

    @staticmethod
    def of(target: Target) -> Coordinates:
        *_, channels, height, width = target.shape
        low, high = target.pixel_range
        rows, columns = torch.fft.fftfreq(height)[:, None], torch.fft.fftfreq(width)[None]
        amplitude = (rows**2 + columns**2).sqrt().clamp_min(1 / max(height, width)) ** -POWER
        amplitude = amplitude / amplitude.square().mean().sqrt()
        mixing = torch.eye(channels)
        if channels == 3:
            opponent = torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]])
            sizes = torch.tensor([LUMINANCE, (1 - LUMINANCE) / 2, (1 - LUMINANCE) / 2]).mul(3).sqrt()
            mixing = opponent.T / opponent.norm(dim=1) * sizes
        colours = CONTRAST * (high - low).flatten()[:, None] * mixing
        return Coordinates((low + high) / 2, colours, amplitude[:, : width // 2 + 1])

    def images(self, z: Tensor) -> Tensor:
        return self.centre + self._mixed(self.colours, self._filtered(z, self.filter))

    def of_images(self, x: Tensor) -> Tensor:
        return self._filtered(self._mixed(torch.linalg.inv(self.colours), x - self.centre), 1 / self.filter)

    def slope(self, gradient: Tensor) -> Tensor:
        """The derivative by the coordinates from that by the images. The filter is symmetric."""
        return self._filtered(self._mixed(self.colours.T, gradient), self.filter)

    def draw(self, target: Target, starts: int, scale: float) -> Tensor:
        """Start images, victims · starts first. They do not depend on the other victims."""
        one = scale * torch.randn(starts, *target.shape[1:], generator=target.rng)
        return self.images(one).repeat(target.shape[0], 1, 1, 1, 1)

    def _filtered(self, z: Tensor, amplitude: Tensor) -> Tensor:
        filtered: Tensor = torch.fft.irfft2(torch.fft.rfft2(z) * amplitude, s=z.shape[-2:])
        return filtered

    def _mixed(self, matrix: Tensor, z: Tensor) -> Tensor:
        return torch.einsum("ij,...jhw->...ihw", matrix, z)


@dataclass(frozen=True)
class Natural:
    """How unlikely images are: the mean square of their coordinates."""

    coordinates: Coordinates
    weight: float

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        return self.weight * self.coordinates.of_images(x).square().flatten(1).mean(1)
