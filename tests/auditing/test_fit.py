"""The audit that fits in a number of minutes, and what happens when it does not."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from gradveil.attacks.base import Answer, Attack, Target
from gradveil.auditing import fit as fitting
from gradveil.auditing.case import Case
from gradveil.auditing.estimate import CellTime, Estimate
from gradveil.auditing.fit import LEAST_STEPS, MOST_STEPS, RESERVE, START, Fit, Fitted, Settings, fit
from gradveil.auditing.limits import Execution
from gradveil.auditing.plan import Cell, make_plan
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.core.errors import UserError
from gradveil.core.settings import settings
from gradveil.report.words import cost
from gradveil.storage.run_folder import RunFolder

SECONDS = {"linear": 1.0, "rgap": 1.0, "swift": 40.0, "layer-subsets": 60.0, "expectation": 80.0, "inverter": 20.0}
COUNTERS = {"prune-mask": 30.0}


def case(**changes: object) -> Case:
    torch.manual_seed(0)
    x, y = torch.rand(200, 1, 6, 6), torch.arange(200) % 2
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Sigmoid(), nn.Linear(8, 2))
    settings = {"victims": 16, "defenses": ["prune:ratio=0.5"], "line_up": 0, **changes}
    return Case(make_spec({"data": (x, y), "model": model, **settings}))


@pytest.fixture
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell takes a time that is known, half of it whatever the number of victims; two attacks do not apply."""

    def seconds(self: Estimate, cell: Cell) -> CellTime:
        work = {**SECONDS, **COUNTERS, "utility": 100.0, "line-up": 10.0}.get(cell.attack or cell.kind, 0.0)
        return CellTime(work, work, "not here" if cell.attack in ("linear", "patch-span") else None, work / 2)

    monkeypatch.setattr(Estimate, "cell", seconds)
    monkeypatch.setattr(fitting, "expected_power", lambda case: (None, ()))


@pytest.mark.usefixtures("known_times")
def test_what_does_not_fit_is_left_out_in_the_stated_order() -> None:
    tried = Fit(case(utility=True), 1)
    tried.slowness = 1.0
    everything = Settings(16)
    # Under two defenses: accuracies 200, closed forms 4, swift 80, the counter of one of them 30.
    assert tried.seconds(everything) == START + 314
    assert tried.choose(START + 314) == everything
    assert tried.choose(START + 313) == Settings(16, utility=False)
    assert tried.choose(START + 113) == Settings(15, utility=False)
    assert tried.choose(START + 90) == Settings(9, utility=False)
    without_counter = Settings(4, frozenset({"prune-mask"}), utility=False)
    assert tried.choose(START + 60) == without_counter
    assert tried.choose(START + 20) == Settings(4, frozenset({"prune-mask", "swift"}), utility=False)
    assert tried.choose(START + 1) == pytest.approx(START + 2.5)  # closed forms stay


@pytest.mark.usefixtures("known_times")
def test_the_line_up_goes_after_victims_and_that_is_a_setting_and_said() -> None:
    tried = Fit(case(line_up=50), 1)
    tried.slowness = 1.0
    # Under two defenses: closed forms 4, swift 80, the counter of one of them 30, the line-ups 20.
    assert tried.choose(START + 134) == Settings(16)
    assert tried.choose(START + 133) == Settings(15)
    assert tried.choose(START + 134 * 0.625) == Settings(4)
    assert tried.choose(START + 134 * 0.625 - 1) == Settings(4, line_up=False)
    fitted = fit(case(line_up=50, budget="quick"), 2, 1, time.monotonic() + (START + 75) / (1 - RESERVE))
    assert fitted.case.spec.line_up == 0 and "left out: the line-up; expected" in fitted.note
    assert "line-up" not in {cell.kind for cell in make_plan(fitted.case)}


@pytest.mark.usefixtures("known_times")
def test_the_line_up_comes_before_many_steps_of_a_short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fit, "applies", lambda self, attack: attack == "swift")
    monkeypatch.setitem(SECONDS, "swift", 5_000.0)
    tried = Fit(case(line_up=50), 1)
    tried.slowness = 1.0
    shorter = tried.choose(START + 300)
    assert isinstance(shorter, Settings) and shorter.line_up and "swift" in shorter.without
    assert shorter.steps >= LEAST_STEPS and START + 290 < tried.seconds(shorter) <= START + 300
    enough = tried.seconds(replace(shorter, steps=LEAST_STEPS))
    assert tried.choose(enough - 1) == replace(
        shorter, line_up=False, steps=tried._steps_within(enough - 1, replace(shorter, line_up=False))
    )


