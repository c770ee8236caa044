"""The direct look as a part of an audit: what it adds to the verdict, and what is said about it."""

from __future__ import annotations

import pytest
import torch
from test_audit_verdict import FAILED, attacked, codes, everything, make, summary_of

import gradveil as gv
from gradveil.auditing import plan as plans
from gradveil.auditing.plan import make_plan
from gradveil.core.results import Sight
from gradveil.core.types import Tensors
from gradveil.defenses.base import Defense, Step
from gradveil.storage.run_folder import Outcome


class Hidden(Defense):
    """Noise in every parameter, and the image in an additional tensor. Its author names a counter."""

    name = "hidden"
    random = True
    counters = ("linear",)

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        noise = {name: step.rng.normal(t.shape) for name, t in tensors.items()}
        return {**noise, "momentum": step.batch.x.clone()}


class Noise(Hidden):
    """Nothing but noise."""

    name = "noise-alone"

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return {**super().update(tensors, step), "momentum": step.rng.normal(step.batch.x.shape)}


@pytest.fixture
def short_suite(monkeypatch):
    """The suite with the two attacks that take no time."""
    monkeypatch.setattr(plans, "suite_attacks", lambda *_: ["linear", "rgap"])


def test_an_image_in_an_additional_tensor_is_a_leak_whatever_the_author_claims(digits, short_suite):
    case = {
        "data": digits,
        "model": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 3)),
        "victims": 8,
        "seed": 100,
    }
    hidden, noise = (gv.audit(defenses=[d], attacks="standard", **case).summary.defenses[-1] for d in (Hidden(), Noise()))
    assert hidden.verdict == "leaks" and hidden.look is not None
    assert hidden.look.p == 0.001 and hidden.look.seen >= 6 and hidden.look.tensor == "momentum"
    assert "seen-directly" in codes(hidden.warnings)
    assert noise.verdict == "unrefuted" and noise.look is not None and noise.look.p > 0.05
    assert "seen-directly" not in codes(noise.warnings)


def looked(case, leaks: dict[int, float] | None = None) -> Outcome:
    """A look that saw these victims with this likeness, and nothing else."""
    likeness = [[0.0] * int(used.sum()) for used in case.slots.used]
    sights = [Sight()] * len(case.slots.batch)
    for victim, s in (leaks or {}).items():
        row = case.slots.batch[victim]
        likeness[row][int(case.slots.used[row][:victim].sum())] = s
        sights[victim] = Sight(tensor="fc.weight", reading="values", likeness=s)
    return Outcome(likeness=tuple(map(tuple, likeness)), sights=tuple(sights))


@pytest.fixture
def suite_case(digits, monkeypatch):
    monkeypatch.setattr(plans, "suite_attacks", lambda *_: ["ig"])
    return make(digits, attacks=["standard"], line_up=0)


def test_what_is_seen_counts_beside_the_attacks(suite_case):
    nothing, control = looked(suite_case), {"ig": everything(suite_case), "look": looked(suite_case)}
    seen = looked(suite_case, {2: 1.0, 5: 0.99})
    _, gaussian, clip = summary_of(suite_case, none=control, gaussian={"look": seen}, clip={"look": nothing}).defenses
    assert gaussian.verdict == "leaks" and gaussian.look.seen == 2 and gaussian.look.reading == "values"
    assert clip.verdict == "unrefuted" and clip.look.p == 1.0 and clip.look.seen == 0


def test_a_look_that_failed_leaves_the_verdict_open(suite_case):
    nothing, control = looked(suite_case), {"ig": everything(suite_case), "look": looked(suite_case)}
    rows = summary_of(suite_case, none=control, gaussian={"look": FAILED}, clip={"look": nothing}).defenses
    assert [row.verdict for row in rows] == ["leaks", "cannot tell", "unrefuted"]
    assert rows[1].look is None
    assert "the direct look" in {w.code: w.text for w in rows[1].warnings}["attacks-failed"]


def test_it_is_part_of_the_suite_alone(digits, suite_case):
    assert [cell.defense for cell in make_plan(suite_case) if cell.kind == "look"] == ["none", "gaussian", "clip"]
    named = make(digits, attacks=["ig"])
    assert not [cell for cell in make_plan(named) if cell.kind == "look"]
    control = {"ig": attacked(named)}
    assert any("without an attack" in item for item in summary_of(named, none=control).not_tested)


def test_a_look_of_an_audit_without_attacks_that_apply_is_enough_for_a_test(suite_case):
    refused = Outcome(status="not applicable", error="no")
    seen = {"ig": refused, "look": looked(suite_case, dict.fromkeys(range(8), 1.0))}
    none = summary_of(suite_case, none=seen, gaussian={"look": looked(suite_case)}, clip={"look": looked(suite_case)}).defenses[
        0
    ]
    assert none.test is not None and none.verdict == "leaks"
    assert torch.tensor(none.test.statistic).isfinite()
