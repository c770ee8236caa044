"""`--fail-if`: what it can say, and that it runs nothing."""

from __future__ import annotations

import pytest

from gradveil.auditing.condition import Condition
from gradveil.core.errors import UserError

DEFENSE = {
    "spec": "prune",
    "verdict": "leaks",
    "stage": ["update"],
    "utility": None,
    "worst": {"ssim": {"max": 0.7, "mean": 0.2}, "asr": 0.5, "identified": {"low": 0.1, "chance": 0.01}},
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("worst.ssim.max > 0.6", True),
        ("worst.ssim.max > 0.8", False),
        ("0.6 < worst.ssim.max <= 0.7", True),
        ("worst.ssim.mean > -1", True),
        ("verdict == 'leaks' and spec != 'none'", True),
        ("not (verdict == 'leaks' or worst.asr > 1)", False),
        ("'update' in stage", True),
        ("'model' not in stage", True),
        ("worst.identified.low > worst.identified.chance", True),
        ("verdict == 'leaks' or utility.pdm > 5", True),  # the rest is not looked at
    ],
)
def test_what_it_says(text, holds):
    assert Condition(text).holds(DEFENSE) is holds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("worst.sim.max > 0.6", "did you mean 'worst.ssim'"),
        ("wurst.ssim.max > 0.6", "did you mean 'worst'"),
        ("worst.ssim > 0.6", "has parts: mean"),
        ("worst.ssim.max", "no condition"),
        ("worst.ssim.max >", "write for instance"),
        ("", "write for instance"),
        ("verdict > 3", "different kinds"),
        ("worst.asr is 1", "cannot be compared"),
        ("__import__('os').getcwd() == ''", "neither a number"),
        ("spec.__class__ == ''", "no field"),
        ("worst.asr == [x for x in stage]", "neither a number"),
        ("(lambda: 1) == 1", "neither a number"),
        ("not " * 5000 + "worst.asr > 1", "write for instance"),
    ],
)
def test_what_it_refuses(text, says):
    with pytest.raises(UserError, match="--fail-if") as error:
        Condition(text)
    assert says in str(error.value)


def test_what_was_not_measured_cannot_be_checked_and_does_not_pass_silently():
    with pytest.raises(UserError, match=r"utility\.pdm was not measured for prune"):
        Condition("utility.pdm > 5").holds(DEFENSE)