@pytest.mark.usefixtures("known_times")
def test_the_accuracy_comes_back_where_there_is_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, "swift", 500.0)
    tried = Fit(case(utility=True), 1)
    tried.slowness = 1.0
    assert tried.choose(START + 300) == Settings(4, frozenset({"prune-mask", "swift"}), utility=True)
    assert tried.choose(START + 100) == Settings(4, frozenset({"prune-mask", "swift"}), utility=False)


@pytest.mark.usefixtures("known_times")
def test_where_no_closed_form_applies_a_few_steps_take_the_place_of_swift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fit, "applies", lambda self, attack: attack == "swift")
    tried = Fit(case(attacks=["standard", "prune-mask"]), 1)  # attacks that were named stay
    tried.slowness = 1.0
    whole = START + (84 + 60) * (0.5 + 0.5 * 4 / 16)
    assert tried.choose(whole) == Settings(4)
    shorter = tried.choose(whole - 1)
    assert isinstance(shorter, Settings) and shorter.without == {"swift"} and LEAST_STEPS <= shorter.steps <= MOST_STEPS
    assert tried.seconds(shorter) <= whole - 1
    least = tried.choose(1.0)
    assert isinstance(least, float) and least == tried.seconds(replace(shorter, steps=LEAST_STEPS))
    named = Fit(case(attacks=["standard", "swift"]), 1)
    named.slowness = 1.0
    assert isinstance(named.choose(START + 50), float)


@pytest.mark.usefixtures("known_times")
def test_the_steps_that_fit_are_an_attack_of_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fit, "applies", lambda self, attack: attack == "swift")
    fitted = fit(case(budget="quick"), 1, 1, time.monotonic() + (START + 30) / (1 - RESERVE))
    chosen, text = fitted.case, fitted.note
    (short,) = [a for a in chosen.spec.attacks if str(a).startswith("ig:steps=")]
    assert "swift" in chosen.spec.without and "in place of swift" in text
    assert {cell.attack for cell in make_plan(chosen)} >= {short, "linear"}


@pytest.mark.usefixtures("known_times")
def test_a_shorter_inversion_of_features_comes_before_another_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fit, "applies", lambda self, attack: attack in ("swift", "features"))
    monkeypatch.setitem(SECONDS, "features", 60.0)
    fitted = fit(case(budget="quick"), 1, 1, time.monotonic() + (START + 40) / (1 - RESERVE))
    (short,) = [a for a in fitted.case.spec.attacks if str(a).startswith("features:steps=")]
    assert set(fitted.case.spec.without) == {"prune-mask", "swift", "features"}
    assert "in place of features" in fitted.note and short in {cell.attack for cell in make_plan(fitted.case)}


@pytest.mark.usefixtures("known_times")
def test_what_was_chosen_is_a_setting_and_is_said() -> None:
    fitted = fit(case(budget="quick"), 1, 1, time.monotonic() + (START + 56) / (1 - RESERVE))
    chosen, text = fitted.case, fitted.note
    assert chosen.spec.without == ("prune-mask",) and chosen.spec.victims == 4
    assert "--minutes 1: 4 of 16 victims, budget quick; left out: prune-mask; expected to take" in text
    assert "prune-mask" not in {cell.attack for cell in make_plan(chosen)}


