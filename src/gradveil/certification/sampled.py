"""What noise promises where every batch is a secret Poisson sample: limits from the accountants of Opacus.

P are the releases with an image, Q those without it. An accountant limits δ(ε) = sup over events of P - e^ε Q, and of
Q - e^ε P, from above; each pair (ε, δ) limits the power of every test. The limits are those of moments (Rényi, both ways by
Mironov et al. 2019), of the privacy loss distribution (Gopi et al. 2021, computed here for both ways), and of the same
noise without sampling. The smallest counts. The central limit is only an estimate, so it is not used.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import numpy as np
from scipy.special import ndtr

from gradveil.certification import gaussian
from gradveil.certification.gaussian import FloatArray
from gradveil.core.errors import UserError

GRID = np.concatenate([[0.0], np.geomspace(1e-4, 600.0, 16_000)])  # values of ε
FACTORS = np.exp(GRID)
LEVELS = np.linspace(0.0, 1.0, 501)  # false positive rates
HIGH_ORDERS = (64, 80, 96, 128, 192, 256, 512)  # of Rényi divergences, beyond those of Opacus
EPSILON_ERROR, DELTA_ERROR = 0.01, 1e-8  # of the privacy loss distribution; Opacus takes as much of ε
MOST_POINTS = 1 << 23  # of the distribution; beyond, the moments alone count


@dataclass(frozen=True)
class TradeOff:
    """δ at every ε of the grid, for an image that is added (P - e^ε Q) and for one that is removed (Q - e^ε P)."""

    added: FloatArray
    removed: FloatArray

    def power(self, levels: FloatArray, images: int = 1) -> FloatArray:
        """The most that tests with these false positive rates detect of a person with so many images."""
        for _ in range(images):  # one image after another: the power at the power of the images before
            one = [np.min(self.added + FACTORS * level) for level in levels]
            other = [np.min(1 - (1 - self.removed - level) / FACTORS) for level in levels]
            levels = np.clip(np.minimum(one, other), levels, 1.0)
        return levels

    def advantage(self, images: int = 1) -> float:
        """The largest difference of true and false positive rate."""
        if images == 1:
            return float(min(1.0, self.added[0], self.removed[0]))
        # Between two levels no test does better than at the upper one, and none has a smaller rate than the lower one.
        return float(min(1.0, np.max(self.power(LEVELS[1:], images) - LEVELS[:-1])))

    def epsilon(self, delta: float, images: int = 1) -> float:
        """An ε that holds at δ for a group of so many images: k·ε at δ·(e^kε - 1)/(e^ε - 1); infinite beyond the grid."""
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            growth = np.where(GRID > 0, np.expm1(images * GRID) / np.expm1(GRID), images)
            holds = np.maximum(self.added, self.removed) * growth <= delta
        return float(images * GRID[np.argmax(holds)]) if holds.any() else math.inf


@lru_cache
def limits(noise: float, rate: float, steps: int) -> TradeOff:
    """Of `steps` Gaussian releases of noise multiplier `noise`, each of a Poisson sample with this rate."""
    whole = gaussian.delta_at(GRID, math.sqrt(steps) / noise)
    either = np.minimum(whole, _of_moments(noise, rate, steps))
    distributions = [_of_distribution(way, steps) for way in (_Added(rate, noise), _Removed(rate, noise))]
    added, removed = (either if limit is None else np.minimum(either, limit) for limit in distributions)
    return TradeOff(added, removed)


def _opacus(module: str) -> ModuleType:
    try:
        return importlib.import_module(f"opacus.accountants.{module}")
    except ModuleNotFoundError:
        raise UserError("Poisson sampling needs the accountants of Opacus; `pip install 'gradveil[dp]'`.") from None


@lru_cache
def _moments(noise: float, rate: float) -> tuple[FloatArray, FloatArray]:
    """Orders, and the Rényi divergence of one release at each of them."""
    orders = [*_opacus("rdp").RDPAccountant.DEFAULT_ALPHAS, *HIGH_ORDERS]
    spent = _opacus("analysis.rdp").compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders)
    finite = np.isfinite(spent)
    return np.array(orders)[finite], np.asarray(spent)[finite]


def _of_moments(noise: float, rate: float, steps: int) -> FloatArray:
    """δ at every ε from Rényi divergences (Balle et al. 2020, theorem 21)."""
    best = np.zeros(len(GRID))
    for order, spent in zip(*_moments(noise, rate), strict=True):
        logarithm = (order - 1) * (steps * spent - GRID + math.log1p(-1 / order)) - math.log(order)
        best = np.minimum(best, logarithm)
    return np.asarray(np.exp(best))


def _reach(noise: float, rate: float, steps: int) -> float:
    """Up to which privacy loss a distribution is computed (Gopi et al. 2021, remark 5.6, as in Opacus)."""
    orders, spent = _moments(noise, rate)

    def epsilon(steps: int, delta: float) -> float:
        values = steps * spent - np.log(delta * orders) / (orders - 1) + np.log1p(-1 / orders)
        return float(np.min(values, initial=np.inf))

    return 3 + max(epsilon(steps, DELTA_ERROR / 4), epsilon(1, DELTA_ERROR / (8 * steps)), EPSILON_ERROR)


@dataclass(frozen=True)
class _Added:
    """The privacy loss log P/Q under P. Opacus' distribution takes such objects; this one is also its own."""

    sample_rate: float
    noise_multiplier: float

    def cdf(self, t: FloatArray) -> FloatArray:
        z, mean = _odds(t, self.sample_rate), 1 / (2 * self.noise_multiplier**2)
        with_image, without = (ndtr((z - shift) * self.noise_multiplier) for shift in (mean, -mean))
        return np.asarray(self.sample_rate * with_image + (1 - self.sample_rate) * without)


