"""Gradients as a pure function: for every network the same as plain autograd gives, one victim at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from plain_loop import OPTIMIZERS, sent
from torch import Tensor, nn

from gradveil import models
from gradveil.core.errors import UserError
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.types import Tensors

CLASSES, VICTIMS = 5, 2
# The smallest images that each network takes, and narrow forms of the widest; the others are as published.
SMALLEST = {"convnet": 12, "densenet121": 8, "vgg16": 32, "flower-cnn": 20}
NARROW = {"convnet": "convnet:width=8", "resnet18": "resnet18:width=8", "resnet34": "resnet34:width=4"}
NARROW |= {"resnet20-4": "resnet20-4:width=8"}
HUGE = ("densenet121", "vgg16")  # single images only
EVERY = models.MODELS.names()


def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, int]:
    side = SMALLEST.get(name, 8)
    module = models.build(NARROW.get(name, name), input_shape=(1, side, side), num_classes=CLASSES, seed=1)
    return module.to(dtype), side


def victims(side: int, batch: int, dtype: torch.dtype = torch.float64, number: int = VICTIMS) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(batch)
    x = torch.randn(number, batch, 1, side, side, generator=rng, dtype=torch.float64)
    return x.to(dtype), torch.randint(CLASSES, (number, batch), generator=rng)


def plain(module: nn.Module, x: Tensor, y: Tensor, *, train: bool = False, steps: LocalTraining | None = None) -> Tensors:
    return sent(module, x, y, steps or LocalTraining(mode="train" if train else "eval"))


def error(found: Tensors, row: int, wanted: Tensors) -> float:
    """Relative to the whole update."""
    assert list(found) == list(wanted)
    gap = sum(float((found[n][row].detach() - wanted[n]).double().square().sum()) for n in wanted)
    return float((gap / sum(float(g.double().square().sum()) for g in wanted.values())) ** 0.5)


def agree(function: ModelFunction, module: nn.Module, x: Tensor, y: Tensor, limit: float, train: bool = False) -> None:
    found = function.gradients(function.state(), x, y)
    for row in range(len(x)):
        assert error(found, row, plain(module, x[row], y[row], train=train)) <= limit


@pytest.mark.parametrize("name", EVERY)
def test_gradients_of_every_network(name: str) -> None:
    module, side = made(name)
    function = ModelFunction(module)
    for batch in (1,) if name in HUGE else (1, 4):
        agree(function, module, *victims(side, batch), 1e-8)
    assert set(function._routes.values()) == {"vmap"}  # none of ours needs the slow route


@pytest.mark.parametrize("name", EVERY)
def test_gradients_of_every_network_in_single_precision(name: str) -> None:
    module, side = made(name, torch.float32)
    agree(ModelFunction(module), module, *victims(side, 1, torch.float32, number=1), 1e-3)


@pytest.mark.parametrize("name", EVERY)
def test_three_local_steps_of_every_network(name: str) -> None:
    module, side = made(name)
    function, training = ModelFunction(module), LocalTraining(epochs=3, lr=0.01, mode="eval")
    x, y = victims(side, 1, number=1 if name in HUGE else VICTIMS)
    found = function.updates(function.state(), x, y, training)
    for row in range(len(x)):
        assert error(found, row, plain(module, x[row], y[row], steps=training)) <= 1e-8


SIZES = ({"epochs": 3}, {"epochs": 2, "batch_size": 3}, {"epochs": 2, "batch_size": 1, "accumulate": 3})  # 3 of 4: and 1


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_local_training_is_that_of_torch(optimizer: str, sizes: dict[str, int]) -> None:
    training = LocalTraining(lr=0.05, optimizer=optimizer, mode="eval", **sizes)  # type: ignore[arg-type]
    module, side = made("lenet")
    function = ModelFunction(module)
    x, y = victims(side, 4)
    found = function.updates(function.state(), x, y, training)
    for row in range(VICTIMS):
        assert error(found, row, plain(module, x[row], y[row], steps=training)) <= 1e-8


def test_batch_norm_in_training_uses_the_batchs_own_statistics() -> None:
    module, side = made("convnet")
    x, y = victims(side, 4)
    agree(ModelFunction(module, mode="train"), module, x, y, 1e-8, train=True)
    # … and in evaluation the running ones, which is another gradient.
    away = error(ModelFunction(module).gradients(ModelFunction(module).state(), x, y), 0, plain(module, x[0], y[0], train=True))
    assert away > 1e-2


def test_a_state_is_an_input_like_any_other() -> None:
    module, side = made("lenet")
    function = ModelFunction(module)
    x, y = victims(side, 2)
    before = function.state()
    other = {n: t + 0.1 for n, t in before.items()}
    moved = copy.deepcopy(module)
    moved.load_state_dict(other)
    assert error(function.gradients(other, x, y), 0, plain(moved, x[0], y[0])) <= 1e-8
    assert all(torch.equal(t, function.state()[n]) for n, t in before.items())
    # Each victim with weights of its own.
    stacked = {n: torch.stack([before[n], other[n]]) for n in before}
    found = function.gradients(stacked, x, y, stacked=True)
    assert error(found, 0, plain(module, x[0], y[0])) <= 1e-8
    assert error(found, 1, plain(moved, x[1], y[1])) <= 1e-8


def test_the_users_module_is_left_alone() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(72, 5))
    module.train()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    x, y = victims(8, 4, torch.float32)
    for mode in ("eval", "train"):
        function = ModelFunction(module, mode=mode)  # type: ignore[arg-type]
        function.gradients(function.state(), x, y)
        function.gradient(function.state(), x[0], y[0])
    assert module.training
    assert module[2].inplace
    assert all(p.grad is None for p in module.parameters())
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())


def test_soft_labels() -> None:
    module, side = made("lenet")
    function = ModelFunction(module)
    x, y = victims(side, 3)
    agree(function, module, x, torch.rand(VICTIMS, 3, CLASSES, dtype=torch.float64).softmax(-1), 1e-8)
    hard = function.gradients(function.state(), x, y)
    same = function.gradients(function.state(), x, F.one_hot(y, CLASSES).double())
    assert all(torch.allclose(hard[n], same[n], atol=1e-12) for n in hard)


def test_one_gradient_is_the_first_row_of_many() -> None:
    module, side = made("lenet")
    function = ModelFunction(module)
    x, y = victims(side, 2)
    one, many = function.gradient(function.state(), x[1], y[1]), function.gradients(function.state(), x, y)
    assert error(many, 1, one) <= 1e-10
    assert not any(g.requires_grad for g in one.values())


def test_a_parameter_that_takes_no_part_has_a_gradient_of_zero() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.spare = nn.Linear(64, CLASSES), nn.Linear(3, 3)
            self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen * self.fc(x.flatten(1))

    function = ModelFunction(Spare())
    x, y = victims(8, 2, torch.float32)
    for found in (function.gradient(function.state(), x[0], y[0]), function.gradients(function.state(), x, y)):
        assert set(found) == {"fc.weight", "fc.bias", "spare.weight", "spare.bias"}  # what is frozen is not sent
        assert found["spare.weight"].abs().sum() == 0


def test_a_model_without_anything_to_train_is_told() -> None:
    with pytest.raises(UserError, match="no trainable parameters"):
        ModelFunction(nn.Flatten())


class Branching(nn.Module):
    """Control flow that depends on the image: nothing that vmap could follow."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.fc(x * 2) if float(x.sum()) > 0 else self.fc(torch.sin(x))


