"""A round against one written out by hand with torch's own optimiser."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from gradveil.core.errors import UserError
from gradveil.core.settings import settings
from gradveil.core.types import Batch, Tensors
from gradveil.data import DataSet
from gradveil.defenses import Defense
from gradveil.defenses.base import Step
from gradveil.federation import CentralPlan, FederationPlan, central_plan, train, train_central
from gradveil.federation.checkpoint import Checkpoint
from gradveil.federation.history import History
from gradveil.federation.inline import inline
from gradveil.federation.rounds import Federation


def sgd(module: nn.Module, data: DataSet, batches: list[Batch], **settings: float) -> nn.Module:
    """Plain training of a copy: one step for each batch."""
    module = copy.deepcopy(module).train()
    optimizer = torch.optim.SGD(module.parameters(), **settings)
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(module((batch.x - data.mean) / data.std), batch.y).backward()
        optimizer.step()
    return module


def close(state: Tensors, expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert expected
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value.detach(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedavg_is_the_mean_of_local_models_weighted_by_examples(plain: nn.Module, data: DataSet, momentum: float) -> None:
    how = {"lr": 0.2, "momentum": momentum, "weight_decay": 0.01}
    plan = FederationPlan(
        rounds=2, clients=3, images_per_client=16, local_epochs=2, batch_size=None, partition="dirichlet:alpha=0.4", **how
    )
    federation = Federation(plain, data, "none", plan)
    assert len({len(s) for s in federation.shares}) > 1  # or the weights would not show
    server, engine = federation.server(), inline(federation)
    expected = plain
    for round in range(2):
        assert server.aggregate(round, engine(server.state, round, [0, 1, 2])) == []
        local = [sgd(expected, data, [federation.images[s]] * 2, **how).state_dict() for s in federation.shares]
        weights = [len(s) / 48 for s in federation.shares]
        mean = {n: sum(w * m[n] for w, m in zip(weights, local, strict=True)) for n in local[0]}
        expected = copy.deepcopy(plain)
        expected.load_state_dict(mean)
        close(server.state, mean)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedsgd_with_one_client_is_plain_sgd(plain: nn.Module, data: DataSet, momentum: float) -> None:
    how = {"lr": 0.2, "momentum": momentum, "weight_decay": 0.01}
    history = train(
        plain, data, "none", FederationPlan(rounds=6, clients=1, images_per_client=48, batch_size=48, fedsgd=True, **how)
    )
    close(history.state, sgd(plain, data, [data.private] * 6, **how).state_dict())


def test_fedsgd_with_adam_keeps_its_moments_from_round_to_round(plain: nn.Module, data: DataSet, tmp_path: Path) -> None:
    """Adam's moments begin anew in every round of FedAvg; with FedSGD they are the server's, also after a stop."""
    plan = FederationPlan(rounds=6, clients=1, images_per_client=16, batch_size=None, fedsgd=True, optimizer="adam", lr=0.01)
    whole = train(plain, data, "none", plan, folder=tmp_path / "whole")
    images = Federation(plain, data, "none", plan).images
    module = copy.deepcopy(plain).train()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(module((images.x - data.mean) / data.std), images.y).backward()
        optimizer.step()
    close(whole.state, module.state_dict(), 1e-5)
    federation = Federation(plain, data, "none", plan)
    server, engine = federation.server(), inline(federation)
    for round in range(3):
        server.aggregate(round, engine(server.state, round, [0]))
    Checkpoint(tmp_path / "stopped", federation).save(History(acc_test=[0.0] * 3, state=server.state), server)
    resumed = train(plain, data, "none", plan, folder=tmp_path / "stopped")
    close(resumed.state, whole.state, 1e-7)


def test_fedsgd_of_all_clients_is_sgd_on_all_images(plain: nn.Module, data: DataSet) -> None:
    how = {"lr": 0.3, "momentum": 0.9}
    history = train(
        plain,
        data,
        "none",
        FederationPlan(rounds=4, clients=5, images_per_client=9, batch_size=None, partition="dirichlet", fedsgd=True, **how),
    )
    close(history.state, sgd(plain, data, [data.private[:45]] * 4, **how).state_dict())


@pytest.mark.parametrize("fedsgd", [True, False])
def test_a_pass_takes_every_image_once_in_an_order_of_its_own(plain: nn.Module, data: DataSet, fedsgd: bool) -> None:
    federation = Federation(
        plain, data, "none", FederationPlan(rounds=1, clients=3, images_per_client=15, batch_size=4, fedsgd=fedsgd)
    )
    client = federation.participant(1)
    assert client.rounds_per_pass == (4 if fedsgd else 1)
    passes = [
        torch.cat([client._order(p * client.rounds_per_pass + r) for r in range(client.rounds_per_pass)]).tolist()
        for p in range(2)
    ]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(15))
    assert passes[0] != passes[1]


def test_central_training_is_sgd_in_mini_batches(plain: nn.Module, data: DataSet) -> None:
    federation = Federation(
        plain, data, "none", FederationPlan(rounds=1, clients=1, images_per_client=None, batch_size=20, fedsgd=True)
    )
    client = federation.participant(0)
    batches = [client.images[client._order(r)] for r in range(6)]
    assert [len(b) for b in batches] == [20, 20, 8] * 2
    state = train_central(plain, data, "none", CentralPlan(epochs=2, batch_size=20, lr=0.1, momentum=0.9))
    close(state, sgd(plain, data, batches, lr=0.1, momentum=0.9).state_dict())


@settings
class Darken(Defense):
    """Every stage leaves a mark: data once, the gradient and the update each time."""

    counts: dict[str, int] = Field(default_factory=dict)

    def data(self, batch: Batch, step: Step) -> Batch:
        self.counts["data"] = self.counts.get("data", 0) + 1
        return Batch(batch.x * 0.5, batch.y)

    def gradient(self, tensors: Tensors, step: Step) -> Tensors:
        self.counts["gradient"] = self.counts.get("gradient", 0) + 1
        return tensors

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        self.counts["update"] = self.counts.get("update", 0) + 1
        return {name: 2 * t for name, t in tensors.items()}


def test_stages_act_as_often_as_they_should(plain: nn.Module, data: DataSet) -> None:
    defense = Darken()
    train(plain, data, defense, FederationPlan(rounds=3, clients=2, images_per_client=10, local_epochs=2, batch_size=4))
    assert defense.counts == {"data": 2, "gradient": 3 * 2 * 2 * 3, "update": 3 * 2}


def test_the_defense_acts_on_the_defended_and_on_nobody_else(plain: nn.Module, data: DataSet) -> None:
    plan = FederationPlan(rounds=1, clients=4, images_per_client=12, batch_size=None, lr=0.1, momentum=0, defended=1)
    replies = []
    for defense in ("none", Darken()):
        federation = Federation(plain, data, defense, plan)
        replies.append([federation.participant(k).reply(federation.state, 0) for k in range(4)])
    undefended, defended = replies
    for one, other in zip(undefended[1:], defended[1:], strict=True):
        assert all(torch.equal(one.update.tensors[n], other.update.tensors[n]) for n in one.update.tensors)
    dark = Batch(federation.images[federation.shares[0]].x * 0.5, federation.images[federation.shares[0]].y)
    moved = sgd(plain, data, [dark], lr=0.1).state_dict()
    close(defended[0].update.tensors, {n: 2 * (moved[n] - p) for n, p in plain.state_dict().items()})


def test_a_changed_network_is_run_by_all(plain: nn.Module, data: DataSet) -> None:
    history = train(plain, data, "precode:k=4", FederationPlan(rounds=2, clients=3, images_per_client=8, defended=1))
    assert any("bottleneck" in name for name in history.state)
    assert history.events == []
    assert not any("bottleneck" in name for name in plain.state_dict())


def test_accuracies_are_those_of_the_final_state(plain: nn.Module, data: DataSet) -> None:
    history = train(
        plain, data, "none", FederationPlan(rounds=3, clients=4, images_per_client=12, defended=2, lr=0.2, batch_size=4)
    )
    federation = Federation(plain, data, "none", FederationPlan(rounds=3, clients=4, images_per_client=12))
    module = copy.deepcopy(plain)
    module.load_state_dict(history.state)

    def right(x: Tensor, y: Tensor) -> float:
        return float((module((x - data.mean) / data.std).argmax(1) == y).double().mean())

    defended_images = torch.cat(federation.shares[:2])
    assert history.acc_test[-1] == right(data.test.x, data.test.y)
    assert history.acc_train[-1] == right(data.private.x, data.private.y)
    assert history.acc_sensitive[-1] == right(data.private.x[defended_images], data.private.y[defended_images])
    logits = module((data.private.x - data.mean) / data.std)
    assert history.loss[-1] == pytest.approx(F.cross_entropy(logits, data.private.y).item(), abs=1e-6)


def test_the_cosine_tells_a_scaled_update_from_a_turned_one(plain: nn.Module, data: DataSet) -> None:
    how = {"rounds": 3, "clients": 2, "images_per_client": 12, "cosine_every": 2}
    clipped = train(plain, data, "clip:norm=0.001", FederationPlan(**how)).gradient_cosine
    noisy = train(plain, data, "gaussian:std=1", FederationPlan(**how)).gradient_cosine
    assert clipped[0] == pytest.approx(1) and clipped[1] is None and clipped[2] == pytest.approx(1)
    assert abs(noisy[0] or 0) < 0.5


def test_traffic_counts_what_is_sent(plain: nn.Module, data: DataSet) -> None:
    entries = sum(p.numel() for p in plain.parameters())
    history = train(plain, data, "prune:ratio=0.75", FederationPlan(rounds=1, clients=3, images_per_client=8, sampled=2))
    assert history.bytes_sent == [2 * 4 * entries]
    assert 0 < history.nonzero_sent[0] < 0.35 * 2 * entries


def test_learning_works_on_digits(make_data: Callable[..., DataSet]) -> None:
    from gradveil.data import load
    from gradveil.models import build

    digits = load("mnist-5k")
    module = build("cnn", input_shape=digits.input_shape, num_classes=10, seed=0)
    history = train(
        module, digits, "none", FederationPlan(rounds=8, clients=5, images_per_client=200, evaluate_every=4, local_epochs=2)
    )
    assert [a is None for a in history.acc_test] == [True, True, True, False] * 2
    assert (history.acc_test[-1] or 0) > 0.75
    assert history.rounds_to(0.5) in (4, 8)
    assert history.rounds_to(1.01) is None


def test_central_training_by_adam_and_with_milestones(plain: nn.Module, data: DataSet) -> None:
    """`trained_by` of an audit: the optimizer keeps its memory, and the rate falls after a pass."""
    plan = central_plan("adam:lr=0.01,batch_size=20,milestones=1", 2, 0)
    federation = Federation(plain, data, "none", plan.federation())
    client = federation.participant(0)
    module = copy.deepcopy(plain).train()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for step in range(2 * client.rounds_per_pass):
        optimizer.param_groups[0]["lr"] = 0.01 if step < client.rounds_per_pass else 0.001
        batch = client.images[client._order(step)]
        optimizer.zero_grad()
        F.cross_entropy(module((batch.x - data.mean) / data.std), batch.y).backward()
        optimizer.step()
    close(train_central(plain, data, "none", plan), module.state_dict(), 1e-5)
    assert central_plan("sgd", 3, 7) == CentralPlan(epochs=3, seed=7)  # as audits without a word on it train
    with pytest.raises(UserError, match="training"):
        central_plan("lbfgs", 1, 0)
