"""Where the true difference of two groups lies, at the level of 95%: of means, and of shares that are 0 or 1 each."""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

CLEAR = 0.05  # one minus the level of the intervals

Floats = NDArray[np.float64]


def interval(
    a: Mapping[int, float], b: Mapping[int, float], paired: bool, shares: bool
) -> tuple[float, float] | tuple[None, None]:
    """By how much `b` is above `a`. Two values per group are the least. Paired groups have the same keys."""
    if min(len(a), len(b)) < 2:
        return None, None
    if paired:
        differences = np.array([b[v] - a[v] for v in a])
        if not differences.any():
            return 0.0, 0.0
        return paired_shares(differences) if shares else paired_means(differences)
    first, second = np.array([*a.values()]), np.array([*b.values()])
    return two_shares(first, second) if shares else two_means(first, second)


def paired_means(differences: Floats) -> tuple[float, float]:
    """Student's interval of the mean difference."""
    n = len(differences)
    half = stdtrit(n - 1, 1 - CLEAR / 2) * differences.std(ddof=1) / math.sqrt(n)
    return float(differences.mean() - half), float(differences.mean() + half)


def two_means(a: Floats, b: Floats) -> tuple[float, float]:
    """Welch's interval: the groups may spread differently."""
    parts = [x.var(ddof=1) / len(x) for x in (a, b)]
    if not sum(parts):
        return float(b.mean() - a.mean()), float(b.mean() - a.mean())
    freedom = sum(parts) ** 2 / sum(p**2 / (len(x) - 1) for p, x in zip(parts, (a, b), strict=True))
    half = stdtrit(freedom, 1 - CLEAR / 2) * math.sqrt(sum(parts))
    return float(b.mean() - a.mean() - half), float(b.mean() - a.mean() + half)


def paired_shares(differences: Floats) -> tuple[float, float]:
    """Bonett and Price's interval: the shares that changed either way, each with one more added. Holds for few too."""
    n = len(differences) + 2
    up, down = ((differences > 0).sum() + 1) / n, ((differences < 0).sum() + 1) / n
    half = ndtri(1 - CLEAR / 2) * math.sqrt((up + down - (up - down) ** 2) / n)
    return max(-1.0, float(up - down - half)), min(1.0, float(up - down + half))


def two_shares(a: Floats, b: Floats) -> tuple[float, float]:
    """Agresti and Caffo's interval: one hit and one miss added to each group. Holds for few too."""
    n, m = len(a) + 2, len(b) + 2
    p, q = (a.sum() + 1) / n, (b.sum() + 1) / m
    half = ndtri(1 - CLEAR / 2) * math.sqrt(p * (1 - p) / n + q * (1 - q) / m)
    return max(-1.0, float(q - p - half)), min(1.0, float(q - p + half))
