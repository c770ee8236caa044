"""Batched optimisers: every row is a separate problem, all are stepped at once.

First-order ones act on each entry, so a batch of rows is no different from one. L-BFGS keeps a history and a line search
for each row; rows that are done leave the batch, so that the slow ones do not pay for the fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.core.loops import Loop, Snapshot, State

Objective = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]  # x, row numbers → value per row, gradient


@dataclass(frozen=True)
class FirstOrder:
    """What first-order optimisers share; `signed` steps by the sign of the gradient (Geiping et al.)."""

    lr: float = 0.1
    signed: bool = False
    noise: float = 0.0  # GradInversion adds Gaussian noise of this size times the learning rate

    def expected_evaluations(self, steps: int) -> int:
        return steps

    def stepper(self, x: Tensor) -> Stepper:
        raise NotImplementedError


class Stepper(Snapshot):
    """From the gradient and the factor of the learning rate to the step."""

    def state_dict(self) -> State:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}  # without the settings

    def __call__(self, g: Tensor, decay: float) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Adam(FirstOrder):
    """Adam."""

    betas: tuple[float, float] = (0.9, 0.999)

    def stepper(self, x: Tensor) -> Stepper:
        return _AdamSteps(self, x)


class _AdamSteps(Stepper):
    def __init__(self, adam: Adam, x: Tensor):
        self._adam = adam
        self.first, self.second, self.count = torch.zeros_like(x), torch.zeros_like(x), 0

    def __call__(self, g: Tensor, decay: float) -> Tensor:
        self.count += 1
        b1, b2 = self._adam.betas
        g = g.sign() if self._adam.signed else g
        self.first.mul_(b1).add_(g, alpha=1 - b1)
        self.second.mul_(b2).addcmul_(g, g, value=1 - b2)
        scale = self._adam.lr * decay / (1 - b1**self.count)
        return -scale * self.first / ((self.second / (1 - b2**self.count)).sqrt_() + 1e-8)


@dataclass(frozen=True)
class SGD(FirstOrder):
    """Gradient descent with Nesterov momentum."""

    lr: float = 0.01
    momentum: float = 0.9

    def stepper(self, x: Tensor) -> Stepper:
        return _SGDSteps(self, x)


class _SGDSteps(Stepper):
    def __init__(self, sgd: SGD, x: Tensor):
        self._sgd, self.velocity = sgd, torch.zeros_like(x)

    def __call__(self, g: Tensor, decay: float) -> Tensor:
        sgd = self._sgd
        g = g.sign() if sgd.signed else g
        self.velocity.mul_(sgd.momentum).add_(g)
        return -sgd.lr * decay * (g + sgd.momentum * self.velocity)


@dataclass
class _Descent(Snapshot):
    """All that an iteration of L-BFGS changes: the rows that still move, and the best point of every row."""

    x: Tensor
    best: Tensor
    rows: Tensor
    value: Tensor = field(default_factory=lambda: torch.empty(0))
    g: Tensor = field(default_factory=lambda: torch.empty(0))
    best_value: Tensor = field(default_factory=lambda: torch.empty(0))
    mark: Tensor = field(default_factory=lambda: torch.empty(0))  # values `patience` iterations ago
    s_list: list[Tensor] = field(default_factory=list)
    y_list: list[Tensor] = field(default_factory=list)
    count: int = 0  # evaluations
    evaluated: int = 0  # rows in all evaluations


@dataclass(frozen=True)
class LBFGS:
    """L-BFGS with a weak-Wolfe line search by bisection (Lewis and Overton), which also works at kinks (ReLU, TV)."""

    history: int = 20
    evaluations: int = 12  # of one line search, at most
    armijo: float = 1e-4
    curvature: float = 0.9
    tolerance: float = 1e-7  # a row is done when its value falls by less than this share over `patience` iterations
    patience: int = 20

    def expected_evaluations(self, steps: int) -> int:
        """Measured: 1.1 to 1.5 per step on smooth nets; on kinked ones more per step, and fewer steps."""
        return 3 * steps // 2

    def minimize(
        self, objective: Objective, x: Tensor, steps: int, tick: Callable[[int], None] | None = None
    ) -> tuple[Tensor, Tensor, int]:
        """The best point of every row, its value, and how many evaluations of the objective were made."""
        shape, every = x.shape[1:], len(x)
        at = _Descent(x.flatten(1), x.clone(), torch.arange(every))

        def flat(x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
            at.evaluated += len(x)
            value, gradient = objective(x.view(-1, *shape), rows)
            return value, gradient.flatten(1)

        # Measured: the iterations of a search evaluate all rows once, on average. The start is one evaluation more.
        loop = Loop(steps + 1, at, done=lambda: at.evaluated / every)
        for i in loop:
            if i == 0:
                at.value, at.g = flat(at.x, None)
                at.best_value, at.mark, at.count = at.value.clone(), at.value.clone(), 1
                continue
            self._iterate(at, flat, i, shape)
            if i == steps:
                at.s_list, at.y_list = [], []  # no longer needed
            if tick:
                tick(i)
            if len(at.rows) == 0:
                loop.stop()
        return at.best, at.best_value, at.count

    def _iterate(self, at: _Descent, objective: Objective, i: int, shape: torch.Size) -> None:
        d = _direction(at.g, at.s_list, at.y_list)
        slope = (d * at.g).sum(1)
        uphill = slope >= 0
        d = torch.where(uphill[:, None], -at.g, d)
        slope = torch.where(uphill, -(at.g**2).sum(1), slope)
        t = torch.ones_like(at.value)
        if not at.s_list:  # first step: there is no scale yet
            t = 1.0 / at.g.norm(dim=1).clamp_min(1e-12)
            t = torch.minimum(t, torch.ones_like(t)) * max(1.0, at.x.shape[1] ** 0.5 * 0.1)
        new_x, new_value, new_g, used = self._search(objective, at.rows, at.x, at.value, slope, d, t)
        at.count += used
        s, y = new_x - at.x, new_g - at.g
        good = (s * y).sum(1) > 1e-10 * (y**2).sum(1)
        # A pair without curvature is left out of its row by making it zero; the others keep theirs.
        at.s_list.append(torch.where(good[:, None], s, torch.zeros_like(s)))
        at.y_list.append(torch.where(good[:, None], y, torch.zeros_like(y)))
        at.s_list, at.y_list = at.s_list[-self.history :], at.y_list[-self.history :]
        active = (s != 0).any(1)
        at.x, at.value, at.g = new_x, new_value, new_g
        better = at.value < at.best_value[at.rows]
        if bool(better.any()):
            at.best[at.rows[better]] = at.x[better].view(-1, *shape)
            at.best_value[at.rows[better]] = at.value[better]
        if i % self.patience == 0:
            active = active & (at.mark - at.value > self.tolerance * at.mark.abs().clamp_min(1e-12))
            at.mark = at.value.clone()
        if not bool(active.all()):
            keep = active.nonzero().flatten()
            at.rows, at.x, at.value, at.g, at.mark = (v[keep] for v in (at.rows, at.x, at.value, at.g, at.mark))
            at.s_list, at.y_list = [s[keep] for s in at.s_list], [y[keep] for y in at.y_list]

    def _search(
        self, objective: Objective, rows: Tensor, x: Tensor, value: Tensor, slope: Tensor, d: Tensor, t: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """Points along `d` (rows × entries) from `x`: their values, gradients, and the evaluations used."""
        low, high = torch.zeros_like(t), torch.full_like(t, float("inf"))
        out_x, out_value, out_g = x.clone(), value.clone(), torch.zeros_like(x)
        open_ = torch.arange(len(x))
        have = torch.zeros(len(x), dtype=torch.bool)
        for used in range(1, self.evaluations + 1):
            trial = x[open_] + t[open_, None] * d[open_]
            there, g = objective(trial, rows[open_])
            short = torch.isfinite(there) & (there <= value[open_] + self.armijo * t[open_] * slope[open_])
            # Every point that lowers the value enough is kept as the answer so far.
            lower = short & (~have[open_] | (there < out_value[open_]))
            kept = open_[lower]
            out_x[kept], out_value[kept], out_g[kept], have[kept] = trial[lower], there[lower], g[lower], True
            flat_enough = (g * d[open_]).sum(1) >= self.curvature * slope[open_]
            done = short & flat_enough
            too_far, too_near = open_[~short], open_[short & ~flat_enough]
            high[too_far], low[too_near] = t[too_far], t[too_near]
            open_ = open_[~done]
            if len(open_) == 0:
                break
            bounded = torch.isfinite(high[open_])
            t[open_] = torch.where(bounded, (low[open_] + high[open_]) / 2, 2 * t[open_])
            if used >= 3:  # a point that lowers the value is good enough now: evaluations are what costs
                open_ = open_[~have[open_]]
                if len(open_) == 0:
                    break
        return out_x, out_value, out_g, used


def _direction(g: Tensor, s_list: list[Tensor], y_list: list[Tensor]) -> Tensor:
    """The two-loop recursion, for all rows at once. A zero pair changes nothing."""
    q, stack = g.clone(), []
    for s, y in zip(reversed(s_list), reversed(y_list), strict=True):
        curvature = (s * y).sum(1)
        rho = torch.where(curvature > 0, 1 / curvature.clamp_min(1e-30), torch.zeros_like(curvature))
        a = rho * (s * q).sum(1)
        q = q - a[:, None] * y
        stack.append((rho, a, s, y))
    if s_list:
        curvature, size = (s_list[-1] * y_list[-1]).sum(1), (y_list[-1] ** 2).sum(1)
        scale = torch.where(size > 0, curvature / size.clamp_min(1e-30), torch.ones_like(size))
        q = q * scale[:, None]
    for rho, a, s, y in reversed(stack):
        b = rho * (y * q).sum(1)
        q = q + (a - b)[:, None] * s
    return -q
