"""Two images behind one classifier gradient, separated exactly. Ours; no paper.

The classifier receives h_s from the sensitive image and h_c from the concealed one, and sends
∇W = δ_s h_sᵀ + δ_c h_cᵀ and ∇b = δ_s + δ_c: a matrix of rank two with columns in the plane of δ_s and δ_c. Two numbers are
left open, the place of δ_s in that plane; the rest is arithmetic: δ_c = ∇b − δ_s, and h_s, h_c follow from ∇W. But the
features must also give the signals back, up to their sizes (DCS² may enlarge its part of the true gradient, and a defense
may change the size of all): δ_s ∝ softmax(W h_s + b) − y_s and δ_c ∝ softmax(W h_c + b) − y, with
y = λg·y_c + (1 − λg)·y_s. On ten classes those are 16 equations for two numbers, solved by Levenberg–Marquardt from a
grid for every pair of labels at once. How the concealed image was crafted does not enter.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jacfwd, vmap

SHARES = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98)  # of ∇b that belong to the sensitive image …
ASIDE = (1e-4, 1e-3, 1e-2, 0.05, 0.2, 1.0)  # … and the distance of δ_s from it, to either side
LABELS = 10  # tried on either side, those with the lowest bias gradient
THINNED = {4: 4, 12: 4, 24: 4}  # after so many steps one in so many goes on, the best
STEPS = 60


@dataclass
class Pair:
    """Features and signals at the classifier's output for the sensitive and the concealed image, in this order."""

    features: Tensor  # 2 × width
    signals: Tensor  # 2 × classes
    labels: tuple[int, int]
    error: float  # of the equations, as a share of the signals


def separate(sent: tuple[Tensor, Tensor], state: tuple[Tensor, Tensor], lambda_g: float) -> Pair:
    """From the gradients (∇W, ∇b) of a classifier and its weights (W, b)."""
    (weight_sent, bias_sent), (weight, bias) = ((w.double(), b.double()) for w, b in (sent, state))
    classes = len(bias)
    plane = torch.linalg.svd(weight_sent, full_matrices=False)[0][:, :2]
    rows, sum_ = plane.T @ weight_sent, plane.T @ bias_sent
    logits = rows @ weight.T
    across = torch.stack([-sum_[1], sum_[0]])

    def split(at: Tensor) -> Tensor:
        """The coordinates of δ_s and δ_c, one per column."""
        sensitive = at[0] * sum_ + at[1] * across
        return torch.stack([sensitive, sum_ - sensitive], -1)

    def unexplained(at: Tensor, sensitive: Tensor, concealed: Tensor) -> Tensor:
        parts = split(at)
        p = (_inverse(parts) @ logits + bias).softmax(-1)
        signals = (plane @ parts).T
        mixed = lambda_g * concealed + (1 - lambda_g) * sensitive
        return (_unit(p - torch.stack([sensitive, mixed])) - _unit(signals)).flatten()

    aside = [sign * a for a in ASIDE for sign in (1, -1)]
    grid = torch.cartesian_prod(*(torch.tensor(v, dtype=torch.float64) for v in (SHARES, aside)))
    likely = bias_sent.argsort()[:LABELS]
    pairs = torch.cartesian_prod(likely, likely)
    labels = torch.eye(classes, dtype=torch.float64)[pairs.repeat_interleave(len(grid), 0)]
    at, labels, cost = _levenberg_marquardt(unexplained, grid.repeat(len(pairs), 1), labels)
    best = int(cost.argmin())
    parts = split(at[best])
    sensitive, concealed = labels[best].argmax(-1).tolist()
    return Pair(_inverse(parts) @ rows, (plane @ parts).T, (sensitive, concealed), float(cost[best].sqrt()))


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.square().sum(1, keepdim=True).sqrt()


def _inverse(m: Tensor) -> Tensor:
    (a, b), (c, d) = m
    return torch.stack([torch.stack([d, -b]), torch.stack([-c, a])]).div(a * d - b * c)


def _levenberg_marquardt(residuals: Callable[..., Tensor], at: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Least squares of many small problems at once; those that fall behind are dropped."""
    look: Callable[..., Tensor] = vmap(residuals)
    slopes: Callable[..., Tensor] = vmap(jacfwd(residuals))
    cost = _squares(look(at, *labels.unbind(1)))
    damping = torch.full_like(cost, 1e-3)
    for step in range(STEPS):
        values, jacobian = look(at, *labels.unbind(1)), slopes(at, *labels.unbind(1))
        normal = jacobian.mT @ jacobian
        scale = torch.diag_embed(normal.diagonal(dim1=1, dim2=2) + 1e-12)
        pull = jacobian.mT @ values[..., None]
        move = torch.linalg.solve_ex(normal + damping[:, None, None] * scale, -pull).result.squeeze(-1)
        there = at + torch.nan_to_num(move, nan=0.0, posinf=0.0, neginf=0.0)
        lower = _squares(look(there, *labels.unbind(1)))
        better = lower < cost
        at, cost = torch.where(better[:, None], there, at), torch.where(better, lower, cost)
        damping = torch.where(better, damping / 3, damping * 4).clamp(1e-14, 1e10)
        if step in THINNED:
            kept = cost.argsort()[: max(64, len(cost) // THINNED[step])]
            at, labels, cost, damping = at[kept], labels[kept], cost[kept], damping[kept]
    return at, labels, cost


def _squares(values: Tensor) -> Tensor:
    return torch.nan_to_num(values.square().sum(1), nan=1e30, posinf=1e30)
