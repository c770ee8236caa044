"""Clients that fail or send nonsense are left out, named, and do not stop the others."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn

from gradveil.core.errors import UserError
from gradveil.core.settings import settings
from gradveil.core.types import Tensors, Update
from gradveil.data import DataSet
from gradveil.defenses import Defense
from gradveil.defenses.base import Step
from gradveil.federation import CentralPlan, FederationPlan, train, train_central
from gradveil.federation.faults import Failure, Reply, screen
from gradveil.federation.rounds import Federation

SMALL = {"rounds": 2, "clients": 3, "images_per_client": 12}


@settings
class Broken(Defense):
    """The first client's update, spoilt in one way or another."""

    how: str = "raise"

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        name = next(iter(tensors))
        if self.how == "raise":
            raise RuntimeError("out of\nmemory")
        if self.how == "exit":
            sys.exit(3)
        if self.how == "refuse":
            raise UserError("this defense does not fit this model.")
        if self.how == "missing":
            return {n: t for n, t in tensors.items() if n != name}
        spoilt = {
            "nan": tensors[name] * math.nan,
            "inf": tensors[name] + math.inf,
            "shape": tensors[name][..., :1],
            "huge": tensors[name] * 1e12,
        }
        return {**tensors, "stranger" if self.how == "stranger" else name: spoilt.get(self.how, tensors[name])}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "raised RuntimeError: out of memory"),
        ("exit", "raised SystemExit: 3"),
        ("nan", "not finite"),
        ("inf", "not finite"),
        ("missing", "missing"),
        ("stranger", "'stranger' is not in the model"),
        ("shape", "the model's is 8×36"),
        ("huge", "norm"),
    ],
)
def test_a_fault_costs_one_update_and_no_more(plain: nn.Module, data: DataSet, how: str, words: str) -> None:
    history = train(plain, data, Broken(how), FederationPlan(defended=1, **SMALL))
    assert [(e.round, e.client) for e in history.events] == [(1, 0), (2, 0)]
    assert all(words in e.message and "\n" not in e.message for e in history.events)
    # The others' mean is what a round without the first client gives.
    federation = Federation(plain, data, "none", FederationPlan(**SMALL))
    server = federation.server()
    for round in range(2):
        server.aggregate(round, [federation.participant(k).reply(server.state, round) for k in (1, 2)])
    assert all(torch.equal(history.state[n], t) for n, t in server.state.items())


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_with_nobody_left_the_state_stays(plain: nn.Module, data: DataSet, how: str) -> None:
    history = train(plain, data, Broken(how), FederationPlan(**SMALL))
    assert all(torch.equal(history.state[n], t) for n, t in plain.state_dict().items())
    assert [e.message for e in history.events if e.client is None] == ["no update was left; the state stays"] * 2
    assert len(history.acc_test) == 2


def test_bad_input_is_no_fault_of_a_client(plain: nn.Module, data: DataSet) -> None:
    with pytest.raises(UserError, match="does not fit"):
        train(plain, data, Broken("refuse"), FederationPlan(**SMALL))


def test_broken_batch_norm_statistics_are_left_out(normed: nn.Module, data: DataSet) -> None:
    history = train(normed, data, Broken("huge"), FederationPlan(defended=1, **SMALL))
    assert {e.client for e in history.events} == {0}
    assert all(bool(t.isfinite().all()) for t in history.state.values())


def test_central_training_says_why_it_broke_off(plain: nn.Module, data: DataSet) -> None:
    with pytest.raises(UserError, match="step 1 of 2: left out: sent values that are not finite"):
        train_central(plain, data, Broken("nan"), CentralPlan(epochs=2, batch_size=48, lr=0.1, momentum=0))


def _reply(client: int, size: float, examples: int = 5, **buffers: torch.Tensor) -> Reply:
    return Reply(client, Update({"w": torch.full((2,), size)}, "delta", examples), buffers)


def _screen(*replies: Reply | Failure) -> tuple[list[int], list[Failure]]:
    kept, failures = screen(replies, {"w": torch.zeros(2)}, {"mean": torch.zeros(3)})
    return [r.client for r in kept], failures


def test_norms_are_compared_with_the_median_of_the_others() -> None:
    assert _screen(_reply(0, 1.0), _reply(1, 0.9e6), _reply(2, 1.0))[0] == [0, 1, 2]
    assert _screen(_reply(0, 1.0), _reply(1, 1.1e6), _reply(2, 1.0))[0] == [0, 2]
    assert _screen(_reply(1, 1e30), _reply(0, 1.0))[0] == [0]
    assert _screen(_reply(0, 1e30))[0] == [0]  # alone there is nothing to compare with
    assert _screen(_reply(0, 0.0), _reply(1, 0.0), _reply(2, 1.0))[0] == [0, 1, 2]  # zeros say nothing of scale


def test_statistics_and_counts_are_screened_too() -> None:
    kept, failures = _screen(
        _reply(3, 1.0, mean=torch.zeros(3)),
        _reply(2, 1.0, mean=torch.zeros(4)),
        _reply(1, 1.0, mean=torch.tensor([0.0, math.nan, 0.0])),
        _reply(0, 1.0, other=torch.zeros(3)),
        _reply(5, 1.0, examples=0),
        Failure(4, "gone"),
    )
    assert kept == [3]
    assert [f.client for f in failures] == [0, 1, 2, 4, 5]
    assert failures[3].reason == "gone"
