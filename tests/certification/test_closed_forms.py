"""The closed forms against formulas coded here with math.erf alone, and that every promise moves the right way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.certification import gaussian
from gradveil.certification.certificate import Certificate, certify, noise_for, percent, rounded_up
from gradveil.certification.mechanism import Mechanism, Releases
from gradveil.core.errors import UserError

MUS = (0.1, 0.76, 1.45, 1.8634, 4.0)
SIZES = (2, 11, 1001)


def phi(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def quantile(p: float) -> float:
    low, high = -40.0, 40.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if phi(middle) < p else (low, middle)
    return low


def noised(noise: float, bounded: str = "image") -> Mechanism:
    return Mechanism("test", noise, bounded)  # type: ignore[arg-type]


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize("m", SIZES)
def test_the_certificate_is_the_closed_form(mu: float, m: int) -> None:
    promise = certify(noised(1 / mu), Releases(rounds=1), m=m)
    assert promise.upper == pytest.approx(phi(quantile(1 / m) + mu), abs=1e-6)
    assert promise.advantage == pytest.approx(2 * phi(mu / 2) - 1, abs=1e-6)
    assert promise.mu == pytest.approx(mu, abs=1e-12)
    epsilon = promise.epsilon
    delta = phi(-epsilon / mu + mu / 2) - math.exp(epsilon) * phi(-epsilon / mu - mu / 2)
    assert delta == pytest.approx(1e-5, abs=1e-11)
    assert gaussian.delta_at(np.array([0.0]), mu)[0] == pytest.approx(promise.advantage, abs=1e-12)


@pytest.mark.parametrize("mu", MUS)
@pytest.mark.parametrize("m", SIZES)
def test_the_best_line_up_is_the_integral_and_below_the_limit(mu: float, m: int) -> None:
    step, total = 1e-3, 0.0
    for i in range(-12_000, 12_001):
        z = mu + i * step
        total += step * math.exp(-((i * step) ** 2) / 2) / math.sqrt(2 * math.pi) * phi(z) ** (m - 1)
    success = gaussian.line_up_success(mu, m)
    assert success == pytest.approx(total, abs=1e-6)
    assert 1 / m < success <= gaussian.line_up(mu, m) + 1e-12
    assert gaussian.line_up(mu, m) - success < 0.1


def test_two_candidates_are_told_apart_as_two_normals() -> None:
    assert gaussian.line_up_success(1.3, 2) == pytest.approx(phi(1.3 / math.sqrt(2)), abs=1e-9)


def test_values_of_the_literature() -> None:
    # Dong et al. 2019: 1-GDP is (1, 0.126936)-DP. A line-up of 1,001: at most 1% and 5% at μ = .76 and 1.45.
    assert gaussian.delta_at(np.array([1.0]), 1.0)[0] == pytest.approx(0.126936, abs=1e-5)
    assert gaussian.mu_of(0.01, 1001) == pytest.approx(0.76, abs=0.01)
    assert gaussian.mu_of(0.05, 1001) == pytest.approx(1.45, abs=0.01)
    swarm = certify(noised(2.4), Releases(rounds=20))
    assert percent(swarm.upper) == "11%" and swarm.mu == pytest.approx(1.86, abs=0.005)
    assert rounded_up(noise_for(0.05, noised(1.0), Releases(rounds=1)), 3) == "0.692"


def test_epsilon_holds_far_out_where_the_terms_overflow() -> None:
    for mu in (30.0, 347.0):
        epsilon = gaussian.epsilon_at(1e-5, mu)
        x = epsilon / mu + mu / 2
        tail = math.exp(epsilon - x * x / 2) / (x * math.sqrt(2 * math.pi)) * (1 - 1 / x**2 + 3 / x**4)  # e^ε Φ(-x)
        assert phi(-epsilon / mu + mu / 2) - tail == pytest.approx(1e-5, rel=1e-3)
    assert gaussian.epsilon_at(0.9, 0.1) == 0.0


@given(st.floats(0.05, 20), st.floats(1.01, 3), st.integers(1, 400), st.integers(1, 400))
def test_more_noise_promises_more(noise: float, factor: float, rounds: int, k: int) -> None:
    releases = Releases(rounds=rounds, images_per_person=k)
    less, more = (certify(noised(n), releases) for n in (noise, noise * factor))
    assert ordered(more, less)


@given(st.floats(0.1, 20), st.integers(1, 300), st.integers(1, 300), st.integers(1, 5), st.integers(1, 5))
def test_more_rounds_epochs_or_images_promise_less(noise: float, rounds: int, extra: int, epochs: int, k: int) -> None:
    few = certify(noised(noise), Releases(rounds=rounds, local_epochs=epochs, images_per_person=k))
    for fields in (
        {"rounds": rounds + extra, "local_epochs": epochs, "images_per_person": k},
        {"rounds": rounds, "local_epochs": epochs + extra, "images_per_person": k},
        {"rounds": rounds, "local_epochs": epochs, "images_per_person": k + extra},
    ):
        assert ordered(few, certify(noised(noise), Releases(**fields)))
    assert few.releases == rounds * epochs and few.unit == ("image" if k == 1 else "person")


@given(st.floats(0.1, 20), st.integers(2, 10_000), st.integers(1, 10_000))
def test_more_candidates_are_harder_to_tell_apart(noise: float, m: int, extra: int) -> None:
    few, many = (certify(noised(noise), Releases(rounds=1), m=size) for size in (m, m + extra))
    assert few.upper >= many.upper >= 1 / (m + extra)
    assert (few.epsilon, few.advantage) == (many.epsilon, many.advantage)


def ordered(better: Certificate, worse: Certificate) -> bool:
    pairs = [(getattr(better, name), getattr(worse, name)) for name in ("upper", "advantage", "epsilon")]
    return all(one <= other * (1 + 1e-9) for one, other in pairs)


@given(st.floats(0.002, 0.98), st.integers(1, 200), st.integers(1, 10), st.sampled_from(["image", "update"]))
def test_the_noise_for_a_risk_gives_this_risk(risk: float, rounds: int, k: int, bounded: str) -> None:
    releases = Releases(rounds=rounds, images_per_person=k)
    noise = noise_for(risk, noised(1.0, bounded), releases)
    assert certify(noised(noise, bounded), releases).upper == pytest.approx(risk, rel=1e-9)


def test_a_clipped_update_counts_rounds_and_moves_by_twice_its_bound() -> None:
    releases = Releases(rounds=9, local_epochs=4, images_per_person=7)
    promise = certify(noised(2.0, "update"), releases)
    assert promise.releases == 9
    assert promise.mu == pytest.approx(2 * 3 / 2.0)  # two updates of the length of the bound, in opposite directions
    assert promise.upper == pytest.approx(phi(quantile(1 / 1001) + 3 / 2.0), abs=1e-9)  # against an empty update


@pytest.mark.parametrize(("bounded", "fields"), [("image", {}), ("update", {"local_epochs": 3})])
def test_the_noise_of_all_clients_of_a_sum_counts(bounded: str, fields: dict[str, int]) -> None:
    alone = certify(noised(3.0, bounded), Releases(rounds=5, **fields))
    shared = certify(noised(1.0, bounded), Releases(rounds=5, aggregate=9, **fields))
    assert (shared.upper, shared.epsilon, shared.mu) == pytest.approx((alone.upper, alone.epsilon, alone.mu))
    assert shared.noise == 1.0 and "sees only sums of 9 clients" in shared.sentences()[0]
    assert any("Secure aggregation works" in line for line in shared.assumptions)
    needed = noise_for(shared.upper, noised(7.0, bounded), Releases(rounds=5, aggregate=9, **fields))
    assert needed == pytest.approx(1.0)


@pytest.mark.parametrize("fields", [{"local_epochs": 2}, {"sampling": "shuffled"}])
def test_noise_that_does_not_add_up_is_not_counted(fields: dict[str, object]) -> None:
    with pytest.raises(UserError, match="does not add up"):
        certify(noised(1.0), Releases(rounds=1, aggregate=2, **fields))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="added once to the sum"):
        certify(Mechanism("central", 1.0, "update", by_client=False), Releases(rounds=1, aggregate=2))


def test_shuffled_batches_are_counted_like_full_ones() -> None:
    full, shuffled = (
        certify(noised(1.0), Releases(rounds=3, local_epochs=2, sampling=s))  # type: ignore[arg-type]
        for s in ("full", "shuffled")
    )
    assert (full.mu, full.upper, full.epsilon) == (shuffled.mu, shuffled.upper, shuffled.epsilon)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling": "poisson"}, "needs --batch-size and --images, or --sample-rate"),
        ({"sampling": "poisson", "batch_size": 8}, "needs --batch-size and --images"),
        ({"sampling": "poisson", "batch_size": 8, "images": 9, "sample_rate": 0.1}, "or --sample-rate"),
        ({"sampling": "poisson", "batch_size": 8, "images": 4}, "is more than --images 4"),
        ({"sampling": "shuffled", "sample_rate": 0.1}, "only with --sampling poisson"),
    ],
)
def test_releases_that_do_not_fit_together_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Releases(rounds=1, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("risk", [0.0, 1 / 1001, 1.0, math.nan])
def test_a_risk_that_no_noise_can_give_is_refused(risk: float) -> None:
    with pytest.raises(UserError, match="name a risk above that, below 1"):
        noise_for(risk, noised(1.0), Releases(rounds=1))


@pytest.mark.parametrize("changes", [{"m": 1}, {"delta": 0.0}, {"delta": 1.0}])
def test_questions_without_an_answer_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(UserError):
        certify(noised(1.0), Releases(rounds=1), **changes)  # type: ignore[arg-type]
    for noise in (0.0, math.inf, math.nan):
        with pytest.raises(UserError, match="without noise"):
            certify(noised(noise), Releases(rounds=1))


@given(st.floats(1e-6, 1e7), st.integers(1, 4))
def test_limits_are_rounded_up(value: float, digits: int) -> None:
    shown = float(rounded_up(value, digits).replace(",", ""))
    assert value * (1 - 1e-9) <= shown <= value * (1 + 10.0 ** (1 - digits)) + 1e-12


def test_shares_are_rounded_up() -> None:
    shares = (0.0, 0.00099, 0.0501, 0.1099, 0.11, 0.9951, 0.99985, 0.99999)
    assert [percent(s) for s in shares] == ["0%", "0.099%", "5.1%", "11%", "11%", "99.51%", "99.99%", "100%"]