@pytest.mark.usefixtures("known_times")
def test_too_few_minutes_are_refused_with_those_that_suffice_planning_included(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--minutes 0.1 is too little: the smallest useful audit takes about 1"):
        fit(case(), 0.1, 1, time.monotonic() + 6)
    # Nearly five minutes went into planning, so five are too few.
    late = time.monotonic() + 10
    with pytest.raises(UserError, match=r"--minutes 5 is too little: the smallest useful audit takes about 6\b"):
        fit(case(), 5, 1, late)
    plain = Fit.__init__

    def busy(self: Fit, *settings: object) -> None:
        plain(self, *settings)  # type: ignore[arg-type]
        self.slowness = 3.0

    monkeypatch.setattr(Fit, "__init__", busy)
    with pytest.raises(UserError, match=r"takes about \d+, as other work slows this machine down 3.0 times"):
        fit(case(), 0.1, 1, time.monotonic() + 6)


@pytest.mark.usefixtures("known_times")
def test_the_time_of_an_accuracy_that_is_left_out_is_said() -> None:
    fitted = fit(case(utility={"rounds": 9}), 5, 1, time.monotonic() + (START + 200) / (1 - RESERVE))
    chosen, text = fitted.case, fitted.note
    assert fitted.left_out == {"utility": 200.0} and not chosen.spec.without
    assert "left out: the accuracy (3:20 of one core); expected" in text  # 100 s under each of two defenses


@pytest.mark.usefixtures("known_times")
def test_a_smaller_budget_comes_before_anything_else_is_left_out() -> None:
    fitted = fit(case(budget="standard"), 9, 1, time.monotonic() + (START + 120) / (1 - RESERVE))
    chosen, text = fitted.case, fitted.note
    assert chosen.spec.budget == "quick" and chosen.spec.victims == 16 and not chosen.spec.without
    assert "left out: budget standard" in text


@settings
class Slow(Attack):
    """Takes until it is stopped, under a defense."""

    def run(self, target: Target) -> Answer:
        for i in range(1000 if getattr(target.knowledge.defense, "spec", "none") != "none" else 1):
            if target.progress:
                target.progress(i, 1000)
            time.sleep(0.01 if target.memory == 1 else 0.02)
        return Answer(torch.zeros(target.shape), torch.zeros(target.shape[0]))


def test_what_has_no_time_is_left_out_and_done_by_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.auditing.run.fit", lambda case, *others: Fitted(case, "chosen"))
    slow = Slow()
    object.__setattr__(slow, "name", "slow")
    audit = case(attacks=["linear", slow], victims=8)
    out = tmp_path / "run"
    begun = time.monotonic()
    summary = run_audit(audit, Execution(out=out, workers=0, minutes=4 / 60)).summary
    assert time.monotonic() - begun < 15
    row = summary.defenses[1]
    by_attack = {a.spec: a for a in row.attacks}
    assert by_attack["slow"].status == "not run" and by_attack["slow"].error == "left out: no time"
    assert summary.not_tested[-1] == "left out for lack of time: slow under prune:ratio=0.5"
    assert row.verdict in ("leaks", "cannot tell")
    late = next(c for c in make_plan(audit) if c.attack == "slow" and c.defense != "none")
    assert RunFolder(out).read(late.key) is None
    again = run_audit(audit, Execution(out=out, workers=0)).summary
    assert {a.spec: a.status for a in again.defenses[1].attacks}["slow"] == "ok"
    assert not [line for line in again.not_tested if "lack of time" in line]


def test_minutes_again_takes_the_settings_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    run_audit(case(attacks=["linear"], victims=5), Execution(out=out, workers=0))
    summary = run_audit(case(attacks=["linear"], victims=16), Execution(out=out, workers=0, minutes=5)).summary
    assert summary.case.victims == 5


def test_a_cost_that_takes_too_long_is_priced_in_time_and_measured_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradveil.auditing.run.fit", lambda case, *others: Fitted(case, "chosen", {"utility": 7200.0}))
    audit = case(attacks=["linear"], victims=8, utility={"rounds": 1, "seeds": 1})
    out = tmp_path / "run"
    summary = run_audit(audit, Execution(out=out, workers=0, minutes=5)).summary
    assert summary.cost_left_out == pytest.approx(7200)
    late = [f"accuracy under {spec} (60 minutes of one core)" for spec in ("none", "prune:ratio=0.5")]
    assert f"left out for lack of time: {', '.join(late)}" in summary.not_tested
    assert cost(summary, summary.defenses[1]) == "Its cost in accuracy was not measured: that takes 2.0 hours of one core."
    again = run_audit(audit, Execution(out=out, workers=0)).summary
    assert again.cost_left_out is None and again.defenses[1].utility is not None
