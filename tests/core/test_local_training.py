"""What a client does in a round, against the loop that any PyTorch user would write."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_loop import OPTIMIZERS, sent, trained
from torch import Tensor, nn

from gradveil.client import Client, prepare_client
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining, freeze
from gradveil.core.observation import Sighting, observe
from gradveil.core.randomness import generator, seeded
from gradveil.core.task import Task
from gradveil.core.types import Batch, Tensors, Update
from gradveil.defenses import parse
from gradveil.defenses.base import Setup


class Residual(nn.Module):
    """A small residual network with everything that behaves differently in training."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8, momentum=momentum)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.again = nn.BatchNorm2d(8, momentum=momentum)
        self.drop, self.head = nn.Dropout(0.4), nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(x + self.again(self.second(x)))
        return self.head(self.drop(nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)))  # type: ignore[no-any-return]


IMAGES = 8


@pytest.fixture
def batch() -> Batch:
    rng = torch.Generator().manual_seed(1)
    return Batch(torch.rand(IMAGES, 3, 8, 8, generator=rng), torch.randint(5, (IMAGES,), generator=rng))


def residual(momentum: float | None = 0.1) -> nn.Module:
    with seeded(3):
        return Residual(momentum).double()


def client_for(module: nn.Module, training: LocalTraining, batch: Batch, defense: str = "none") -> tuple[Client, Tensors]:
    function = ModelFunction(module, mode=training.mode)
    task, state = Task(function, (3, 8, 8), 5, torch.full((3,), 0.5), torch.full((3,), 0.25)), function.state()
    return prepare_client(parse(defense), training, Setup(task, state, batch)), state


def cosine_and_ratio(one: Tensors, other: Tensors) -> tuple[float, float]:
    a, b = (torch.cat([t[n].flatten() for n in other]) for t in (one, other))
    return float(a @ b / (a.norm() * b.norm())), float(a.norm() / b.norm())


# -- against the plain loop --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS])
def test_batch_norm_and_dropout_train_as_in_torch(optimizer: str | None, batch: Batch) -> None:
    training = LocalTraining(sends_statistics=True)
    if optimizer is not None:
        training = LocalTraining(epochs=2, batch_size=3, lr=0.05, optimizer=optimizer, sends_statistics=True)
    module, batch = residual(), Batch(batch.x.double(), batch.y)
    client, state = client_for(module, training, batch)
    with seeded(9, "dropout"):
        update, _ = client.round(state, batch, 4)
    orders = [torch.arange(IMAGES), client.draws("order", 4).permutation(IMAGES)]
    x = (batch.x - 0.5) / 0.25
    with seeded(9, "dropout"):
        expected = sent(module, x, batch.y, training, orders)
    assert cosine_and_ratio(update.tensors, expected) == pytest.approx((1.0, 1.0), abs=1e-9)
    for name, value in expected.items():
        assert float((update.tensors[name] - value).norm()) <= 1e-6 * float(value.norm()), name
    with seeded(9, "dropout"):
        buffers = dict(trained(module, x, batch.y, training, orders).named_buffers())
    assert set(update.others) == {name for name, value in buffers.items() if value.is_floating_point()}
    for name, value in update.others.items():
        assert torch.allclose(value, buffers[name], rtol=1e-6, atol=1e-12), name


def test_statistics_that_are_a_plain_average(batch: Batch) -> None:
    training = LocalTraining(epochs=2, batch_size=4, lr=0.05, sends_statistics=True)
    module, batch = residual(momentum=None), Batch(batch.x.double(), batch.y)
    client, state = client_for(module, training, batch)
    with seeded(9):
        update, _ = client.round(state, batch, 0)
    orders = [torch.arange(IMAGES), client.draws("order", 0).permutation(IMAGES)]
    with seeded(9):
        after = trained(module, (batch.x - 0.5) / 0.25, batch.y, training, orders)
    assert torch.allclose(update.others["norm.running_var"], after.norm.running_var, rtol=1e-6)  # type: ignore[union-attr,arg-type]


