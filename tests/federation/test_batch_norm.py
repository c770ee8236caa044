"""BatchNorm and dropout: statistics are those of the clients' data, single images do no harm, draws are explicit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from plain_loop import trained
from torch import nn

from gradveil.data import DataSet
from gradveil.federation import CentralPlan, FederationPlan, train, train_central
from gradveil.federation.faults import Reply
from gradveil.federation.inline import inline
from gradveil.federation.rounds import Federation


def test_a_round_is_that_of_a_plain_loop_and_the_server_takes_the_mean(normed: nn.Module, data: DataSet) -> None:
    plan = FederationPlan(rounds=1, clients=3, images_per_client=16, batch_size=5, partition="dirichlet:alpha=0.4", lr=0.1)
    plan = replace(plan, momentum=0.0)
    federation = Federation(normed, data, "none", plan)
    before = {k: v.clone() for k, v in federation.state.items()}
    server = federation.server()
    replies = inline(federation)(server.state, 0, [0, 1, 2])
    assert all(torch.equal(before[k], server.state[k]) for k in before)
    server.aggregate(0, replies)
    means = {n: torch.zeros(()) for n, t in before.items() if t.is_floating_point()}
    for number, reply in enumerate(replies):
        assert isinstance(reply, Reply)
        client = federation.participant(number)
        images = client.images[client._order(0)]
        training = replace(plan.local_training(0), optimizer="sgd")
        local = trained(normed, (images.x - data.mean) / data.std, images.y, training).state_dict()
        for name, total in means.items():
            sent = before[name] + reply.update.tensors[name] if name in reply.update.tensors else reply.buffers[name]
            torch.testing.assert_close(sent, local[name], atol=1e-6, rtol=1e-6)
            means[name] = total + reply.update.examples * local[name]
    for name, total in means.items():
        examples = sum(reply.update.examples for reply in replies if isinstance(reply, Reply))
        torch.testing.assert_close(server.state[name], total / examples, atol=1e-6, rtol=1e-5)


def test_fedsgd_follows_torchs_moving_average(normed: nn.Module, data: DataSet) -> None:
    history = train(
        normed, data, "none", FederationPlan(rounds=5, clients=1, images_per_client=48, batch_size=48, fedsgd=True, lr=0.1)
    )
    local = copy.deepcopy(normed).train()
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(local((data.private.x - data.mean) / data.std), data.private.y).backward()
        optimizer.step()
    for name, value in local.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(history.state[name], value, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("fedsgd", [False, True])
def test_it_learns_and_evaluates_well(normed: nn.Module, data: DataSet, fedsgd: bool) -> None:
    history = train(
        normed,
        data,
        "none",
        FederationPlan(rounds=60 if fedsgd else 8, clients=3, images_per_client=16, batch_size=8, lr=0.1, fedsgd=fedsgd),
    )
    assert (history.acc_test[-1] or 0) > 0.9
    assert history.events == []


@pytest.mark.parametrize(
    ("images", "batch_size"), [(9, 8), (1, 8), (3, 1), (2, 1)], ids=["odd one out", "one image", "batches of one", "two"]
)
@pytest.mark.parametrize("fedsgd", [False, True])
def test_single_images_do_no_harm(normed: nn.Module, data: DataSet, images: int, batch_size: int, fedsgd: bool) -> None:
    history = train(
        normed,
        data,
        "none",
        FederationPlan(rounds=3, clients=4, images_per_client=images, batch_size=batch_size, fedsgd=fedsgd),
    )
    assert history.events == []
    assert all(bool(t.isfinite().all()) for t in history.state.values())
    assert not torch.equal(history.state["0.weight"], normed[0].weight)


def test_central_training_with_an_odd_image(normed: nn.Module, make_data: Callable[..., DataSet]) -> None:
    data = make_data(41)
    state = train_central(normed, data, "none", CentralPlan(epochs=8, batch_size=8, lr=0.05, momentum=0.9))
    module = copy.deepcopy(normed).eval()
    module.load_state_dict(state)
    right = module((data.test.x - data.mean) / data.std).argmax(1) == data.test.y
    assert right.double().mean() > 0.9


def test_dropout_draws_from_the_seed_and_leaves_the_global_stream(dropping: nn.Module, data: DataSet) -> None:
    how = {"rounds": 3, "clients": 3, "images_per_client": 16, "batch_size": 8}
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = train(dropping, data, "none", FederationPlan(seed=4, **how))
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    two = train(dropping, data, "none", FederationPlan(seed=4, **how))
    assert all(torch.equal(one.state[n], two.state[n]) for n in one.state)
    dropping[3].p = 0.0
    off = train(dropping, data, "none", FederationPlan(seed=4, **how))
    assert not torch.equal(one.state["1.weight"], off.state["1.weight"])


class Counting(nn.Module):
    """A network that keeps a statistic of its own in a buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(36, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(x)
        return self.linear(x.flatten(1))  # type: ignore[no-any-return]


def test_buffers_that_training_changes_are_averaged(data: DataSet) -> None:
    module = Counting()
    history = train(module, data, "none", FederationPlan(rounds=2, clients=2, images_per_client=10, batch_size=4))
    assert float(history.state["seen"]) == 20  # ten a client and round
    assert float(module.seen) == 0
