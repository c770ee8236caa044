"""Batched optimisers: every row is a separate problem, all are stepped at once.

First-order ones act on each entry, so a batch of rows is no different from one. L-BFGS keeps a history and a line search
for each row; rows that are done leave the batch, so that the slow ones do not pay for the fast.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core import loops

Objective = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]  # x, row numbers → value per row, gradient


@dataclass(frozen=True)
class FirstOrder:
    """What first-order optimisers share; `signed` steps by the sign of the gradient (Geiping et al.)."""

    lr: float = 0.1
    signed: bool = False
    noise: float = 0.0  # GradInversion adds Gaussian noise of this size times the learning rate

    def expected_evaluations(self, steps: int) -> int:
        return steps

    def stepper(self, x: Tensor) -> Callable[[Tensor, float], Tensor]:
        """A function from the gradient and the factor of the learning rate to the step."""
        raise NotImplementedError


@dataclass(frozen=True)
class Adam(FirstOrder):
    """Adam."""

    betas: tuple[float, float] = (0.9, 0.999)

    def stepper(self, x: Tensor) -> Callable[[Tensor, float], Tensor]:
        first, second, count = torch.zeros_like(x), torch.zeros_like(x), 0
        b1, b2 = self.betas

        def step(g: Tensor, decay: float) -> Tensor:
            nonlocal count
            count += 1
            g = g.sign() if self.signed else g
            first.mul_(b1).add_(g, alpha=1 - b1)
            second.mul_(b2).addcmul_(g, g, value=1 - b2)
            scale = self.lr * decay / (1 - b1**count)
            return -scale * first / ((second / (1 - b2**count)).sqrt_() + 1e-8)

        return step


@dataclass(frozen=True)
class SGD(FirstOrder):
    """Gradient descent with Nesterov momentum."""

    lr: float = 0.01
    momentum: float = 0.9

    def stepper(self, x: Tensor) -> Callable[[Tensor, float], Tensor]:
        velocity = torch.zeros_like(x)

        def step(g: Tensor, decay: float) -> Tensor:
            g = g.sign() if self.signed else g
            velocity.mul_(self.momentum).add_(g)
            return -self.lr * decay * (g + self.momentum * velocity)

        return step


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
        rows, every = torch.arange(len(x)), len(x)
        shape, best, evaluated = x.shape[1:], x.clone(), 0

        def flat(x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
            nonlocal evaluated
            evaluated += len(x)
            value, gradient = objective(x.view(-1, *shape), rows)
            return value, gradient.flatten(1)

        flat_x = x.flatten(1)
        value, flat_g = flat(flat_x, None)
        best_value = value.clone()
        s_list: list[Tensor] = []
        y_list: list[Tensor] = []
        mark, count = value.clone(), 1
        for i in loops.steps(steps, done=lambda: evaluated / every - 1):  # measured: 1.0 of all rows per step
            d = _direction(flat_g, s_list, y_list)
            slope = (d * flat_g).sum(1)
            uphill = slope >= 0
            d = torch.where(uphill[:, None], -flat_g, d)
            slope = torch.where(uphill, -(flat_g**2).sum(1), slope)
            t = torch.ones_like(value)
            if not s_list:  # first step: there is no scale yet
                t = 1.0 / flat_g.norm(dim=1).clamp_min(1e-12)
                t = torch.minimum(t, torch.ones_like(t)) * max(1.0, flat_x.shape[1] ** 0.5 * 0.1)
            new_x, new_value, new_g, used = self._search(flat, rows, flat_x, value, slope, d, t)
            count += used
            s, y = new_x - flat_x, new_g - flat_g
            good = (s * y).sum(1) > 1e-10 * (y**2).sum(1)
            # A pair without curvature is left out of its row by making it zero; the others keep theirs.
            s_list.append(torch.where(good[:, None], s, torch.zeros_like(s)))
            y_list.append(torch.where(good[:, None], y, torch.zeros_like(y)))
            s_list, y_list = s_list[-self.history :], y_list[-self.history :]
            moved = (s != 0).any(1)
            flat_x, value, flat_g = new_x, new_value, new_g
            better = value < best_value[rows]
            if bool(better.any()):
                best[rows[better]] = flat_x[better].view(-1, *shape)
                best_value[rows[better]] = value[better]
            active = moved
            if (i + 1) % self.patience == 0:
                active = active & (mark - value > self.tolerance * mark.abs().clamp_min(1e-12))
                mark = value.clone()
            if not bool(active.all()):
                keep = active.nonzero().flatten()
                rows, flat_x, value, flat_g, mark = rows[keep], flat_x[keep], value[keep], flat_g[keep], mark[keep]
                s_list, y_list = [s[keep] for s in s_list], [y[keep] for y in y_list]
            if tick:
                tick(i + 1)
            if len(rows) == 0:
                break
        return best, best_value, count

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