def test_the_mode_of_evaluation_sends_another_update(batch: Batch) -> None:
    module, batch = residual(), Batch(batch.x.double(), batch.y)
    updates = {}
    for mode in ("train", "eval"):
        client, state = client_for(module, LocalTraining(mode=mode, sends_statistics=True), batch)  # type: ignore[arg-type]
        updates[mode], _ = client.round(state, batch, 0)
    assert cosine_and_ratio(updates["eval"].tensors, updates["train"].tensors)[0] < 0.9
    expected = sent(module, (batch.x - 0.5) / 0.25, batch.y, LocalTraining(mode="eval"))
    assert cosine_and_ratio(updates["eval"].tensors, expected) == pytest.approx((1.0, 1.0), abs=1e-9)
    assert updates["eval"].others == {}


def test_statistics_stay_on_the_client_unless_they_are_sent(batch: Batch) -> None:
    client, state = client_for(residual(), LocalTraining(), Batch(batch.x.double(), batch.y))
    update, _ = client.round(state, Batch(batch.x.double(), batch.y), 0)
    assert update.others == {}


def test_frozen_parameters_are_not_sent(batch: Batch) -> None:
    module, training = residual(), LocalTraining(frozen=("first.*", "norm.*", "second*", "again.*"))
    freeze(module, training.frozen)
    client, state = client_for(module, training, Batch(batch.x.double(), batch.y))
    update, _ = client.round(state, Batch(batch.x.double(), batch.y), 0)
    assert list(update.tensors) == ["head.weight", "head.bias"]
    with pytest.raises(UserError, match=r"no parameter of the model is named like 'back\.\*'"):
        freeze(module, ["back.*"])


