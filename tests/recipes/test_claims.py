"""Claims: three answers, by the figures and their spread."""

from __future__ import annotations

import pytest

from gradveil.recipes.claims import Claim, Value, of_trainings

ROWS, COLUMNS = ["a", "b", "c"], ["x"]


def judge(claim: dict[str, object], **values: Value) -> str:
    table = {(row, "x"): value for row, value in values.items()}
    return Claim.model_validate({"text": "t", **claim}).judge(table, ROWS, COLUMNS).verdict


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (Value(1.0), Value(2.0), "holds"),
        (Value(2.0), Value(1.0), "does not hold"),
        (Value(1.0), Value(1.0), "cannot be told"),
        (Value.of([2e-8, 3e-8]), Value.of([3e-8, 4e-8]), "cannot be told"),  # apart by rounding alone
        (Value(1.0, 2.0, 4), Value(2.0, 2.0, 4), "cannot be told"),  # 1 apart, standard error √2
        (Value(1.0, 0.2, 4), Value(2.0, 0.2, 4), "holds"),
    ],
)
def test_order(a: Value, b: Value, verdict: str) -> None:
    assert judge({"order": ["a | x", "b | x"]}, a=a, b=b) == verdict


def test_the_same_victims_are_compared_one_by_one() -> None:
    low, high = Value.of([1, 10, 20, 30]), Value.of([2, 11, 21.5, 31])
    assert judge({"order": ["a | x", "b | x"]}, a=low, b=high) == "holds"
    apart = Value(high.mean, high.std, high.n)
    assert judge({"order": ["a | x", "b | x"]}, a=low, b=apart) == "cannot be told"


def test_slack_allows_a_small_fall() -> None:
    values = {"a": Value(90.0), "b": Value(87.0)}
    assert judge({"order": ["a | x", "b | x"], "slack": 5}, **values) == "holds"
    assert judge({"order": ["a | x", "b | x"], "slack": 2}, **values) == "does not hold"


def test_limits_are_met_by_the_mean_and_open_within_the_error() -> None:
    assert judge({"at_least": [0.9, "a | x"]}, a=Value(0.9)) == "holds"
    assert judge({"at_least": [0.9, "a | x"]}, a=Value(0.88, 0.1, 4)) == "cannot be told"
    assert judge({"at_least": [0.9, "a | x"]}, a=Value(0.5, 0.1, 4)) == "does not hold"
    assert judge({"at_most": [0, "a | x", "b | x"]}, a=Value(0.0), b=Value(25.0, 1.0, 4)) == "does not hold"


def test_the_lowest_of_a_column_leaves_out_what_was_not_run() -> None:
    assert judge({"lowest": "a | x"}, a=Value(1.0), b=Value(2.0)) == "holds"
    assert judge({"lowest": "a | x"}, a=Value(1.0), b=Value(2.0), c=Value(0.5)) == "does not hold"
    assert judge({"highest": "a | x", "of": ["b | x"]}, a=Value(3.0), b=Value(2.0), c=Value(9.0)) == "holds"


def test_what_was_not_run_cannot_be_told() -> None:
    assert judge({"order": ["a | x", "b | x"]}, a=Value(1.0)) == "cannot be told"
    assert judge({"lowest": "a | x"}, b=Value(1.0)) == "cannot be told"


def test_a_condition_comes_first() -> None:
    claim = {"at_most": [10, "a | x"], "only_if": {"at_least": [20, "b | x"]}}
    assert judge(claim, a=Value(5.0), b=Value(40.0)) == "holds"
    assert judge(claim, a=Value(5.0), b=Value(9.0)) == "cannot be told"


def test_a_claim_is_of_one_kind() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Claim.model_validate({"text": "t", "lowest": "a | x", "at_most": [1, "a | x"]})


def test_accuracies_are_compared_seed_by_seed_and_one_training_tells_nothing() -> None:
    plain = of_trainings([0.90, 0.80, 0.86, 0.92, 0.84])  # apart by far more than what the defense costs
    defended = of_trainings([0.88, 0.785, 0.841, 0.90, 0.822])
    claim = {"order": ["a | x", "b | x"], "slack": 3}
    assert judge(claim, a=plain, b=defended) == "holds"
    assert judge({**claim, "slack": 1}, a=plain, b=defended) == "does not hold"
    unpaired = Value(defended.mean, defended.std, defended.n)
    assert judge(claim, a=plain, b=unpaired) == "cannot be told"
    assert judge(claim, a=of_trainings([0.9]), b=of_trainings([0.5])) == "cannot be told"
    assert judge({"at_least": [40, "a | x"]}, a=of_trainings([0.5])) == "cannot be told"
