"""What images are like before any update is seen. Each prior gives one number per row of images (rows × B × C × H × W)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gradveil.attacks.matching.moments import compared, running_moments, wanted_moments
from gradveil.attacks.matching.rows import Rows

Prior = Callable[[Tensor, Rows], Tensor]


@dataclass(frozen=True)
class TV:
    """Total variation: mean absolute difference of neighbours, both directions added (inversefed's convention).

    `smoothed` takes √(d² + ε²) in place of |d|, which second-order optimisers need; `squared` the mean of squares.
    `weight` may be one number per row.
    """

    weight: float | Tensor = 1e-4
    form: Literal["absolute", "smoothed", "squared"] = "absolute"
    epsilon: float = 1e-2

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        weight = rows.select(self.weight) if isinstance(self.weight, Tensor) else self.weight
        return weight * self.variation(x)

    def variation(self, x: Tensor) -> Tensor:
        """Without the weight, one number per row."""
        right, down = x[..., :, 1:] - x[..., :, :-1], x[..., 1:, :] - x[..., :-1, :]
        return self._size(right).flatten(1).mean(1) + self._size(down).flatten(1).mean(1)

    def _size(self, d: Tensor) -> Tensor:
        if self.form == "absolute":
            return d.abs()
        return d**2 if self.form == "squared" else torch.sqrt(d**2 + self.epsilon**2) - self.epsilon


@dataclass(frozen=True)
class L2Norm:
    """Half the squared norm of the images, in the network's input space."""

    weight: float

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        return self.weight * 0.5 * (x**2).flatten(1).sum(1)


@dataclass(frozen=True)
class BoxPenalty:
    """Squared distance outside the valid pixel range: a soft box for optimisers that must not clamp."""

    weight: float

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        low, high = rows.target.pixel_range
        outside = (low - x).clamp_min(0) + (x - high).clamp_min(0)
        return self.weight * (outside**2).flatten(1).mean(1)


@dataclass(frozen=True)
class GroupPrior:
    """GradInversion's group consistency: restarts of one victim are pulled to their pixel-wise mean."""

    weight: float

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        if rows.index is not None or rows.restarts == 1:
            return x.new_zeros(len(x))
        grouped = x.unflatten(0, (-1, rows.restarts))
        centre = grouped.mean(1, keepdim=True).detach()
        return self.weight * torch.sqrt(((grouped - centre) ** 2).flatten(2).sum(2) + 1e-12).flatten()


@dataclass(frozen=True)
class LabelTerm:
    """CPL: the network's output on the images should be their label, α‖F(x) − y‖²."""

    weight: float

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        logits, y = rows.outputs(x), rows.labels
        y = nn.functional.one_hot(y, logits.shape[-1]).to(logits) if not y.is_floating_point() else y
        return self.weight * ((logits.view(*y.shape) - y) ** 2).flatten(1).sum(1)


@dataclass(frozen=True)
class BatchNormPrior:
    """GradInversion: the batch's statistics at every BatchNorm should be the running ones. Zero without BatchNorm.

    Where clients send statistics, they should be those of the client's own batch (Hatamizadeh et al. 2022).
    """

    weight: float

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        pairs = compared(x, rows, wanted_moments(rows) or running_moments(rows))
        gaps = [(a - b).norm(dim=1) for ours, wanted in pairs for a, b in zip(ours, wanted, strict=True)]
        return self.weight * torch.stack(gaps).sum(0) if gaps else x.new_zeros(len(x))
