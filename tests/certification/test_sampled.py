"""Poisson sampling: against Opacus, against the closed form, and against what must hold of every trade-off."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.certification import gaussian, sampled
from gradveil.certification.certificate import certify, noise_for
from gradveil.certification.mechanism import Mechanism, Releases
from gradveil.core.errors import UserError

CASES = [(0.8, 0.032, 480), (1.0, 0.01, 1000), (0.6, 0.05, 600), (2.0, 0.2, 50), (1.0, 0.001, 10_000)]


def poisson(rate: float, rounds: int = 1, k: int = 1) -> Releases:
    return Releases(rounds=rounds, sampling="poisson", sample_rate=rate, images_per_person=k)


@pytest.fixture(autouse=True)
def _opacus(request: pytest.FixtureRequest) -> None:
    if "missing" not in request.node.name:
        pytest.importorskip("opacus", reason="the accountants are those of Opacus")


@pytest.mark.parametrize(("noise", "rate", "steps"), CASES)
@pytest.mark.filterwarnings("ignore:Optimal order")
def test_epsilon_is_that_of_opacus(noise: float, rate: float, steps: int) -> None:
    from opacus.accountants import PRVAccountant, RDPAccountant

    epsilons = {}
    for accountant in (PRVAccountant(), RDPAccountant()):
        accountant.history = [(noise, rate, steps)]
        epsilons[accountant.mechanism()] = accountant.get_epsilon(1e-5)
    both = sampled.limits(noise, rate, steps)
    assert both.epsilon(1e-5) == pytest.approx(epsilons["prv"], rel=0.01)
    moments = sampled._of_moments(noise, rate, steps)
    assert sampled.TradeOff(moments, moments).epsilon(1e-5) == pytest.approx(epsilons["rdp"], rel=0.01)
    # Adding an image is the worse way, so Opacus, which computes no other, is not contradicted.
    above = sampled.GRID >= sampled.EPSILON_ERROR
    assert (both.added[above] + 1e-7 >= both.removed[above]).all()


@pytest.mark.parametrize(("noise", "steps"), [(2.4, 20), (1.0, 30), (1.0, 1), (5.0, 100)])
def test_nearly_no_sampling_is_nearly_the_closed_form(noise: float, steps: int) -> None:
    """The distributions alone, without the closed form among the limits: never below it, and close."""
    mu = math.sqrt(steps) / noise
    exact = gaussian.delta_at(sampled.GRID, mu)
    for way in (sampled._Added(1 - 1e-9, noise), sampled._Removed(1 - 1e-9, noise)):
        limit = sampled._of_distribution(way, steps)
        assert limit is not None
        assert (limit >= exact).all()
        assert limit[0] == pytest.approx(exact[0], abs=0.01)
        assert sampled.GRID[np.argmax(limit <= 1e-5)] == pytest.approx(gaussian.epsilon_at(1e-5, mu), rel=0.01, abs=0.03)
    assert (sampled._of_moments(noise, 1 - 1e-9, steps) >= exact - 1e-12).all()


@pytest.mark.parametrize(("noise", "rate"), [(0.7, 0.3), (1.5, 0.05)])
def test_one_release_is_the_exact_mixture(noise: float, rate: float) -> None:
    """δ and power of one release by integration of the densities with and without the image."""
    x, step = np.linspace(-15, 16, 620_001, retstep=True)
    without = np.exp(-(x**2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
    mixed = (1 - rate) * without + rate * np.exp(-((x - 1) ** 2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
    limit = sampled.limits(noise, rate, 1)
    for i in (0, 5_000, 9_000, 10_000):
        factor = math.exp(sampled.GRID[i])
        added, removed = (np.maximum(a - factor * b, 0).sum() * step for a, b in ((mixed, without), (without, mixed)))
        assert added - 1e-9 <= limit.added[i] <= added * 1.05 + 0.01
        assert removed - 1e-9 <= limit.removed[i] <= removed * 1.05 + 0.01
    for level in (1e-3, 0.1, 0.5):  # the best test looks for large x
        threshold = -noise * float(gaussian.ndtri(level))
        exact = mixed[x > threshold].sum() * step
        assert exact - 1e-6 <= limit.power(np.array([level]))[0] <= exact * 1.03 + 0.003


def test_sampling_in_secret_promises_much_more_than_shuffling() -> None:
    mechanism = Mechanism("test", 0.8)
    secret = certify(mechanism, Releases(rounds=15, sampling="poisson", batch_size=64, images=2000))
    assert secret.releases == 15 * 32 and secret.mu is None and secret.sample_rate == 0.032
    assert secret.upper == pytest.approx(0.043, abs=0.003)
    estimate = 0.032 * math.sqrt(480 * math.expm1(1 / 0.8**2))  # the central limit, which promises nothing
    assert gaussian.line_up(estimate, 1001) < secret.upper < 1.3 * gaussian.line_up(estimate, 1001)
    shuffled = certify(mechanism, Releases(rounds=15, sampling="shuffled"))
    assert shuffled.upper == pytest.approx(0.96, abs=0.01)


def test_a_rate_of_one_is_the_closed_form_and_needs_no_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "limits", None)
    promise = certify(Mechanism("test", 2.4), poisson(1.0, rounds=20))
    assert promise.mu == pytest.approx(math.sqrt(20) / 2.4)


def test_more_noise_fewer_rounds_more_candidates_and_fewer_images_promise_more() -> None:
    """Up to the resolution of the accountants."""

    def upper(noise: float = 1.0, rounds: int = 4, m: int = 1001, k: int = 1, rate: float = 0.05) -> tuple[float, float, float]:
        promise = certify(Mechanism("test", noise), poisson(rate, rounds, k), m=m)
        return promise.upper, promise.advantage, promise.epsilon

    first = upper()
    for worse in (upper(noise=0.8), upper(rounds=8), upper(k=2), upper(rate=0.1)):
        assert all(a < b for a, b in zip(first, worse, strict=True))
    assert upper(m=11)[0] > first[0] > upper(m=10_001)[0]
    assert upper(k=3) > upper(k=2)


@settings(max_examples=6)
@given(st.floats(1, 4), st.floats(0.02, 0.5), st.integers(1, 4), st.sampled_from(["noise", "rounds", "k"]))
def test_every_limit_moves_the_right_way(noise: float, rate: float, rounds: int, change: str) -> None:
    """Up to the resolution of the accountants."""
    few = certify(Mechanism("test", noise), poisson(rate, rounds))
    worse = {"noise": (noise / 1.3, rounds, 1), "rounds": (noise, rounds + 2, 1), "k": (noise, rounds, 2)}[change]
    many = certify(Mechanism("test", worse[0]), poisson(rate, *worse[1:]))
    for name in ("upper", "advantage", "epsilon"):
        assert getattr(few, name) <= getattr(many, name) * 1.001 + 1e-4


def test_two_images_of_one_person_are_no_more_than_both_ways_of_counting_them() -> None:
    """A person with two images: not above Gaussian noise of half the size without sampling, and not below one image."""
    promise, one = (certify(Mechanism("test", 3.0), poisson(0.5, 2, k)) for k in (2, 1))
    whole = certify(Mechanism("test", 3.0), Releases(rounds=4, images_per_person=2))
    assert one.upper < promise.upper <= whole.upper and promise.unit == "person"
    assert one.epsilon < promise.epsilon <= whole.epsilon
    assert one.advantage < promise.advantage <= whole.advantage + 0.002


def test_the_noise_for_a_risk_keeps_it_and_is_little_more_than_needed() -> None:
    releases = poisson(0.1, rounds=2)
    noise = noise_for(0.05, Mechanism("test", 1.0), releases)
    assert certify(Mechanism("test", noise), releases).upper <= 0.05
    assert certify(Mechanism("test", noise * 0.99), releases).upper > 0.05
    assert noise < noise_for(0.05, Mechanism("test", 1.0), Releases(rounds=2, sampling="shuffled"))


@pytest.mark.parametrize(("noise", "rate", "steps"), [(0.05, 0.01, 1000), (0.01, 0.5, 3), (50.0, 1e-4, 10)])
def test_extreme_noise_has_a_limit_too(noise: float, rate: float, steps: int) -> None:
    limit = sampled.limits(noise, rate, steps)
    for values in (limit.added, limit.removed):
        assert np.isfinite(values).all() and (values >= 0).all() and (values <= 1).all()
    promise = certify(Mechanism("test", noise), poisson(rate, 1))
    assert 1 / 1001 <= promise.upper <= 1 and 0 <= promise.advantage <= 1 and math.isfinite(promise.epsilon)


def test_a_distribution_that_opacus_cannot_compute_leaves_the_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    from opacus.accountants.analysis.prv import prvs

    def fails(*args: object) -> None:
        raise RuntimeError("Discrete mean differs significantly from continuous mean.")

    monkeypatch.setattr(prvs, "discretize", fails)
    limit = sampled.limits.__wrapped__(1.0, 0.01, 1000)
    assert limit.epsilon(1e-5) == pytest.approx(2.10, abs=0.02)  # Opacus' moments; its distribution: 1.84
    monkeypatch.setattr(sampled, "MOST_POINTS", 10)
    assert sampled._of_distribution(sampled._Added(0.01, 1.0), 1000) is None


def test_missing_accountants_are_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opacus"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(UserError, match=r"pip install 'gradveil\[dp\]'"):
        certify(Mechanism("test", 1.2345), poisson(0.01))
