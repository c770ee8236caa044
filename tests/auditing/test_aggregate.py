"""Audits of sums: the server sees only the mean of the updates of several clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradveil as gv
from gradveil import defenses
from gradveil.auditing import line_up
from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.run import run_audit
from gradveil.auditing.spec import make_spec
from gradveil.client import prepare_client, summed_round
from gradveil.core.errors import UserError
from gradveil.core.observation import Sighting, observe
from gradveil.defenses.base import Setup
from gradveil.summary import Summary

CLASSES = 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, CLASSES))


def case_of(**settings: Any) -> Case:
    x, y = torch.rand(600, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(600) % CLASSES
    values = {"data": (x, y), "model": network(), "attacks": ["linear"], "victims": 6, "batch_size": 2, "line_up": 40}
    return Case(make_spec({**values, **settings}))


def audited(folder: Path, **settings: Any) -> Summary:
    return run_audit(case_of(**settings), Execution(out=folder)).summary


def test_the_sum_is_the_mean_of_what_the_clients_send() -> None:
    case, none = case_of(aggregate=3), defenses.parse("none")
    task, state = case.task(none)
    batch = case.batch(0)
    assert len(batch) == 6
    client = prepare_client(none, case.training, Setup(task, state, case.data.private))
    update, trace = summed_round(client, state, batch, batch, 2, 0, 0)
    whole, _ = client.round(state, batch, 0, 0)
    assert update.examples == 6 and torch.equal(trace.fed.x, batch.x)
    assert all(torch.allclose(update.tensors[n], t, atol=1e-6) for n, t in whole.tensors.items()), "of one gradient each"
    parts = [client.round(state, batch[i : i + 2], 0, 0)[0].tensors for i in (0, 2, 4)]
    assert all(torch.allclose(t, torch.stack([p[n] for p in parts]).mean(0)) for n, t in update.tensors.items())


@pytest.mark.parametrize(("defense", "std"), [("gaussian:std=0.4", 0.4), ("dpsgd:noise=3,clip=0.5", 3 * 0.5 / 2)])
def test_noise_of_clients_averages_and_the_adversary_knows_by_how_much(defense: str, std: float) -> None:
    case, method = case_of(aggregate=4), defenses.parse(defense)
    task, state = case.task(method)
    batch = case.batch(0)
    client = prepare_client(method, case.training, Setup(task, state, case.data.private))
    updates = [summed_round(client, state, batch, batch, 2, i)[0] for i in range(30)]
    spread = torch.stack([u.tensors["1.weight"] for u in updates]).std(0).square().mean().sqrt()
    observed = observe(task, [Sighting(state, updates[0])], defense=method, aggregate=4)
    assert observed.knowledge.noise is not None and observed.knowledge.batch_size == 8
    assert observed.knowledge.noise.std == pytest.approx(std / 2)
    assert float(spread) == pytest.approx(std / 2, rel=0.05)


def test_an_audit_of_sums_says_what_is_assumed_and_is_another_case(tmp_path: Path) -> None:
    one, plain, summed = case_of(aggregate=1), case_of(), case_of(aggregate=4)
    assert one.id == plain.id != summed.id and "aggregate" not in plain.terms
    summary = audited(tmp_path / "sum", aggregate=4, defenses=["clip:norm=1+gaussian:std=4"])
    assert "of each of 4 clients, only their sum is seen" in summary.scope and summary.case.aggregate == 4
    assert any("secure aggregation is assumed" in item for item in summary.not_tested)
    none, noised = summary.defenses
    assert none.line_up is not None and none.line_up.identified.rate == 1, "8 images are fewer than 24 units"
    assert noised.line_up is not None and noised.line_up.certificate is not None
    assert noised.line_up.certificate.aggregate == 4 and not noised.line_up.contradicts
    alone = audited(tmp_path / "one", defenses=["clip:norm=1+gaussian:std=4"]).defenses[1].line_up
    assert alone is not None and alone.certificate is not None
    assert noised.line_up.certificate.upper < alone.certificate.upper, "the noise of all clients adds up"


def test_the_noise_of_dpsgd_adds_up_over_clients_that_make_one_step_and_counts_alone_otherwise() -> None:
    method = defenses.parse("dpsgd:noise=2")
    four, sixteen = (line_up._certificate(case_of(aggregate=n), method, 40) for n in (4, 16))
    assert four == gv.certify("dpsgd:noise=2", rounds=1, line_up=40, aggregate=4)
    assert four is not None and four.upper == pytest.approx(gv.certify("dpsgd:noise=4", rounds=1, line_up=40).upper)
    assert sixteen is not None and sixteen.upper < four.upper
    steps = line_up._certificate(case_of(aggregate=4, local_epochs=2, local_batch_size=1), method, 40)
    assert steps is not None and steps.aggregate == 1, "a sum tells no more than its parts"
    assert steps.upper == gv.certify("dpsgd:noise=2", rounds=1, local_epochs=2, line_up=40).upper
    assert line_up._certificate(case_of(aggregate=4), defenses.parse("prune"), 40) is None


def test_weight_differences_of_clients_side_by_side(tmp_path: Path) -> None:
    training = {"local_epochs": 2, "local_batch_size": 1, "local_lr": 0.05}
    assert case_of(aggregate=4, **training).seen_training.batch_size == 4
    summary = audited(tmp_path, aggregate=4, attacks=["ig:steps=2"], **training)
    row = summary.defenses[0]
    assert row.attacks[0].status == "ok" and row.line_up is not None and row.line_up.identified.rate >= 0.5


def test_secrets_of_single_clients_cannot_be_granted() -> None:
    with pytest.raises(UserError, match="--aggregate hides what single clients draw"):
        case_of(aggregate=2, knowledge="upper-bound")
