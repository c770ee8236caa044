"""How long an audit will take, against how long it takes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks.generative import gan
from gradveil.auditing.case import Case
from gradveil.auditing.estimate import Estimate, _iteration, wall_seconds
from gradveil.auditing.limits import Execution
from gradveil.auditing.plan import Cell, make_plan
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.core.gradients import ModelFunction
from gradveil.core.types import Tensors
from gradveil.storage.run_folder import RunFolder


def small(**settings: object) -> Case:
    torch.manual_seed(0)
    x, y = torch.rand(120, 1, 8, 8), torch.arange(120) % 3
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(144, 3))
    return Case(make_spec({"data": (x, y), "model": model, "victims": 4, **settings}))


@pytest.fixture
def counted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that gradients alone move, a hundredth of a second per victim: so that a busy machine changes nothing."""
    passed = [0.0]
    one, many = ModelFunction.gradient, ModelFunction.gradients

    def gradient(self: ModelFunction, *values: Any, **options: Any) -> Tensors:
        passed[0] += 0.01
        return one(self, *values, **options)

    def gradients(self: ModelFunction, state: Tensors, x: Tensor, *values: Any, **options: Any) -> Tensors:
        passed[0] += 0.01 * len(x)
        return many(self, state, x, *values, **options)

    monkeypatch.setattr(ModelFunction, "gradient", gradient)
    monkeypatch.setattr(ModelFunction, "gradients", gradients)
    monkeypatch.setattr(time, "process_time", lambda: passed[0])


@pytest.mark.usefixtures("counted_time")
def test_the_plan_is_near_the_cpu_time_that_is_used(tmp_path: Path) -> None:
    case = small(defenses=["gaussian:std=0.5"], attacks=["ig:steps=600", "idlg:steps=150", "linear", "noise-likelihood"])
    plan = make_plan(case)
    estimate = Estimate(case, plan)
    expected = sum(estimate.cell(cell).seconds for cell in plan)
    run_audit(case, Execution(out=tmp_path / "run", workers=0))
    folder = RunFolder(tmp_path / "run")
    used = sum(folder.outcome(cell.key).cpu_seconds or 0.0 for cell in plan)
    assert used > 2
    assert used / 1.5 < expected < 1.5 * used


@pytest.mark.usefixtures("counted_time")
def test_the_trainings_of_the_cost_are_timed_by_a_few_clients_of_a_few_rounds(tmp_path: Path) -> None:
    utility = {"rounds": 40, "clients": 8, "images": 12, "batch_size": 4, "seeds": 2, "defended": 4}
    case = small(defenses=["gaussian:std=0.5"], attacks=["linear"], utility=utility)
    plan = make_plan(case)
    estimate, begun = Estimate(case, plan), time.process_time()
    cells = [cell for cell in plan if cell.kind == "utility"]
    expected = sum(estimate.cell(cell).seconds for cell in cells)
    spent = time.process_time() - begun
    run_audit(case, Execution(out=tmp_path / "run", workers=0))
    used = sum(RunFolder(tmp_path / "run").outcome(cell.key).cpu_seconds or 0.0 for cell in cells)
    assert used / 1.5 < expected < 1.5 * used
    assert spent < used / 2


def test_what_does_not_apply_costs_nothing_and_says_why() -> None:
    case = small(defenses=["prune:ratio=0.5"], attacks=["linear", "noise-likelihood"])
    plan = make_plan(case)
    estimate = Estimate(case, plan)
    times = {str(cell): estimate.cell(cell) for cell in plan}
    linear, noise = times["linear under none"], times["noise-likelihood under prune:ratio=0.5"]
    assert "the first fully connected layer" in (linear.reason or "") and linear.seconds < 0.2
    assert "adds no noise" in (noise.reason or "") and noise.seconds < 0.2
    assert times["updates under none"].reason is None


def test_the_limit_counts_every_stage_of_a_search_that_may_end_early() -> None:
    case = small(attacks=["swift", "ig:steps=300"], defenses=["gaussian:std=0.5"])
    plan = make_plan(case)
    estimate = Estimate(case, plan)
    swift, ig = (estimate.cell(plan.of("attack", "gaussian:std=0.5")[i]) for i in (0, 1))
    assert swift.limit > 1.5 * swift.seconds and ig.limit == ig.seconds


def test_a_slow_first_iteration_does_not_lessen_the_victims_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(attacks=["ig"])
    plain, calls = ModelFunction.updates, list[int]()

    def slow_at_first(*args: Any, **settings: Any) -> Any:
        calls.append(1)
        end = time.process_time() + (0.4 if len(calls) == 1 else 0)
        while time.process_time() < end:
            pass
        return plain(*args, **settings)

    monkeypatch.setattr(ModelFunction, "updates", slow_at_first)
    assert _iteration(case) < 0.1 and len(calls) > 1


def test_trying_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks that were trained for three steps must not be taken for trained ones later."""
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))
    case = small(attacks=["ggl", "inverter"], defenses=["loda:extractor=trained"])
    plan, before = make_plan(case), dict(gan._KEPT)
    estimate = Estimate(case, plan)
    reasons = {str(cell): estimate.cell(cell).reason for cell in plan}
    assert reasons["ggl under none"] is None and reasons["inverter under none"] is None
    assert before == gan._KEPT
    assert not (tmp_path / "cache").exists()


def test_workers_share_the_work_and_wait_for_what_a_cell_needs() -> None:
    cells = [Cell("a", "observe"), *(Cell(key, "attack", needs=("a",)) for key in "bcd")]
    seconds = {"a": 2.0, "b": 4.0, "c": 3.0, "d": 1.0}
    assert wall_seconds(cells, seconds, 1) == 10
    assert wall_seconds(cells, seconds, 2) == 6
    assert wall_seconds(cells, seconds, 8) == 6
