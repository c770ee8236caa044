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
AT_LIMIT = 1 - 1e-5  # share of a limit from which on an entry is at it, but for rounding
FEW, SMALLEST = 0.02, 0.05  # shares of the sent entries: exact ones that tell no size; ours that stay below the limit
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
    """Our updates, each row multiplied by the number that brings it nearest to the target.

    Distances of the result do not depend on the size of our update, and neither do their slopes, which go through it.
    """
    return scaled(ours, best_size(ours, target))


def scaled(tensors: Sequence[Tensor], sizes: Tensor) -> list[Tensor]:
    """Each row multiplied by its number."""
    return [t * _per_row(sizes, t) for t in tensors]


def limited(ours: Sequence[Tensor], target: Sequence[Tensor], limits: Tensor) -> list[Tensor]:
    """Our updates at their likely size. Where the target is at the limit of its row, what exceeds it is cut off.

    An entry at the limit says only that it is at least as large. The other entries tell the size. Where they are too few,
    nearly all that was sent reached the limit, so our update gets the size at which all but its smallest entries do.
    """
    below = [b.abs() < AT_LIMIT * _per_row(limits, b) for b in target]
    exact = [[t * m for t, m in zip(side, below, strict=True)] for side in (ours, target)]
    size, sent = best_size(*exact), (flat(target) != 0).sum(1)
    unsized = (flat(exact[1]) != 0).sum(1) < FEW * sent
    if bool(unsized.any()):
        sizes = flat(ours).detach().abs().sort(1).values
        smallest = sizes.gather(1, (sizes.shape[1] - 1 - ((1 - SMALLEST) * sent).long())[:, None].clamp_min(0)).squeeze(1)
        size = torch.where(unsized, limits.to(size) / torch.where(smallest > 0, smallest, 1), size)
    rows = zip(scaled(ours, size), target, below, strict=True)
    return [torch.where(m, a, b.sign() * torch.minimum(b.sign() * a, b.abs())) for a, b, m in rows]


def best_size(ours: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
    """One number s ≥ 0 per row, which brings s · ours nearest to the target: ⟨a, b⟩ / ⟨a, a⟩."""
    pairs = (ours, ours), (ours, target), (target, target)
    square, inner, wanted = (torch.stack([_inner(a, b) for a, b in zip(*p, strict=True)]).sum(0) for p in pairs)
    square = torch.where(square > 0, square, 1)
    return torch.maximum(inner / square, LEAST * torch.sqrt(wanted / square))


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Rows × all entries."""
    return torch.cat([_rows(t) for t in tensors], 1)


def _rows(t: Tensor) -> Tensor:
    """Rows × entries, also of a parameter that is a single number."""
    return t.reshape(len(t), -1)


def _per_row(values: Tensor, like: Tensor) -> Tensor:
    """One value per row, for tensors with rows first."""
    return values.to(like).view(-1, *(1 for _ in like.shape[1:]))


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
