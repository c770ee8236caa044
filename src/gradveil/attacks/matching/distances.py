"""Distances between updates. Each takes two lists of tensors, rows first, and gives one number per row.

A tensor that is not to count (dropped, masked, weighted) is changed on both sides before it comes here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_TINY = 1e-12
Distance = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Rows × all entries."""
    return torch.cat([_rows(t) for t in tensors], 1)


def _rows(t: Tensor) -> Tensor:
    """Rows × entries, also of a parameter that is a single number."""
    return t.reshape(len(t), -1)


def _size(rows: Tensor) -> Tensor:
    """Norms by the sum of squares, which on millions of entries is more exact in floats than `Tensor.norm`."""
    return torch.sqrt((rows * rows).sum(1) + _TINY**2)


@dataclass(frozen=True)
class L2:
    """Sum of squared differences (DLG)."""

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        return ((flat(ours) - flat(target)) ** 2).sum(1)


@dataclass(frozen=True)
class L1:
    """Sum of absolute differences."""

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        return (flat(ours) - flat(target)).abs().sum(1)


@dataclass(frozen=True)
class Cosine:
    """One minus the cosine of the two updates, each as one long vector (Geiping et al.)."""

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        a, b = flat(ours), flat(target)
        return 1 - (a * b).sum(1) / (_size(a) * _size(b) + _TINY)


@dataclass(frozen=True)
class LayerCosine:
    """One minus the mean over tensors of each tensor's cosine: no layer rules the others."""

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        terms = []
        for a, b in zip(ours, target, strict=True):
            a, b = _rows(a), _rows(b)
            terms.append(1 - (a * b).sum(1) / (_size(a) * _size(b) + _TINY))
        return torch.stack(terms).mean(0)


@dataclass(frozen=True)
class RelativeL2:
    """Mean over tensors of ‖a − b‖² / ‖b‖²: every layer counts alike, and 0 means equal. Also the adversary's residual."""

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        terms = [(_rows(a - b) ** 2).sum(1) / ((_rows(b) ** 2).sum(1) + _TINY) for a, b in zip(ours, target, strict=True)]
        return torch.stack(terms).mean(0)


@dataclass(frozen=True)
class LayerNorms:
    """Sum over tensors of ‖a − b‖, not squared (GradInversion)."""

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        terms = [(_rows(a - b) ** 2).sum(1) for a, b in zip(ours, target, strict=True)]
        return torch.sqrt(torch.stack(terms) + _TINY).sum(0)


@dataclass(frozen=True)
class GaussianLikelihood:
    """−log p(target | ours) up to a constant, for N(0, std²) on every entry; per entry, so that priors keep their scale."""

    std: float

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        return ((flat(ours) - flat(target)) ** 2).mean(1) / (2 * self.std**2)


@dataclass(frozen=True)
class LaplaceLikelihood:
    """The same for Laplace(0, scale)."""

    scale: float

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        return (flat(ours) - flat(target)).abs().mean(1) / self.scale


@dataclass(frozen=True)
class Nothing:
    """No gradient is compared: a prior holds the whole objective."""

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        return ours[0].new_zeros(len(ours[0]))


@dataclass(frozen=True)
class PerRow:
    """One of several distances for each row: a portfolio that runs as one batch. `choice` numbers the distances."""

    distances: tuple[Distance, ...]
    choice: Tensor

    def __call__(self, ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
        values = torch.stack([d(ours, target) for d in self.distances])
        return values.gather(0, self.choice.view(1, -1)).squeeze(0)

    def select(self, index: Tensor | None) -> PerRow:
        """The distances of a selection of the rows; None: of all."""
        return self if index is None else PerRow(self.distances, self.choice[index])