class Shortcut(nn.Module):
    """Runs under vmap but means something else there: an image on its own is not what a batch of them is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        inside = torch._C._functorch.is_batchedtensor(x)
        return self.fc(x.flatten(1)) * (3.0 if inside else 1.0)


@pytest.mark.parametrize("make", [Branching, Shortcut])
def test_what_does_not_vmap_falls_back_to_a_loop_and_is_right(make: Callable[[], nn.Module]) -> None:
    module = make().double()
    function = ModelFunction(module)
    x, y = victims(8, 3)
    x = torch.stack([x[0].abs(), -x[1].abs()])  # one victim on each side of the branch
    assert function.route(function.state(), x, y) == "loop"
    agree(function, module, x, y, 1e-8)
    training = LocalTraining(epochs=3, lr=0.1)
    found = function.updates(function.state(), x, y, training)
    assert error(found, 0, plain(module, x[0], y[0], steps=training)) <= 1e-8


@pytest.mark.parametrize("route", ["vmap", "loop"])
@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining(epochs=2, lr=0.5)])
def test_the_distance_of_updates_has_a_true_slope(route: str, training: LocalTraining) -> None:
    """A double backward pass against finite differences along random directions, in images and in soft labels."""
    module, side = made("lenet")
    function = ModelFunction(module)
    function._routes = dict.fromkeys([(torch.Size((2, 1, side, side)), s) for s in (False, True)], route)  # type: ignore[arg-type]
    state, (x, _) = function.state(), victims(side, 2)
    rng = torch.Generator().manual_seed(3)
    y = torch.randn(VICTIMS, 2, CLASSES, generator=rng, dtype=torch.float64).softmax(-1)
    wanted = function.updates(state, torch.randn(x.shape, generator=rng, dtype=x.dtype), y, training)

    def distance(x: Tensor, y: Tensor) -> Tensor:
        found = function.updates(state, x, y, training)
        return sum(((found[n] - wanted[n].detach()) ** 2).sum() for n in found)  # type: ignore[return-value]

    assert torch.autograd.gradcheck(distance, (x.requires_grad_(), y.requires_grad_()), eps=1e-6, rtol=1e-5, fast_mode=True)


def test_penalties_and_noise_enter_the_gradient() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, CLASSES)
            self.register_buffer("noise", None)

        def draw(self, images: int, rng: torch.Generator) -> Tensor:
            return torch.randn(images, 64, generator=rng, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.fc(x.flatten(1) + self.noise)
            return self.last

        def penalty(self) -> Tensor:
            return 0.1 * self.last.square().sum(1).mean()

    module = Noisy().double()
    function = ModelFunction(module)
    x, y = victims(8, 3)
    draws = [function.draw_noise(3, torch.Generator().manual_seed(i)) for i in range(VICTIMS)]
    assert list(draws[0]) == ["noise"]
    found = function.gradients(function.state(), x, y, {"noise": torch.stack([d["noise"] for d in draws])})
    for row in range(VICTIMS):
        hidden = x[row].flatten(1) + draws[row]["noise"]
        fc = copy.deepcopy(module.fc)
        (F.cross_entropy(fc(hidden), y[row]) + 0.1 * fc(hidden).square().sum(1).mean()).backward()
        assert torch.allclose(found["fc.weight"][row], fc.weight.grad, rtol=1e-8)  # type: ignore[arg-type]
