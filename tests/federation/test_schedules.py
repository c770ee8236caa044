"""Learning rates against the published formulas."""

from __future__ import annotations

import pytest

from gradveil.core.errors import UserError
from gradveil.federation import FederationPlan
from gradveil.federation.schedules import schedule


def test_constant_and_step() -> None:
    assert [schedule("constant").factor(r) for r in (0, 7, 99)] == [1, 1, 1]
    assert [schedule("step:every=3,gamma=0.5").factor(r) for r in range(7)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]


def test_exponential() -> None:
    assert [schedule("exponential:gamma=0.9").factor(r) for r in range(3)] == pytest.approx([1, 0.9, 0.81])


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("exponential:gamma=0.99", {0: 0.01, 10: 0.01 * 0.99**10, 199: 0.01 * 0.99**199}),
        ("exponential:gamma=0.99,restart=30,drop=0.1", {0: 0.01, 29: 0.01 * 0.99**29, 30: 0.001, 49: 0.001 * 0.99**19}),
        ("constant", {0: 0.01, 49: 0.01}),
    ],
)
def test_the_learning_rates_of_dcs2(schedule: str, rates: dict[int, float]) -> None:
    """MNIST and CelebA, CIFAR-10, TinyImageNet, as in the public code."""
    plan = FederationPlan(rounds=200, lr=0.01, schedule=schedule)
    assert {r: plan.learning_rate(r) for r in rates} == pytest.approx(rates)
    training = plan.local_training(10)
    assert (training.lr, training.batch_size) == (plan.learning_rate(10), 64)
    assert training.optimizer == "sgd:momentum=0.9,weight_decay=0.0"


@pytest.mark.parametrize("text", ["cosine", "exponential:gamma=0", "exponential:gamma=2", "step:every=0"])
def test_wrong_schedules_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        FederationPlan(rounds=1, schedule=text)


def test_sampling_is_by_round_and_seed() -> None:
    plan = FederationPlan(rounds=5, clients=10, sampled=4)
    drawn = [plan.chosen(r) for r in range(5)]
    assert all(len(set(d)) == 4 and max(d) < 10 for d in drawn)
    assert len({tuple(d) for d in drawn}) > 1
    assert drawn == [FederationPlan(rounds=9, clients=10, sampled=4).chosen(r) for r in range(5)]
    assert FederationPlan(rounds=1, clients=3).chosen(0) == [0, 1, 2]


def test_milestones_multiply_at_their_rounds() -> None:
    factors = [schedule("milestones:at=2/4").factor(r) for r in range(6)]
    assert factors == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
