"""μ-GDP in closed form: what Gaussian noise promises where the releases of an image are all counted (Dong et al. 2019).

Whatever a test concludes from the releases, it cannot tell an image that was used from one that was not better than one
draw of N(0, 1) from one draw of N(μ, 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr, ndtri

FloatArray = NDArray[np.float64]
REACH = 12.0  # standard deviations beyond which a normal density counts for nothing in double precision


def power(level: float, mu: float) -> float:
    """The most that a test with this false positive rate detects."""
    return float(ndtr(ndtri(level) + mu))


def line_up(mu: float, m: int) -> float:
    """The most that anyone can do in a line-up of `m` equally likely candidates: the power at the level 1/m."""
    return power(1 / m, mu)


def line_up_success(mu: float, m: int) -> float:
    """What the best line-up reaches where the gradients of all candidates are orthogonal and as long as they may be.

    The candidate with the largest product with the releases is named: P(Z + μ > max of m - 1 others), the integral of
    φ(z - μ) Φ(z)^(m-1).
    """
    z, step = np.linspace(mu - REACH, mu + REACH, 20_001, retstep=True)
    values = np.exp(-((z - mu) ** 2) / 2 + (m - 1) * log_ndtr(z)) / math.sqrt(2 * math.pi)
    return float(values.sum() * step)


def advantage(mu: float) -> float:
    """The largest difference of true and false positive rate of a test whether one image was used."""
    return float(2 * ndtr(mu / 2) - 1)


def delta_at(epsilon: FloatArray, mu: float) -> FloatArray:
    """The exact δ of μ-GDP (Balle and Wang 2018)."""
    below = ndtr(-epsilon / mu + mu / 2)
    above = np.exp(epsilon + log_ndtr(-epsilon / mu - mu / 2))
    return np.asarray(np.maximum(below - above, 0.0))


def epsilon_at(delta: float, mu: float) -> float:
    """The smallest ε that holds at δ."""
    return smallest(lambda epsilon: float(delta_at(np.asarray(epsilon), mu)) <= delta)


def mu_of(risk: float, m: int) -> float:
    """The μ at which the limit of a line-up of `m` is `risk`."""
    return float(ndtri(risk) - ndtri(1 / m))


def smallest(holds: Callable[[float], bool], digits: int = 12) -> float:
    """The smallest number from 0 on, to so many digits and never below it, for which a condition holds that stays true."""
    if holds(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
    while high - low > high * 10.0**-digits and low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
