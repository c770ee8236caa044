"""Distances between updates. Each takes two lists of tensors, rows first, and gives one number per row.

A tensor that is not to count (dropped, masked, weighted) is changed on both sides before it comes here. The size of what
was sent is unknown, as a defense may change it: for distances that depend on it, `fitted` brings our update to the best
size first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

_TINY = 1e-12  # against updates of length 1
LEAST = 0.1  # cosine from which on our update gets its best size; below it a size of 0 would leave no slope


class Distance:
    """Base class."""

    scale_free: ClassVar[bool] = False  # whether the sizes of the two updates make no difference

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError

    def select(self, index: Tensor | None) -> Distance:
        """The distances of a selection of the rows; None: of all."""
        return self


def fitted(ours: Sequence[Tensor], target: Sequence[Tensor]) -> list[Tensor]:
    """Our updates, each row multiplied by the number s ≥ 0 that brings it nearest to the target: ⟨a, b⟩ / ⟨a, a⟩.

    Distances of the result do not depend on the size of our update, and neither do their slopes, which go through s.
    """
    pairs = (ours, ours), (ours, target), (target, target)
    square, inner, wanted = (torch.stack([_inner(a, b) for a, b in zip(*p, strict=True)]).sum(0) for p in pairs)
    square = torch.where(square > 0, square, 1)
    s = torch.maximum(inner / square, LEAST * torch.sqrt(wanted / square))
    return [a * s.view(-1, *(1 for _ in a.shape[1:])) for a in ours]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Rows × all entries."""
    return torch.cat([_rows(t) for t in tensors], 1)


def _rows(t: Tensor) -> Tensor:
    """Rows × entries, also of a parameter that is a single number."""
    return t.reshape(len(t), -1)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """One inner product per row, by a plain sum, which on millions of entries is more exact in floats than `norm`."""
    return (_rows(a) * _rows(b)).sum(1)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """One cosine per row of entries; 0 where one side is zero."""
    first, second = (torch.where(square > 0, square, 1).sqrt() for square in (_inner(a, a), _inner(b, b)))
    return _inner(a, b) / (first * second)


@dataclass(frozen=True)
class L2(Distance):
    """Sum of squared differences (DLG)."""

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        return ((flat(ours) - flat(target)) ** 2).sum(1)


@dataclass(frozen=True)
class L1(Distance):
    """Sum of absolute differences."""

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        return (flat(ours) - flat(target)).abs().sum(1)


@dataclass(frozen=True)
class Cosine(Distance):
    """One minus the cosine of the two updates, each as one long vector (Geiping et al.)."""

    scale_free = True

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        return 1 - cosine(flat(ours), flat(target))


@dataclass(frozen=True)
class LayerCosine(Distance):
    """One minus the mean over tensors of each tensor's cosine: no layer rules the others."""

    scale_free = True

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        return 1 - torch.stack([cosine(a, b) for a, b in zip(ours, target, strict=True)]).mean(0)


@dataclass(frozen=True)
class RelativeL2(Distance):
    """Mean over tensors of ‖a − b‖² / ‖b‖²: every layer counts alike, and 0 means equal. Also the adversary's residual."""

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        sizes = torch.stack([_inner(b, b) for b in target])
        errors = torch.stack([_inner(a - b, a - b) for a, b in zip(ours, target, strict=True)])
        return (errors / (sizes + _TINY * sizes.sum(0))).mean(0)


@dataclass(frozen=True)
class LayerNorms(Distance):
    """Sum over tensors of ‖a − b‖, not squared (GradInversion)."""

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        sizes = torch.stack([_inner(b, b) for b in target]).sum(0)
        errors = torch.stack([_inner(a - b, a - b) for a, b in zip(ours, target, strict=True)])
        return torch.sqrt(errors + _TINY * sizes).sum(0)


@dataclass(frozen=True)
class GaussianLikelihood(Distance):
    """−log p(target | ours) up to a constant, for N(0, std²) on every entry; per entry, so that priors keep their scale.

    `std` is one number per row.
    """

    std: Tensor

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        return ((flat(ours) - flat(target)) ** 2).mean(1) / (2 * self.std**2)

    def select(self, index: Tensor | None) -> GaussianLikelihood:
        return self if index is None else GaussianLikelihood(self.std[index])


@dataclass(frozen=True)
class LaplaceLikelihood(Distance):
    """The same for Laplace(0, scale)."""

    scale: Tensor

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        return (flat(ours) - flat(target)).abs().mean(1) / self.scale

    def select(self, index: Tensor | None) -> LaplaceLikelihood:
        return self if index is None else LaplaceLikelihood(self.scale[index])


@dataclass(frozen=True)
class Nothing(Distance):
    """No gradient is compared: a prior holds the whole objective."""

    scale_free = True

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        return ours[0].new_zeros(len(ours[0]))


@dataclass(frozen=True)
class PerRow(Distance):
    """One of several distances for each row: a portfolio that runs as one batch. `choice` numbers the distances."""

    distances: tuple[Distance, ...]
    choice: Tensor

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        values = torch.stack([d(ours, target) for d in self.distances])
        return values.gather(0, self.choice.view(1, -1)).squeeze(0)

    def select(self, index: Tensor | None) -> PerRow:
        return self if index is None else PerRow(self.distances, self.choice[index])