# -- mini-batches ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 4), st.none() | st.integers(1, 50), st.integers(1, 5), st.booleans())
def test_every_epoch_takes_every_image_once(images: int, epochs: int, size: int | None, accumulate: int, known: bool) -> None:
    training = LocalTraining(epochs=epochs, batch_size=size, lr=0.1, accumulate=accumulate)
    steps = training.steps(images, None if known else generator(0))
    parts = [torch.arange(images)[part] for step in steps for part in step]
    assert len(parts) == epochs * -(-images // (size or images))
    assert [len(step) for step in steps[:-1]] == [accumulate] * (len(steps) - 1)
    taken = torch.cat(parts).view(epochs, images)
    assert torch.equal(taken.sort(dim=1).values, torch.arange(images).expand(epochs, images))
    assert torch.equal(taken[0], torch.arange(images))
    assert all(1 <= len(part) <= (size or images) for part in parts)


def test_later_epochs_have_orders_that_no_one_else_knows() -> None:
    training = LocalTraining(epochs=3, batch_size=4, lr=0.1)
    first, other = (torch.cat([p for s in training.steps(32, generator(k))[8:] for p in s]) for k in (0, 1))  # type: ignore[misc]
    assert not torch.equal(first, other)
    assert not torch.equal(first[:32], first[32:])
    assert training.steps(32) == replace(training, shuffle=False).steps(32, generator(0))


def within(count: float, draws: int, rate: float) -> bool:
    """Within 4.5 standard deviations of a binomial distribution."""
    return abs(count - draws * rate) <= 4.5 * (draws * rate * (1 - rate)) ** 0.5


def test_poisson_samples_hold_every_image_by_itself() -> None:
    images, size, epochs = 40, 8, 1500
    training = LocalTraining(epochs=epochs, batch_size=size, lr=0.1, sampling="poisson")
    steps = training.steps(images, generator(100))
    assert len(steps) == training.number_of_steps(images) == epochs * 5
    held = torch.zeros(len(steps), images)
    for row, (part,) in zip(held, steps, strict=True):
        assert isinstance(part, Tensor) and len(part.unique()) == len(part)
        row[part] = 1
    count, rate = len(steps), size / images
    assert within(float(held.sum()), count * images, rate)
    assert all(within(float(n), count, rate) for n in held.sum(dim=0))  # no image more often than others
    assert all(within(float(n), count, rate**2) for n in (held[:, 0:1] * held[:, 1:]).sum(dim=0))  # nor with another
    assert all(within(float((held[:-1, i] * held[1:, i]).sum()), count - 1, rate**2) for i in range(5))  # nor in a row
    sizes = held.sum(dim=1)
    assert float(sizes.var()) == pytest.approx(images * rate * (1 - rate), rel=0.1)
    for k in (4, 8, 12):
        chance = math.comb(images, k) * rate**k * (1 - rate) ** (images - k)
        assert within(float((sizes == k).sum()), count, chance)


def test_poisson_samples_may_be_empty_and_every_rate_is_kept() -> None:
    training = LocalTraining(epochs=1000, batch_size=1, lr=0.1, sampling="poisson")
    sizes = torch.tensor([len(part) for (part,) in training.steps(3, generator(101))])  # type: ignore[arg-type]
    assert within(float((sizes == 0).sum()), 3000, (2 / 3) ** 3)
    whole = LocalTraining(batch_size=50, lr=0.1, sampling="poisson")
    assert [len(part) for (part,) in whole.steps(3, generator(0))] == [3]  # type: ignore[arg-type]
    assert (training.expected_size(3), whole.expected_size(3), LocalTraining().expected_size(3)) == (1, 3, None)


def test_a_poisson_round_is_the_loop_that_divides_by_the_expected_size(batch: Batch) -> None:
    training = LocalTraining(epochs=3, batch_size=2, lr=0.5, mode="eval", sampling="poisson")
    module, batch = residual(), Batch(batch.x.double(), batch.y)
    client, state = client_for(module, training, batch)
    update, _ = client.round(state, batch, 7)
    steps = training.steps(IMAGES, client.draws("order", 7))
    assert any(len(part) == 0 for (part,) in steps) and any(len(part) > 2 for (part,) in steps)  # type: ignore[arg-type]
    moving = copy.deepcopy(module).eval()
    optimizer = torch.optim.SGD(moving.parameters(), lr=0.5)
    for (part,) in steps:
        optimizer.zero_grad()
        x = (batch.x[part] - 0.5) / 0.25
        (nn.functional.cross_entropy(moving(x), batch.y[part], reduction="sum") / 2).backward()
        optimizer.step()
    for name, value in moving.named_parameters():
        assert torch.allclose(update.tensors[name], value.detach() - state[name], atol=1e-10), name


def test_poisson_sampling_is_refused_where_it_means_nothing(batch: Batch) -> None:
    for fields in ({}, {"lr": 0.1}):
        with pytest.raises(UserError, match="set a learning rate and a batch size"):
            LocalTraining(sampling="poisson", **fields)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="BatchNorm in training mode couples"):
        client_for(residual(), LocalTraining(batch_size=2, lr=0.1, sampling="poisson"), batch)
    training = LocalTraining(batch_size=2, lr=0.1, sampling="poisson", mode="eval")
    with pytest.raises(UserError, match="'mixup' needs images in every batch"):
        client_for(residual(), training, batch, "mixup")


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"batch_size": 0}, {"lr": 0.0}, {"accumulate": 0}])
def test_a_round_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LocalTraining(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"epochs": 2}, {"batch_size": 2}, {"optimizer": "adam"}])
def test_local_training_needs_a_learning_rate(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match="needs a learning rate"):
        LocalTraining(**wrong)  # type: ignore[arg-type]


def test_an_optimizer_that_does_not_exist_is_named() -> None:
    with pytest.raises(UserError, match="There are: sgd, adam, adamw"):
        LocalTraining(lr=0.1, optimizer="lion")
    with pytest.raises(UserError, match="nesterov"):
        LocalTraining(lr=0.1, optimizer="sgd:speed=3")


