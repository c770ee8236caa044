"""What an image of a class looks like, by public ones: a Gaussian in their main directions.

Counters use it to choose between explanations of an update that fit equally well, and to fill in missing pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.core.types import Batch

RANK = 30  # directions kept by default
FEW = 40  # images a class must have to be described by itself
FILLED = 30  # rounds in which missing pixels are filled in
LEAST = 1e-3  # variance of a pixel, so that none is taken to be the same in all images


@dataclass(frozen=True)
class ImageGaussian:
    """One class: mean, directions (pixels × rank) with their variances, and the variance left in each pixel."""

    mean: Tensor
    directions: Tensor
    variances: Tensor
    rest: Tensor

    @staticmethod
    def of(images: Tensor, rank: int = RANK) -> ImageGaussian:
        flat = images.flatten(1)
        mean, rank = flat.mean(0), min(rank, max(1, len(flat) // 2))
        _, sizes, directions = torch.linalg.svd(flat - mean, full_matrices=False)
        variances, directions = sizes[:rank].square() / max(1, len(flat) - 1), directions[:rank].T
        rest = (flat - mean - (flat - mean) @ directions @ directions.T).square().mean(0).clamp_min(LEAST)
        return ImageGaussian(mean, directions, variances.clamp_min(LEAST), rest)

    def surprise(self, x: Tensor) -> Tensor:
        """−log p of each row of images, up to a constant."""
        away = x.flatten(1) - self.mean
        along = away @ self.directions
        across = away - along @ self.directions.T
        return ((along.square() / self.variances).sum(1) + (across.square() / self.rest).sum(1)) / 2

    def expected(self, x: Tensor) -> Tensor:
        """Each row of images without its parts that are unlike the class."""
        along = (x.flatten(1) - self.mean) @ self.directions
        kept = self.variances / (self.variances + self.rest.mean())
        return (self.mean + (kept * along) @ self.directions.T).view_as(x).clamp(0, 1)

    def fill(self, x: Tensor, visible: Tensor) -> Tensor:
        """Missing pixels as the visible ones make them expected."""
        x = torch.where(visible, x, self.mean.view(x.shape[1:]))
        for _ in range(FILLED):
            x = torch.where(visible, x, self.expected(x))
        return x


def class_means(images: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The mean image of each class; of all images where a class has none."""
    members = [images[labels == c] for c in range(classes)]
    return torch.stack([m.mean(0) if len(m) else images.mean(0) for m in members])


def gaussians(public: Batch, classes: int, rank: int = RANK) -> list[ImageGaussian]:
    """One for each class; that of all images where a class has few."""
    every = ImageGaussian.of(public.x, rank)
    members = [public.x[public.hard_labels == c] for c in range(classes)]
    return [ImageGaussian.of(x, rank) if len(x) >= FEW else every for x in members]


class Whitened:
    """Images of these classes as functions of N(0, 1) numbers: a search among these is well conditioned."""

    def __init__(self, kinds: Sequence[ImageGaussian], shape: Sequence[int]):
        self.shape, self.mean = tuple(shape), torch.stack([k.mean for k in kinds])
        widest = max(k.directions.shape[1] for k in kinds)
        scaled = [k.directions * k.variances.sqrt() for k in kinds]
        self.along = torch.stack([F.pad(s, (0, widest - s.shape[1])) for s in scaled])
        self.across = torch.stack([k.rest.sqrt() for k in kinds])

    @property
    def width(self) -> int:
        return self.along.shape[2] + self.across.shape[1]

    def images(self, z: Tensor, rows: Tensor) -> Tensor:
        """Those of `z` (len(rows) × width), the classes being those of `rows`; pixels may leave [0, 1]."""
        rank = self.along.shape[2]
        along = torch.einsum("npr,nr->np", self.along[rows], z[:, :rank])
        return (self.mean[rows] + along + self.across[rows] * z[:, rank:]).view(-1, *self.shape)

    def rarity(self, z: Tensor) -> Tensor:
        """How unlikely such images are: the negative logarithm of their density, up to a constant."""
        return z.square().sum(1) / 2
