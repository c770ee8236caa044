"""The verdict, from cells made by hand: what counts as a leak, and what is said where little is known."""

from __future__ import annotations

import itertools
import json
from typing import get_args

import numpy as np
import pytest

from gradveil.attacks import Answer, Attack, Target
from gradveil.auditing import verdict as verdicts
from gradveil.auditing.case import Case
from gradveil.auditing.plan import expected_power, make_plan
from gradveil.auditing.spec import make_spec
from gradveil.auditing.verdict import judge
from gradveil.core.errors import UserError
from gradveil.core.results import ImageScores, Rate, ScoreRow
from gradveil.defenses.update.clip import Clip
from gradveil.storage.run_folder import Outcome, StoredCell
from gradveil.summary import DefenseRow, Notice, NoticeCode, Summary, Verdict

NOISE = 0.3  # largest likeness of an image that the answers hold nothing of
NEAREST = 0.35  # of the most similar distractor


def make(data, **values) -> Case:
    defenses = {"defenses": ["gaussian", "clip"], "attacks": ["ig", "ig:tv=0"]}
    return Case(make_spec({"data": data, **defenses, **values}))


@pytest.fixture
def case(digits):
    return make(digits)


def attacked(case: Case, leaks: dict[int, float] | None = None, ssim: float = 0.1, psnr: float = 8.0, seed: int = 0) -> Outcome:
    """An attack that rebuilds the victims named in `leaks` with that likeness, and of the others nothing."""
    slots, victims = case.slots, len(case.slots.batch)
    table = np.random.default_rng(seed).uniform(0, NOISE, slots.used.shape)
    for victim, likeness in (leaks or {}).items():
        table[slots.batch[victim], victim] = likeness
    size, images = case.spec.batch_size, []
    for v in range(victims):
        likeness = float(table[slots.batch[v], v])
        scores = {"psnr": psnr, "ssim": ssim, "mse": 0.1, "lpips": None, "failed": False}
        hit = {"identified": likeness > NEAREST, "rank": 1 + (likeness <= NEAREST), "likeness": likeness, "nearest": NEAREST}
        images.append(ImageScores(victim=v // size, image=v % size, **scores, **hit))
    row = ScoreRow(scored=victims, identified=Rate(rate=0.0, low=0.0, high=1.0, chance=0.001))
    likeness = tuple(tuple(row[used].tolist()) for row, used in zip(table, slots.used, strict=True))
    return Outcome(rows=(row,), victims=tuple(images), likeness=likeness, seconds=1.0, iterations=1, granted=("batch size 1",))


def everything(case: Case, likeness: float = 1.0) -> Outcome:
    return attacked(case, dict.fromkeys(range(len(case.slots.batch)), likeness))


def summary_of(case: Case, **by_defense: dict[str, Outcome]) -> Summary:
    """A summary where each defense's attacks and other cells, by their kind, gave what is named; the others nothing."""
    plan, cells = make_plan(case), {}
    for cell in plan:
        outcome = by_defense.get(cell.defense, {}).get(cell.kind) or Outcome(rows=(ScoreRow(),))
        if cell.kind == "attack":
            outcome = by_defense.get(cell.defense, {}).get(cell.attack) or attacked(case)
        names = {"key": cell.key, "kind": cell.kind, "defense": cell.defense, "attack": cell.attack}
        cells[cell.key] = StoredCell(**names, **dict(outcome), tensors=None, tensors_sha256=None)
    return judge(case, plan, cells)


def row_of(case: Case, defense: str, **by_defense: dict[str, Outcome]) -> DefenseRow:
    return next(d for d in summary_of(case, **by_defense).defenses if d.spec == defense)


def codes(notices: tuple[Notice, ...]) -> set[str]:
    return {notice.code for notice in notices}


FAILED = Outcome(status="failed", error="it broke", traceback="…")
REFUSED = Outcome(status="not applicable", error="no")


# -- the test ----------------------------------------------------------------------------------------------------------


def test_more_like_the_victims_than_like_strangers_is_a_leak_and_the_numbers_of_the_test_are_told(case):
    none, gaussian, _ = summary_of(case, none={"ig": everything(case)}).defenses
    assert none.verdict == "leaks" and none.test is not None
    assert none.test.p == 0.001 and none.test.level == 0.05 and none.test.draws == 999
    assert none.test.statistic == pytest.approx(8 * -np.log(1e-4), rel=1e-3)
    assert none.test.null_mean < 3 and none.test.untested == 0 and none.test.strangers == len(case.strangers) == 120
    assert none.worst is not None and none.worst.identified.rate == 1.0 and none.worst.identified.chance == 0.001
    assert gaussian.verdict == "unrefuted"  # no counter of it was among the attacks
    assert gaussian.test.p > 0.05 and gaussian.test.control_rate == 1.0 and gaussian.test.detectable < 0.3


def test_one_perfect_image_of_eight_is_a_leak_and_so_are_many_half_good_ones(case):
    assert row_of(case, "clip", clip={"ig": attacked(case, {3: 0.9999})}).verdict == "leaks"
    assert row_of(case, "clip", clip={"ig": everything(case, 0.34)}).verdict == "leaks"  # nobody is identified


def test_what_only_rescales_updates_gets_the_verdict_of_the_control(case):
    for agreement, leaky, verdict in ((0.9995, True, "leaks"), (0.998, True, "unrefuted"), (0.9995, False, "cannot tell")):
        control = {"ig": everything(case)} if leaky else {}
        row = row_of(case, "clip", none=control, clip={"observe": Outcome(agreement=agreement)})
        assert row.test.p > 0.05 and row.verdict == verdict
        assert ("only-rescaled" in codes(row.warnings)) == (verdict == "leaks")
    shown = row_of(case, "clip", clip={"ig": everything(case), "observe": Outcome(agreement=1.0)})
    assert shown.verdict == "leaks" and "only-rescaled" not in codes(shown.warnings)


def test_ssim_and_chance_hits_do_not_decide(case):
    """Images that all look alike, nearly black ones for instance: every SSIM is high, and one is identified by chance."""
    alike = attacked(case, {0: 0.36}, ssim=0.99, psnr=40.0)
    row = row_of(case, "clip", none={"ig": everything(case)}, clip={"ig": alike, "ig:tv=0": attacked(case, seed=1)})
    assert row.worst.asr > 0.9 and row.worst.identified.rate == pytest.approx(1 / 8)
    assert row.test.p > 0.05 and row.verdict == "unrefuted"


def test_the_maximum_over_attacks_is_taken_for_distractors_and_strangers_too(case):
    weak, strong = attacked(case, {0: 0.4}), attacked(case, {1: 0.99})
    crowded = strong.model_copy(update={"victims": tuple(i.model_copy(update={"nearest": 0.95}) for i in strong.victims)})
    worst = row_of(case, "clip", clip={"ig": weak, "ig:tv=0": crowded}).worst
    assert [bool(v.identified) for v in worst.by_victim] == [False, True] + [False] * 6
    assert worst.identified.rate == 1 / 8


def test_worst_takes_of_every_image_what_got_most(case):
    first, other = attacked(case, {0: 0.9}, 0.2, 9.0), attacked(case, None, 0.8, 20.0)
    worst = row_of(case, "none", none={"ig": first, "ig:tv=0": other}).worst
    assert [v.attack for v in worst.by_victim] == ["ig"] + ["ig:tv=0"] * 7
    assert worst.psnr.mean == pytest.approx((9.0 + 7 * 20.0) / 8)


def test_false_alarms_are_as_rare_as_the_level_says(case, monkeypatch):
    monkeypatch.setattr(verdicts, "detectable", lambda *_: None)
    monkeypatch.setattr(verdicts, "power", lambda *_: 1.0)
    monkeypatch.setattr(verdicts, "needed_for_shares", lambda *_: ())
    alarms, seeds = 0, itertools.count()
    for _ in range(100):
        null = {d: {a: attacked(case, seed=next(seeds)) for a in ("ig", "ig:tv=0")} for d in case.defenses}
        alarms += sum(d.verdict == "leaks" for d in summary_of(case, **null).defenses)
    assert 4 <= alarms <= 28  # of 300: 15 expected, three standard errors


# -- precedence --------------------------------------------------------------------------------------------------------


def test_a_counter_that_ran_and_showed_no_leak_makes_it_no_leak_shown(digits):
    case = make(digits, attacks=["ig", "noise-likelihood"])
    held = row_of(case, "gaussian", none={"ig": everything(case)})
    assert held.verdict == "no leak shown" and held.counter == ("noise-likelihood",) and held.claimed == ()
    assert [(a.spec, a.adaptive, a.claimed) for a in held.attacks] == [("ig", False, False), ("noise-likelihood", True, False)]
    assert row_of(case, "clip", none={"ig": everything(case)}).verdict == "unrefuted"  # it is no counter of clipping
    refused = {"none": {"ig": everything(case)}, "gaussian": {"noise-likelihood": REFUSED}}
    assert row_of(case, "gaussian", **refused).verdict == "unrefuted"


@pytest.mark.parametrize("name", ["OtherTensors", "OtherClip", "OtherParts", "OtherClip+clip", "clip+audit_methods:OtherClip"])
def test_what_an_author_calls_a_counter_never_suffices(digits, name):
    spec = name if name.startswith("clip") else f"audit_methods:{name}"
    case = make(digits, defenses=[spec], attacks=["linear", "swift", "clip-aware", "audit_methods:ReadsOthers"])
    row = row_of(case, spec, none={"linear": everything(case)})
    assert row.verdict == "unrefuted"
    assert row.counter == (("clip-aware",) if "+" in name else ())
    claimed = {"OtherTensors": {"linear", "audit_methods:ReadsOthers"}, "OtherParts": {"swift"}}.get(name, set())
    assert set(row.claimed) == {a.spec for a in row.attacks if a.claimed} == claimed
    assert ("claimed-counter" in codes(row.warnings)) == bool(claimed)
    assert [a.spec for a in row.attacks if a.adaptive] == list(row.counter)
    (unknown,) = [w.text for w in row.warnings if w.code == "unknown-counter"] or [""]
    assert ("audit_methods:Nothing" in unknown) == (name == "OtherTensors")


def test_an_attack_that_calls_itself_a_counter_is_none(digits):
    class Namesake(Attack):
        """Has nothing to do with clipping."""

        name = "clip-aware"
        against = (Clip,)

        def run(self, target: Target) -> Answer:
            raise AssertionError

    with pytest.raises(UserError, match="'clip-aware' is not the class"):
        make(digits, defenses=["clip"], attacks=["ig", Namesake()])
    Namesake.name = "namesake"
    for attack, verdict in ((Namesake(), "unrefuted"), ("clip-aware", "no leak shown")):
        case = make(digits, defenses=["clip"], attacks=["ig", attack])
        row = row_of(case, "clip", none={"ig": everything(case)})
        assert row.verdict == verdict and row.counter == ("clip-aware",)
        assert [a.adaptive for a in row.attacks] == [False, verdict == "no leak shown"]


def test_every_part_needs_a_counter_that_ran(digits):
    for attacks, verdict in (
        (["clip-aware"], "unrefuted"),
        (["noise-likelihood"], "unrefuted"),
        (["clip-aware", "noise-likelihood:steps=9"], "no leak shown"),
    ):
        case = make(digits, defenses=["clip+gaussian+none"], attacks=["ig", *attacks])
        assert row_of(case, "clip+gaussian+none", none={"ig": everything(case)}).verdict == verdict


def test_where_nothing_ran_it_cannot_tell(case):
    plain = row_of(case, "gaussian", none={"ig": everything(case)}, gaussian={"ig": REFUSED, "ig:tv=0": REFUSED})
    assert plain.verdict == "cannot tell" and plain.worst is None and plain.test is None
    assert "no-attack-ran" in codes(plain.warnings)
    assert plain.attacks[0].status == "not applicable" and plain.attacks[0].psnr is None


def test_where_the_control_does_not_leak_it_cannot_tell_but_a_leak_is_a_leak(digits):
    case = make(digits, attacks=["ig", "noise-likelihood"])
    summary = summary_of(case, clip={"ig": everything(case)})
    assert [d.verdict for d in summary.defenses] == ["cannot tell", "cannot tell", "leaks"]
    assert codes(summary.warnings) == {"control-does-not-leak"}


def test_a_control_that_leaks_little_licenses_nothing(case):
    some = dict.fromkeys(range(3), 0.9999)
    summary = summary_of(case, none={"ig": attacked(case, some)})
    assert [d.verdict for d in summary.defenses] == ["leaks", "cannot tell", "cannot tell"]
    assert summary.defenses[1].test.control_rate == 3 / 8
    assert "control-leaks-little" in codes(summary.warnings)
    half = summary_of(case, none={"ig": attacked(case, dict.fromkeys(range(6), 0.9999))})
    assert [d.verdict for d in half.defenses] == ["leaks", "unrefuted", "unrefuted"]


def test_with_too_few_victims_it_cannot_tell(digits):
    for victims, verdict in ((2, "cannot tell"), (3, "unrefuted")):
        case = make(digits, victims=victims)
        row = row_of(case, "clip", none={"ig": everything(case)})
        assert row.verdict == verdict, victims
        assert ("few-victims" in codes(row.warnings)) == (victims == 2)
        assert row.test.power == pytest.approx(1 - 0.5**victims, abs=0.1)  # one of them leaks, each with probability 1/2


def test_an_attack_that_worked_on_the_control_and_failed_here_leaves_it_open(case):
    control = {"none": {"ig": everything(case)}}
    row = row_of(case, "clip", **control, clip={"ig": FAILED})
    assert row.verdict == "cannot tell" and "attacks-failed" in codes(row.warnings)
    assert row_of(case, "clip", **control, clip={"ig": FAILED, "ig:tv=0": everything(case)}).verdict == "leaks"
    assert row_of(case, "clip", **control, clip={"ig": REFUSED}).verdict == "unrefuted"  # the others ran


def test_untested_victims_are_counted_and_without_strangers_it_cannot_tell(shapes):
    case = make(shapes, victims=30, batch_size=2)  # all 60 private images
    summary = summary_of(case, none={"ig": everything(case)})
    assert [d.verdict for d in summary.defenses] == ["cannot tell"] * 3
    assert summary.defenses[0].test.untested == 60 and summary.defenses[0].test.p == 1.0
    assert {"few-strangers", "untested-victims"} <= codes(summary.warnings)
    assert summary.victims_needed[0].victims is None


def test_few_images_per_class_are_enough_where_classes_are_many(tmp_path):
    """As with portraits of forty people: four private images of each."""
    images = np.random.default_rng(0).random((400, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "faces.npz", images=images, labels=np.arange(400) % 40)
    case = make(str(tmp_path / "faces.npz"))
    assert len(case.strangers) == 24 and case.slots.smallest_p == pytest.approx(0.001)
    assert row_of(case, "none", none={"ig": everything(case)}).verdict == "leaks"
    assert row_of(case, "clip", none={"ig": everything(case)}).verdict == "unrefuted"
    share, needed = expected_power(case)
    assert 0.1 < share < 0.5 and [n.share for n in needed] == [0.1, 0.25, 0.5]


# -- what is said ------------------------------------------------------------------------------------------------------


def test_warnings_say_what_makes_the_evidence_weak(case):
    summary = summary_of(case, none={"ig": everything(case)}, clip={"ig": FAILED})
    _, gaussian, clip = summary.defenses
    (weak,) = [w.text for w in summary.warnings if w.code == "weak-attacks"]
    assert weak.startswith("ig:tv=0 does not show the leak")
    assert "single-draw" in codes(gaussian.warnings)
    assert any("failed: ig" in w.text for w in clip.warnings)
    assert clip.attacks[0].error == "it broke"
    assert "safe" not in str(summary)


def test_an_adversary_that_is_granted_more_is_said(digits):
    case = make(digits, defenses="none", attacks="ig", knowledge="paper")
    assert any("level paper" in w.text for w in summary_of(case).warnings)


def test_the_victims_that_are_needed_are_told_before_and_after_the_run(case):
    after = summary_of(case, none={"ig": everything(case)}).victims_needed
    share, before = expected_power(case)
    assert [n.share for n in after] == [n.share for n in before] == [0.1, 0.25, 0.5]
    for needed in (after, before):
        counts = [n.victims for n in needed]
        assert 13 <= counts[0] <= 20 and 5 <= counts[1] <= 8 and counts[2] in (3, 4)
    assert 0.15 <= share <= 0.25  # 1 − 0.2^(1/8) is 0.18


def test_cells_of_another_audit_are_refused_in_one_line(case):
    short = everything(case).model_copy(update={"likeness": ((0.1, 0.2),)})
    with pytest.raises(UserError, match="delete it and resume"):
        summary_of(case, none={"ig": short})


def test_codes_and_verdicts_are_texts_of_the_schema():
    schema = json.dumps(Summary.model_json_schema())
    assert all(json.dumps(text) in schema for text in (*get_args(Verdict), *get_args(NoticeCode)))


def test_a_model_that_learnt_nothing_under_a_defense_is_told(digits):
    case = make(digits, trained_epochs=1)
    for accuracy, told in ((0.12, True), (0.9, False), (None, False)):
        row = row_of(case, "clip", clip={"train": Outcome(history={"acc_test": (accuracy,)})})
        assert ("learnt-nothing" in codes(row.warnings)) == told
    assert "learnt-nothing" not in codes(
        row_of(case, "gaussian", clip={"train": Outcome(history={"acc_test": (0.1,)})}).warnings
    )
