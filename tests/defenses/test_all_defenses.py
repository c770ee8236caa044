"""What every defense keeps to, for all that are registered: a new one is tested the moment it exists."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from gradveil.client import prepare_client
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Trace
from gradveil.core.types import Batch, Tensors, Update
from gradveil.data import DataSet
from gradveil.defenses import parse
from gradveil.defenses.base import STAGES, Defense, Setup
from gradveil.defenses.data.loda import extractors
from gradveil.defenses.registry import registry

EVERY = registry.names()
# Where a defense optimises or trains, only shortly; and a bound that the small gradients here do reach.
FEW = {"steps": 2, "epochs": 1, "norm": 0.01}


@pytest.fixture(scope="module", autouse=True)
def hardly_trained() -> Iterator[None]:
    """LODA's extractor after a few steps: what it has learned does not matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extractors, "STEPS", 3)
        yield


def quick(name: str) -> Defense:
    fields = {f.name for f in dataclasses.fields(registry[name])}  # type: ignore[arg-type]
    return registry[name](**{k: v for k, v in FEW.items() if k in fields})


class Net(nn.Module):
    """A convolution with BatchNorm, dropout, and two linear layers of which the last is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 3)
        self.conv, self.norm = nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4)
        self.first, self.drop = nn.Linear(100, 16), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.last(self.drop(torch.tanh(self.first(x))))


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return Net()


def rounds(
    data: DataSet, defense: Defense, images: int, training: LocalTraining | None = None, mode: str = "eval"
) -> tuple[Update, Trace, Tensors]:
    """One round, and the tensors that the network under this defense has."""
    training = training or LocalTraining()
    function = ModelFunction(defense.model(network(), data.input_shape), mode=mode)  # type: ignore[arg-type]
    state = function.state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)  # for dropout in training, which torch draws globally
        client = prepare_client(defense, training, Setup(data.task(function), state, data.private, data.public))
        update, trace = client.round(state, data.private[:images], 0)
    return update, trace, function.parameters(state)


def same(one: Tensors, other: Tensors) -> bool:
    return list(one) == list(other) and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("images", [1, 16])
@pytest.mark.parametrize("name", EVERY)
def test_it_keeps_names_shapes_and_precision(name: str, images: int, shapes: DataSet) -> None:
    update, trace, expected = rounds(shapes, quick(name), images)
    assert list(update.tensors) == list(expected)
    for tensor, like in zip(update.tensors.values(), expected.values(), strict=True):
        assert tensor.shape == like.shape
        assert tensor.dtype == like.dtype
        assert torch.isfinite(tensor).all()
        assert not tensor.requires_grad
    assert (update.kind, update.examples) == ("gradient", images)
    assert torch.equal(trace.original.x, shapes.private.x[:images])
    assert trace.fed.x.shape == trace.original.x.shape
    assert torch.isfinite(trace.fed.x).all()
    assert all(isinstance(t, Tensor) and not t.requires_grad for t in trace.secrets.values())


@pytest.mark.parametrize("name", EVERY)
def test_it_works_where_batch_norm_and_dropout_train(name: str, shapes: DataSet) -> None:
    update, _, expected = rounds(shapes, quick(name), 4, mode="train")
    assert list(update.tensors) == list(expected)
    assert all(torch.isfinite(t).all() for t in update.tensors.values())


@pytest.mark.parametrize("name", EVERY)
def test_it_works_over_several_local_steps(name: str, shapes: DataSet) -> None:
    update, trace, expected = rounds(shapes, quick(name), 4, LocalTraining(epochs=2, batch_size=2, lr=0.1))
    assert update.kind == "delta"
    assert [t.shape for t in update.tensors.values()] == [t.shape for t in expected.values()]
    assert all(torch.isfinite(t).all() for t in update.tensors.values())
    assert len(trace.fed) == 4


@pytest.mark.parametrize("name", EVERY)
def test_only_none_sends_the_plain_gradient(name: str, shapes: DataSet) -> None:
    defense = quick(name)
    update, trace, _ = rounds(shapes, defense, 4)
    function = ModelFunction(defense.model(network(), shapes.input_shape))
    plain = function.gradient(function.state(), (trace.original.x - shapes.mean) / shapes.std, trace.original.y)
    assert same(update.tensors, plain) == (name == "none")


def test_none_is_the_identity_at_every_stage(shapes: DataSet) -> None:
    update, trace, _ = rounds(shapes, parse("none"), 4)
    assert trace.fed is not trace.original
    assert torch.equal(trace.fed.x, trace.original.x)
    assert torch.equal(trace.fed.y, trace.original.y)
    assert trace.secrets == {}
    assert parse("none").stages == []
    module = network()
    assert parse("none").model(module, shapes.input_shape) is module
    assert update.examples == 4


@pytest.mark.parametrize("name", EVERY)
def test_the_clients_own_data_and_model_are_left_alone(name: str, shapes: DataSet) -> None:
    kept = [t.clone() for t in (shapes.private.x, shapes.private.y, shapes.public.x)]
    module = network()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    defense = quick(name)
    defense.model(module, shapes.input_shape)
    rounds(shapes, defense, 2)
    assert all(torch.equal(a, b) for a, b in zip(kept, (shapes.private.x, shapes.private.y, shapes.public.x), strict=True))
    assert same({n: t for n, t in module.state_dict().items()}, before)


@pytest.mark.parametrize("name", EVERY)
def test_chance_is_declared_and_comes_from_the_key(name: str, shapes: DataSet) -> None:
    defense = quick(name)
    function = ModelFunction(defense.model(network(), shapes.input_shape))
    state = function.state()
    setup = Setup(shapes.task(function), state, shapes.private, shapes.public)
    client = prepare_client(defense, LocalTraining(), setup)
    batch = Batch(shapes.private.x[:3], shapes.private.y[:3])
    one, again, other = (client.round(state, batch, key)[0].tensors for key in (0, 0, 1))
    assert same(one, again)
    assert same(one, other) != defense.random


@pytest.mark.parametrize("name", EVERY)
def test_it_can_be_read_and_read_about(name: str) -> None:
    cls = registry[name]
    own = inspect.getdoc(cls)
    assert own
    assert own != inspect.getdoc(Defense)
    assert inspect.getmodule(cls).__doc__  # type: ignore[union-attr]
    plain, changed = cls(), quick(name)
    assert plain.spec == name
    for defense in (plain, changed):
        assert parse(defense.spec) == defense
        assert parse(f"{defense.spec}+none").parts[0] == defense
    assert set(plain.stages) <= set(STAGES)
    assert bool(plain.stages) == (name != "none")
    assert isinstance(plain.random, bool)
    assert plain.counters == ()  # which attacks count is declared by attacks
    with pytest.raises(dataclasses.FrozenInstanceError):
        plain.name_of_no_field = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", EVERY)
def test_it_lives_in_the_folder_of_its_stage(name: str) -> None:
    cls = registry[name]
    folder = cls.__module__.split(".")[2]
    assert folder in STAGES
    assert name == "none" or folder in cls().stages
