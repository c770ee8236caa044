"""The verdict, from cells made by hand: what counts as a leak, and what is said where little is known."""

from __future__ import annotations

import pytest

from gradveil.auditing.case import Case
from gradveil.auditing.plan import make_plan
from gradveil.auditing.spec import make_spec
from gradveil.auditing.verdict import judge


@pytest.fixture
def case(digits):
    return Case(make_spec({"data": digits, "defenses": ["gaussian", "clip"], "attacks": ["ig", "ig:tv=0"]}))


def image(victim: int, identified: bool = False, ssim: float = 0.1, psnr: float = 8.0) -> dict:
    scores = {"psnr": psnr, "ssim": ssim, "mse": 0.1, "lpips": None}
    return {
        "victim": victim,
        "image": 0,
        **scores,
        "identified": identified,
        "rank": 1 + (not identified),
        "failed": False,
    }


def attacked(attack: str, images: list[dict], chance: float = 0.001, **more) -> dict:
    rate = sum(i["identified"] for i in images) / len(images)
    row = {"against": "original", "scored": len(images), "failed": 0}
    row["identified"] = {"rate": rate, "low": 0.2 if rate > 0.4 else 0.0, "high": 1.0, "chance": chance}
    found = {"attack": attack, "status": "ok", "error": None, "rows": [row], "victims": images, "seconds": 1.0}
    return {**found, "iterations": 1, "granted": ["batch size 1"], **more}


def summary_of(case, **by_defense) -> dict:
    """A summary where each defense's attacks gave what is named; the others gave nothing."""
    plan, outcomes = make_plan(case), {}
    for cell in plan:
        if cell.kind == "attack":
            images = by_defense.get(cell.defense, {}).get(cell.attack, [image(v) for v in range(8)])
            outcomes[cell.key] = images if isinstance(images, dict) else attacked(cell.attack, images)
        else:
            outcomes[cell.key] = {"status": "ok", "error": None, "rows": [{"against": "original", "psnr": {}}]}
    found = judge(case, plan, outcomes)
    return {**found, "by": {d["spec"]: d for d in found["defenses"]}}


ALL = [image(v, True, 0.9, 30.0) for v in range(8)]


def test_identified_above_chance_is_a_leak_and_nothing_identified_is_none(case):
    by = summary_of(case, none={"ig": ALL})["by"]
    assert by["none"]["verdict"] == "leaks"
    assert by["gaussian"]["verdict"] == "unrefuted"  # no counter of it was among the attacks
    assert by["none"]["worst"]["identified"]["rate"] == 1.0
    assert by["none"]["worst"]["asr"] == 1.0


def test_chance_is_multiplied_by_the_attacks_of_which_the_worst_is_taken(case):
    found = summary_of(case)["by"]["gaussian"]["worst"]["identified"]
    assert found["chance"] == pytest.approx(0.002)


def test_worst_takes_of_every_image_what_got_most_identified_before_likeness(case):
    first = [image(0, True, 0.2, 9.0), image(1, False, 0.5, 12.0)]
    other = [image(0, False, 0.8, 20.0), image(1, False, 0.5, 13.0)]
    worst = summary_of(case, none={"ig": first, "ig:tv=0": other})["by"]["none"]["worst"]
    assert [v["attack"] for v in worst["by_victim"]] == ["ig", "ig:tv=0"]
    assert worst["psnr"]["mean"] == pytest.approx((9.0 + 13.0) / 2)
    assert worst["psnr"]["std"] == pytest.approx(2.0)
    assert worst["identified"]["rate"] == 0.5


def test_one_identified_and_recognisable_image_is_a_leak_whatever_the_chance(case):
    few = [attacked("ig", [image(0, True, 0.7), *(image(v) for v in range(1, 8))], chance=0.5)]
    assert summary_of(case, clip={"ig": few[0]})["by"]["clip"]["verdict"] == "leaks"
    unlike = [attacked("ig", [image(0, True, 0.5), *(image(v) for v in range(1, 8))], chance=0.5)]
    assert summary_of(case, clip={"ig": unlike[0]})["by"]["clip"]["verdict"] == "unrefuted"
    alike = [image(0, False, 0.9), *(image(v) for v in range(1, 8))]  # likeness without identity is no ground
    assert summary_of(case, clip={"ig": alike})["by"]["clip"]["verdict"] == "unrefuted"


def test_a_counter_that_ran_and_failed_makes_it_no_leak_shown(case, monkeypatch):
    monkeypatch.setattr(type(case.defenses["gaussian"]), "counters", ("ig",))
    found = summary_of(case, none={"ig": ALL})["by"]["gaussian"]
    assert found["verdict"] == "no leak shown"
    assert [a["adaptive"] for a in found["attacks"]] == [True, True]
    refused = {"attack": "ig", "status": "not applicable", "error": "no"}
    both = {"ig": refused, "ig:tv=0": {**refused, "attack": "ig:tv=0"}}
    plain = summary_of(case, none={"ig": ALL}, gaussian=both)["by"]["gaussian"]
    assert plain["verdict"] is None and plain["worst"] is None  # nothing ran: nothing is known
    assert plain["attacks"][0]["status"] == "not applicable" and plain["attacks"][0]["psnr"] is None


def test_warnings_say_what_makes_the_evidence_weak(case):
    failed = {"attack": "ig", "status": "failed", "error": "it broke", "traceback": "…"}
    found = summary_of(case, none={"ig": ALL}, clip={"ig": failed})
    assert any("ig:tv=0 did not succeed either" in w for w in found["warnings"])
    assert any("single draw" in w for w in found["by"]["gaussian"]["warnings"])
    assert any("failed: ig" in w for w in found["by"]["clip"]["warnings"])
    assert found["by"]["clip"]["attacks"][0]["error"] == "it broke"
    assert "safe" not in str(found)


def test_an_adversary_that_is_granted_more_is_said(digits):
    case = Case(make_spec({"data": digits, "defenses": "none", "attacks": "ig", "knowledge": "paper"}))
    assert any("level paper" in w for w in summary_of(case)["warnings"])
