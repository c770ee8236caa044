"""What is minimised: distance(update of x, observed update) + priors(x), for victims × restarts in one batch.

A problem is built from three things, and from nothing else: the `Target` (what was observed), the `Match` (how to
match), and the `Insight` (what the adversary knows beyond the update).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from gradveil.attacks.base import Target
from gradveil.attacks.matching.distances import Cosine, Distance, Nothing, RelativeL2, fitted, limited
from gradveil.attacks.matching.optimizers import LBFGS, Adam, FirstOrder
from gradveil.attacks.matching.priors import TV, Prior
from gradveil.attacks.matching.rows import Rows
from gradveil.attacks.matching.starts import Start
from gradveil.core.types import Tensors


class ImageMap(Protocol):
    """A linear map between images and the numbers in which steps are taken."""

    def images(self, z: Tensor) -> Tensor: ...

    def of_images(self, x: Tensor) -> Tensor: ...

    def slope(self, gradient: Tensor) -> Tensor:
        """The derivative by the numbers from that by the images."""
        ...


@dataclass(frozen=True)
class Match:
    """How to match: everything that tells one published attack from another."""

    distance: Distance = field(default_factory=Cosine)
    priors: tuple[Prior, ...] = (TV(1e-4),)
    optimizer: FirstOrder | LBFGS = field(default_factory=Adam)
    steps: int = 4000
    start: Start = field(default_factory=Start)
    restarts: int = 1
    box: bool = False  # keep pixels in [0, 1]
    decay: bool = True  # ×0.1 at 3/8, 5/8 and 7/8 of the steps
    warmup: int = 0
    patience: int | None = None  # stop when no row has improved for so many steps
    learn_labels: bool = False  # DLG: soft labels are unknowns too
    resample: bool = False  # draw a random model's noise anew at every step; line searches need it fixed
    coordinates: ImageMap | None = None  # in which steps are taken; None: pixels


@dataclass(frozen=True)
class Insight:
    """What an adversary knows beyond the update; by default nothing.

    Args:
        weights: tensor name → factors (victims × the tensor's shape, or broadcastable to it). Both updates are multiplied
            by them before they are compared; zeros and ones make a mask.
        keep: names of the tensors that are compared; None compares all.
        limits: one per victim, in units of the observed update: entries beyond it were sent as the limit.
    """

    weights: Mapping[str, Tensor] = field(default_factory=dict)
    keep: Sequence[str] | None = None
    limits: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return not self.weights and self.keep is None and self.limits is None

    def subset(self, victims: Sequence[int]) -> Insight:
        """The same for a selection of the victims."""
        weights = {name: factors[list(victims)] for name, factors in self.weights.items()}
        return replace(self, weights=weights, limits=None if self.limits is None else self.limits[list(victims)])


NOTHING = Insight()


class Problem:
    """The objective as a function of rows of images, with its gradient."""

    def __init__(self, target: Target, match: Match, insight: Insight = NOTHING):
        self.target, self.match, self.insight = target, match, insight
        self.rows = Rows.of(target, match.restarts)
        self.names = [n for n in target.model.trainable if insight.keep is None or n in insight.keep]
        self.observed = [self._weighted(target.updates(i), None) for i in range(target.sightings)]
        self.states = [sighting.state for sighting in target.first.seen]
        self.at_once = target.rows_at_once

    def __call__(self, x: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Value per row, and its gradient by the images. `index` numbers the rows of `x`; None: all rows."""
        return self.differentiate(self.value, x, index)

    def differentiate(self, value: Callable[[Tensor, Rows], Tensor], z: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
        """Value per row of unknowns and its gradient, for a limited number of rows at a time."""
        if len(z) > self.at_once:
            parts = [self.differentiate(value, z[part], picked) for part, picked in self._parts(len(z), index)]
            return torch.cat([v for v, _ in parts]), torch.cat([g for _, g in parts])
        z = z.detach().requires_grad_()
        with torch.enable_grad():
            values = value(z, self.rows.at(index))
            (gradient,) = torch.autograd.grad(values.sum(), z)
        return values.detach().to(z.dtype), gradient

    def value(self, x: Tensor, rows: Rows) -> Tensor:
        total = self.mismatch(x, rows)
        for prior in self.match.priors:
            total = total + prior(x, rows)
        return total

    def mismatch(self, x: Tensor, rows: Rows) -> Tensor:
        """The distance alone, the mean over sightings. Updates that nobody compares are not computed."""
        if isinstance(self.match.distance, Nothing):
            return x.new_zeros(len(x))
        total: Tensor | None = None
        for i, state in enumerate(self.states):
            updates = self.target.model.updates(state, x, rows.labels, self.target.training, rows.noise)
            term = self.compare(updates, rows, i)
            total = term if total is None else total + term
        assert total is not None
        return total / len(self.observed)

    def compare(self, updates: Tensors, rows: Rows, sighting: int = 0) -> Tensor:
        """The distance of updates (rows first) from those of one sighting; the size of either makes no difference."""
        distance, victims = self.match.distance.select(rows.index), rows.victims
        observed = self.observed[sighting]
        if rows.index is not None or rows.restarts > 1:
            observed = [t[victims] for t in observed]
        ours = self._weighted(updates, victims)
        if self.insight.limits is not None:
            return distance(limited(ours, observed, self.insight.limits[victims]), observed)
        return distance(ours if distance.scale_free else fitted(ours, observed), observed)

    def residual(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """The distance alone of all rows, with the labels of the rows or with others."""
        rows = self.rows if labels is None else replace(self.rows, labels=labels)
        with torch.no_grad():
            if len(x) <= self.at_once:
                return self.mismatch(x, rows)
            return torch.cat([self.mismatch(x[part], rows.at(picked)) for part, picked in self._parts(len(x), None)])

    def _parts(self, count: int, index: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """Rows that are computed together: their place in `z`, and their numbers in the problem."""
        every = torch.arange(count) if index is None else index
        for start in range(0, count, self.at_once):
            part = slice(start, start + self.at_once)
            yield part, every[part]

    def _weighted(self, tensors: Tensors, victims: Tensor | None) -> list[Tensor]:
        weights = self.insight.weights
        if victims is not None:
            weights = {name: factors[victims] for name, factors in weights.items()}
        return [tensors[n] * weights[n] if n in weights else tensors[n] for n in self.names]


def residual(target: Target, x: Tensor, distance: Distance | None = None, insight: Insight = NOTHING) -> Tensor:
    """How far the updates of finished images (victims · restarts first) are from the observed ones; never NaN.

    The default distance is the squared error as a share of each tensor; 0 means equal.
    """
    match = Match(distance or RelativeL2(), (), restarts=len(x) // target.shape[0])
    return torch.nan_to_num(Problem(target, match, insight).residual(x), nan=float("inf"))
