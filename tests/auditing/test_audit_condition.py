"""`--fail-if`: what it can say, and that it runs nothing."""

from __future__ import annotations

import pytest

from gradveil.auditing.condition import CheckedCondition, Condition
from gradveil.core.errors import UserError
from gradveil.core.results import Rate, Statistic
from gradveil.summary import DefenseRow, LeakTest, UtilityRow, Worst

DEFENSE = DefenseRow(
    spec="prune",
    stage=("update",),
    counter=(),
    scope="",
    verdict="leaks",
    test=LeakTest(
        statistic=9.0,
        null_mean=2.0,
        p=0.001,
        level=0.05,
        draws=999,
        strangers=40,
        untested=0,
        smallest_p=0.001,
        control_rate=1.0,
        control_null=0.02,
        power=1.0,
        detectable=0.2,
    ),
    warnings=(),
    utility=None,
    gradient=None,
    attacks=(),
    worst=Worst(
        ssim=Statistic(mean=0.2, std=0.1, min=0.1, max=0.7),
        asr=0.5,
        identified=Rate(rate=0.5, low=0.1, high=0.9, chance=0.01),
        attacks=1,
        by_victim=(),
    ),
)


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
        ("test.p <= 0.01 and test.detectable <= 0.25", True),
        ("test.control_rate < 0.5", False),
        ("worst.identified.low > worst.identified.chance", True),
        ("verdict == 'leaks' or utility.pdm > 5", True),  # whatever the cost is
        ("utility.pdm > 5 or verdict == 'leaks'", True),
        ("utility.pdm > 5 and spec == 'none'", False),
        ("utility.pdm > 5", None),
        ("not utility.pdm > 5", None),
        ("1 < utility.pdm < 5", None),
        ("utility.pdm > 5 and verdict == 'leaks'", None),
        ("utility.pdm > 5 or verdict != 'leaks'", None),
    ],
)
def test_what_it_says(text, holds):
    assert Condition(text).holds(DEFENSE) is holds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("worst.sim.max > 0.6", "did you mean 'worst.ssim.max'"),
        ("wurst.ssim.max > 0.6", "did you mean 'worst.ssim.max'"),
        ("worst.ssim > 0.6", "has parts: mean"),
        ("worst.ssim.max", "no condition"),
        ("worst.ssim.max >", "write for instance"),
        ("", "write for instance"),
        ("verdict > 3", "different kinds"),
        ("worst.asr is 1", "cannot be compared"),
        ("attacks.psnr.mean > 1", "no field"),  # of many rows: which?
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


def test_every_number_and_text_of_a_defense_can_be_asked_for():
    wanted = {f"worst.{metric}.{part}" for metric in ("psnr", "ssim", "mse", "lpips") for part in Statistic.model_fields}
    wanted |= {f"worst.identified.{part}" for part in Rate.model_fields}
    wanted |= {f"utility.{part}" for part in UtilityRow.model_fields if part not in ("model", "scope", "tried")}
    wanted |= {
        "worst.asr",
        "worst.attacks",
        "test.p",
        "test.detectable",
        "gradient.cosine",
        "gradient.noise_ratio",
        "worst.scored",
    }
    for field in sorted(wanted):
        assert Condition(f"{field} > 0").fields == {field}
    for field in ("spec", "verdict", "utility.model", "utility.scope"):
        assert Condition(f"{field} == ''").fields == {field}
    for field in ("stage", "counter", "claimed"):
        assert Condition(f"'' in {field}").fields == {field}


def test_what_was_not_measured_is_named_for_each_defense():
    bare = DEFENSE.model_copy(update={"spec": "bare", "worst": None})
    checked = Condition("worst.ssim.max > 0.6 and test.p < 0.1").check([DEFENSE, bare])
    assert checked.holds == ("prune",) and checked.missing == {"bare": ("worst.ssim.max",)}
    assert Condition("worst.asr > 2").check([DEFENSE]) == CheckedCondition("worst.asr > 2")