# -- what the adversary makes of it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "sgd:momentum=0.9,nesterov=true,weight_decay=0.01"])
def test_the_difference_of_a_single_step_is_seen_as_a_gradient(optimizer: str, batch: Batch) -> None:
    module, batch = residual(), Batch(batch.x.double(), batch.y)
    training = LocalTraining(batch_size=IMAGES, lr=0.05, optimizer=optimizer, mode="eval")
    client, state = client_for(module, training, batch)
    update, _ = client.round(state, batch, 0)
    seen = observe(client.task, [Sighting(state, update)], training=training)
    gradient = sent(module, (batch.x - 0.5) / 0.25, batch.y, LocalTraining(mode="eval"))
    assert seen.update.kind == seen.knowledge.training.kind == "gradient"
    assert cosine_and_ratio(seen.update.tensors, gradient)[0] == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("training", [LocalTraining(epochs=2, lr=0.1), LocalTraining(lr=0.1, optimizer="adam")])
def test_other_differences_are_no_gradients(training: LocalTraining, batch: Batch) -> None:
    module, batch = residual(), Batch(batch.x.double(), batch.y)
    client, state = client_for(module, training, batch)
    update, _ = client.round(state, batch, 0)
    assert observe(client.task, [Sighting(state, update)], training=training).update.kind == "delta"


def test_an_adversary_does_not_know_what_dropout_dropped(batch: Batch) -> None:
    module = residual()
    client, state = client_for(module, LocalTraining(), Batch(batch.x.double(), batch.y))
    x, y = (batch.x.double() - 0.5) / 0.25, batch.y
    seen = observe(client.task, [Sighting(state, Update(client.task.model.gradient(state, x, y)))])
    first, again = (seen.model.gradient(state, x, y) for _ in range(2))
    assert all(torch.equal(first[n], again[n]) for n in first)  # so that a line search has a function to search
    drawn, other = (client.task.model.gradient(state, x, y) for _ in range(2))
    assert not torch.equal(drawn["head.weight"], other["head.weight"])
    quiet = copy.deepcopy(module)
    quiet.drop.p = 0.0  # type: ignore[union-attr]
    assert cosine_and_ratio(first, sent(quiet, x, y, LocalTraining())) == pytest.approx((1.0, 1.0), abs=1e-9)


@pytest.mark.parametrize("text", ["sgd", "sgd:momentum=0.9", "sgd:momentum=0.9,nesterov=true", "adam"])
def test_the_weights_of_gradients_and_their_middle_are_those_of_the_plain_loop(text: str) -> None:
    """Under a loss that is linear in the weights, the gradient of a step is the mean of its images."""
    training = LocalTraining(epochs=2, batch_size=2, lr=0.1, optimizer=text, shuffle=False)
    module, x = nn.Sequential(nn.Flatten(), nn.Linear(7, 1, bias=False)).double(), generator(0)
    images = torch.rand(6, 1, 1, 7, generator=x, dtype=torch.float64) if "adam" not in text else torch.ones(6, 1, 1, 7).double()
    loop = OPTIMIZERS | {"sgd:momentum=0.9,nesterov=true": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True)}

    def path(batches: Tensor) -> Tensor:
        net = copy.deepcopy(module)
        optimizer, places = loop[text](net.parameters(), 0.1), [net[1].weight.detach().clone()]
        for batch in batches:
            optimizer.zero_grad()
            net(batch).mean().backward()
            optimizer.step()
            places.append(net[1].weight.detach().clone())
        return (torch.stack(places) - places[0])[:, 0]

    weights = training.gradient_weights(6)
    batches = images.unflatten(0, (3, 2)).repeat(2, 1, 1, 1, 1)
    assert torch.allclose(path(batches)[-1], -0.1 * weights @ batches.flatten(2).mean(1), atol=1e-6)
    even = path(torch.ones_like(batches))[:, 0]
    assert training.middle(6) == pytest.approx(float(weights @ even[:-1] / (weights.sum() * even[-1])), abs=1e-6)