class _Removed(_Added):
    """The privacy loss log Q/P under Q."""

    def cdf(self, t: FloatArray) -> FloatArray:
        z, mean = _odds(-np.asarray(t), self.sample_rate), 1 / (2 * self.noise_multiplier**2)
        return np.asarray(ndtr(-(z + mean) * self.noise_multiplier))


def _odds(t: FloatArray, rate: float) -> FloatArray:
    """log N(1, σ²)/N(0, σ²) where log P/Q is t; minus infinity where it is never so small."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.asarray(np.log(np.maximum(np.expm1(t) / rate + 1, 0.0)))


def _of_distribution(loss: _Added, steps: int) -> FloatArray | None:
    """δ at every ε from the composed privacy loss distribution; None where Opacus cannot compute it."""
    prvs, compose = _opacus("analysis.prv.prvs"), _opacus("analysis.prv.compose")
    largest = _reach(loss.noise_multiplier, loss.sample_rate, steps)
    mesh = EPSILON_ERROR / math.sqrt(steps * math.log(12 / DELTA_ERROR) / 2)
    if not 2 * largest / mesh <= MOST_POINTS:
        return None
    grid = _opacus("analysis.prv.domain").Domain.create_aligned(-largest, largest, mesh)
    try:
        one = prvs.discretize(prvs.TruncatedPrivacyRandomVariable(loss, grid.t_min, grid.t_max), grid)
    except RuntimeError:  # its mean is not exact enough, as happens for large ε
        return None
    composed = compose.compose_heterogeneous([one], [steps])
    points, mass = composed.domain.ts, composed.pmf
    first = np.searchsorted(points, GRID - EPSILON_ERROR)  # the error of ε is on the safe side
    tails = [np.append(np.cumsum(part[::-1])[::-1], 0.0)[first] for part in (mass, mass * np.exp(-points))]
    estimate = tails[0] - np.exp(GRID - EPSILON_ERROR) * tails[1]
    return np.asarray(np.clip(estimate + DELTA_ERROR, DELTA_ERROR, 1.0))
