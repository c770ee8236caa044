"""Victims that the attacked model was not trained on, and how it was trained."""

from __future__ import annotations

import copy

import pytest
import torch

from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.plan import make_plan
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.core.errors import UserError
from gradveil.storage.run_folder import RunFolder

SPEC = {"data": "mnist-5k:private=60", "model": "lenet", "victims": 4, "batch_size": 2, "trained_epochs": 1}


def test_held_out_victims_take_no_part_in_the_training() -> None:
    plain, apart = Case(make_spec(SPEC)), Case(make_spec({**SPEC, "held_out": True}))
    assert len(plain.training_data.private) == 60 and len(apart.training_data.private) == 52
    victims = {tuple(x.flatten().tolist()) for v in range(4) for x in apart.batch(v).x}
    assert not victims & {tuple(x.flatten().tolist()) for x in apart.training_data.private.x}
    assert torch.equal(plain.victims, apart.victims) and plain.id != apart.id


def test_the_accuracy_of_the_trained_model_is_kept(tmp_path) -> None:
    case = Case(make_spec({**SPEC, "victims": 1, "defenses": ["none"], "attacks": ["rgap"]}))
    run_audit(case, Execution(out=tmp_path / "run", workers=0))
    (cell,) = make_plan(case).of("train", "none")
    stored = RunFolder(tmp_path / "run").read(cell.key)
    (accuracy,) = stored.history["acc_test"]
    server = copy.deepcopy(case.server).eval()
    server.load_state_dict(RunFolder(tmp_path / "run").tensors(cell.key))
    test = case.data.test
    scores = server((test.x - case.data.mean.view(-1, 1, 1)) / case.data.std.view(-1, 1, 1))
    assert accuracy == pytest.approx((scores.argmax(1) == test.y).double().mean().item())


def test_another_training_is_another_case_and_a_wrong_one_is_refused() -> None:
    plain, same = Case(make_spec(SPEC)), Case(make_spec({**SPEC, "trained_by": "sgd"}))
    other = Case(make_spec({**SPEC, "trained_by": "adam:lr=0.001"}))
    assert plain.id == same.id != other.id
    with pytest.raises(UserError, match="lion"):
        make_spec({**SPEC, "trained_by": "lion"})


def test_one_training_without_a_defense_serves_all_that_keep_the_network(tmp_path) -> None:
    defenses = ["clip:norm=0.001", "precode:k=8"]
    case = Case(make_spec({**SPEC, "defenses": defenses, "attacks": ["rgap"], "trained_under": "none", "victims": 1}))
    plan = make_plan(case)
    assert [cell.defense for cell in plan if cell.kind == "train"] == ["none", "precode:k=8"]
    assert plan.of("observe", "clip:norm=0.001")[0].needs == plan.of("observe", "none")[0].needs
    run = run_audit(case, Execution(out=tmp_path / "run", workers=0))
    assert all("trained for 1 epoch without a defense" in row.scope for row in run.summary.defenses)
    clipped = next(row for row in run.summary.defenses if row.spec == "clip:norm=0.001")
    assert clipped.gradient is not None and clipped.gradient.cosine == pytest.approx(1.0, abs=1e-5)
    under_itself = Case(make_spec({**SPEC, "defenses": defenses}))
    assert [cell.defense for cell in make_plan(under_itself) if cell.kind == "train"] == ["none", *defenses]
    assert under_itself.id != Case(make_spec({**SPEC, "defenses": defenses, "trained_under": "none"})).id
    with pytest.raises(UserError, match="--trained-epochs"):
        make_spec({"trained_under": "none"})
