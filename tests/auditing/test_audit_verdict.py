"""The verdict, from cells made by hand: what counts as a leak, and what is said where little is known."""

from __future__ import annotations

import pytest

from gradveil.auditing.case import Case
from gradveil.auditing.plan import make_plan
from gradveil.auditing.spec import make_spec
from gradveil.auditing.verdict import judge
from gradveil.core.results import ImageScores, Rate, ScoreRow
from gradveil.storage.run_folder import Outcome, StoredCell
from gradveil.summary import DefenseRow, Summary


@pytest.fixture
def case(digits):
    return Case(make_spec({"data": digits, "defenses": ["gaussian", "clip"], "attacks": ["ig", "ig:tv=0"]}))


def image(victim: int, identified: bool = False, ssim: float = 0.1, psnr: float = 8.0) -> ImageScores:
    scores = {"psnr": psnr, "ssim": ssim, "mse": 0.1, "lpips": None}
    rank = 1 + (not identified)
    return ImageScores(victim=victim, image=0, **scores, identified=identified, rank=rank, failed=False)


def attacked(images: list[ImageScores], chance: float = 0.001) -> Outcome:
    rate = sum(bool(i.identified) for i in images) / len(images)
    identified = Rate(rate=rate, low=0.2 if rate > 0.4 else 0.0, high=1.0, chance=chance)
    row = ScoreRow(scored=len(images), identified=identified)
    return Outcome(rows=(row,), victims=tuple(images), seconds=1.0, iterations=1, granted=("batch size 1",))


def summary_of(case: Case, **by_defense: dict[str, Outcome]) -> Summary:
    """A summary where each defense's attacks gave what is named; the others gave nothing."""
    plan, cells = make_plan(case), {}
    for cell in plan:
        outcome = Outcome(rows=(ScoreRow(),))
        if cell.kind == "attack":
            outcome = by_defense.get(cell.defense, {}).get(cell.attack) or attacked([image(v) for v in range(8)])
        names = {"key": cell.key, "kind": cell.kind, "defense": cell.defense, "attack": cell.attack}
        cells[cell.key] = StoredCell(**names, **dict(outcome), tensors=None)
    return judge(case, plan, cells)


def row_of(case: Case, defense: str, **by_defense: dict[str, Outcome]) -> DefenseRow:
    return next(d for d in summary_of(case, **by_defense).defenses if d.spec == defense)


ALL = attacked([image(v, True, 0.9, 30.0) for v in range(8)])


def test_identified_above_chance_is_a_leak_and_nothing_identified_is_none(case):
    none, gaussian, _ = summary_of(case, none={"ig": ALL}).defenses
    assert none.verdict == "leaks"
    assert gaussian.verdict == "unrefuted"  # no counter of it was among the attacks
    assert none.worst.identified.rate == 1.0
    assert none.worst.asr == 1.0 and none.worst.recognised == 8


def test_chance_is_multiplied_by_the_attacks_of_which_the_worst_is_taken(case):
    assert row_of(case, "gaussian").worst.identified.chance == pytest.approx(0.002)


def test_worst_takes_of_every_image_what_got_most_identified_before_likeness(case):
    first = [image(0, True, 0.2, 9.0), image(1, False, 0.5, 12.0)]
    other = [image(0, False, 0.8, 20.0), image(1, False, 0.5, 13.0)]
    worst = row_of(case, "none", none={"ig": attacked(first), "ig:tv=0": attacked(other)}).worst
    assert [v.attack for v in worst.by_victim] == ["ig", "ig:tv=0"]
    assert worst.psnr.mean == pytest.approx((9.0 + 13.0) / 2)
    assert worst.psnr.std == pytest.approx(2.0)
    assert worst.identified.rate == 0.5


def test_one_identified_and_recognisable_image_is_a_leak_whatever_the_chance(case):
    rest = [image(v) for v in range(1, 8)]
    few = attacked([image(0, True, 0.7), *rest], chance=0.5)
    assert row_of(case, "clip", clip={"ig": few}).verdict == "leaks"
    unlike = attacked([image(0, True, 0.5), *rest], chance=0.5)
    assert row_of(case, "clip", clip={"ig": unlike}).verdict == "unrefuted"
    alike = attacked([image(0, False, 0.9), *rest])  # likeness without identity is no ground
    assert row_of(case, "clip", clip={"ig": alike}).verdict == "unrefuted"


def test_a_counter_that_ran_and_failed_makes_it_no_leak_shown(case, monkeypatch):
    monkeypatch.setattr(type(case.defenses["gaussian"]), "counters", ("ig",))
    held = row_of(case, "gaussian", none={"ig": ALL})
    assert held.verdict == "no leak shown"
    assert [a.adaptive for a in held.attacks] == [True, True]
    refused = Outcome(status="not applicable", error="no")
    plain = row_of(case, "gaussian", none={"ig": ALL}, gaussian={"ig": refused, "ig:tv=0": refused})
    assert plain.verdict is None and plain.worst is None  # nothing ran: nothing is known
    assert plain.attacks[0].status == "not applicable" and plain.attacks[0].psnr is None


def test_warnings_say_what_makes_the_evidence_weak(case):
    failed = Outcome(status="failed", error="it broke", traceback="…")
    summary = summary_of(case, none={"ig": ALL}, clip={"ig": failed})
    _, gaussian, clip = summary.defenses
    assert any("ig:tv=0 did not succeed either" in w for w in summary.warnings)
    assert any("single draw" in w for w in gaussian.warnings)
    assert any("failed: ig" in w for w in clip.warnings)
    assert clip.attacks[0].error == "it broke"
    assert "safe" not in str(summary)


def test_where_the_control_does_not_leak_nothing_is_shown_about_a_defense(case, monkeypatch):
    monkeypatch.setattr(type(case.defenses["gaussian"]), "counters", ("ig",))
    summary = summary_of(case)
    assert [d.verdict for d in summary.defenses] == ["unrefuted", "unrefuted", "unrefuted"]
    assert "too weak to say anything" in summary.warnings[0]


def test_an_adversary_that_is_granted_more_is_said(digits):
    case = Case(make_spec({"data": digits, "defenses": "none", "attacks": "ig", "knowledge": "paper"}))
    assert any("level paper" in w for w in summary_of(case).warnings)
