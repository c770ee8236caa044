"""Attacks in stages: what leaks by the fast ones is not attacked further."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.plan import attacks_on, make_plan
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.auditing.stages import CLEAR, Stages
from gradveil.metrics.leak_test import LEVEL

SPEC = {"data": "mnist-5k:private=200", "model": "smlp", "victims": 8, "line_up": 0, "until_leak": True}


def test_what_leaks_by_closed_forms_is_not_searched_and_the_page_says_so(tmp_path) -> None:
    case = Case(make_spec({**SPEC, "defenses": ["clip", "gaussian:std=10"]}))
    run = run_audit(case, Execution(out=tmp_path / "run", workers=0))
    rows = {row.spec: row for row in run.summary.defenses}
    assert [rows[text].verdict for text in ("none", "clip")] == ["leaks", "leaks"]
    for text in ("none", "clip"):
        assert {attack.spec for attack in rows[text].attacks} == set(case.spec.suite.first)
    noisy = rows["gaussian:std=10"]
    assert {attack.spec for attack in noisy.attacks} == set(attacks_on(case, case.defenses["gaussian:std=10"]))
    assert noisy.verdict == "no leak shown"
    (left_out,) = [item for item in run.summary.not_tested if "as a leak was seen before" in item]
    assert "clip-aware under clip" in left_out and "gaussian" not in left_out
    assert "--until-leak" in run.summary.command


def test_without_it_one_stage_has_all_attacks() -> None:
    case = Case(make_spec({**SPEC, "until_leak": False, "defenses": ["clip"]}))
    assert [make_plan(case, asked=asked) for asked in Stages(case.spec)] == [make_plan(case)]


def test_what_leaked_before_is_not_attacked_further() -> None:
    spec = make_spec({**SPEC, "defenses": ["clip"]})
    assert [asked["clip"] for asked in Stages(spec, {"clip": ("linear",)})] == [("linear",)] * 3


@pytest.mark.parametrize(("p", "settled"), [(0.001, True), (0.005, True), (0.006, False), (0.04, False)])
def test_a_leak_that_one_more_look_may_show_by_chance_settles_nothing(p: float, settled: bool) -> None:
    stages = Stages(make_spec({**SPEC, "defenses": ["clip"]}))
    for asked in itertools.islice(stages, 1):
        test = SimpleNamespace(p=p, control_rate=1.0, control_null=0.0)
        rows = [SimpleNamespace(spec=spec, verdict="leaks", test=test, control=spec == "none") for spec in ("none", "clip")]
        stages.settle(SimpleNamespace(defenses=rows))  # type: ignore[arg-type]
        assert stages.settled == ({"none": asked["none"], "clip": asked["clip"]} if settled else {})


def test_looks_before_the_last_add_little_to_false_alarms() -> None:
    """Three looks at the same victims without a leak, as unlike each other as they can be."""
    looks = torch.rand(20_000, 3, generator=torch.Generator().manual_seed(0))
    alarms = (looks[:, :2] <= CLEAR).any(dim=1) | (looks[:, 2] <= LEVEL)
    assert float(alarms.double().mean()) < LEVEL + 0.015 < float((looks <= LEVEL).any(dim=1).double().mean())
