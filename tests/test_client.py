"""The honest client: what it sends, what the judge may know of it, and in which order a defense's stages act."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_loop import OPTIMIZERS, sent
from torch import Tensor, nn

from gradveil.attacks.suite import Counters
from gradveil.client import Client, prepare_client
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.randomness import generator
from gradveil.core.types import Batch, Tensors
from gradveil.data import DataSet
from gradveil.defenses import parse
from gradveil.defenses.base import Chain, Defense, Setup, Step
from gradveil.models import build

BATCH = torch.tensor([3, 10, 20, 33, 47])


def client_of(
    data: DataSet, defense: str | Defense, training: LocalTraining | None = None, seed: int = 0
) -> tuple[Client, Tensors, nn.Module]:
    method = parse(defense)
    module = build("lenet", input_shape=data.input_shape, num_classes=data.num_classes)
    function = ModelFunction(method.model(module, data.input_shape))
    state = function.state()
    setup = Setup(data.task(function), state, data.private, data.public, seed)
    return prepare_client(method, training or LocalTraining(), setup), state, module


def equal(one: Tensors, other: Tensors) -> bool:
    return list(one) == list(other) and all(torch.equal(one[n], other[n]) for n in one)


def close(one: Tensors, other: Tensors, limit: float = 1e-6) -> bool:
    assert list(one) == list(other)
    size = sum(float(g.square().sum()) for g in other.values()) ** 0.5
    return all(float((one[n] - other[n]).norm()) <= limit * size for n in one)


# -- undefended --------------------------------------------------------------------------------------------------------


def test_an_undefended_client_sends_the_plain_gradient(shapes: DataSet) -> None:
    client, state, module = client_of(shapes, "none")
    batch = shapes.private[BATCH]
    update, trace = client.round(state, batch, 0)
    F.cross_entropy(module.eval()((batch.x - shapes.mean) / shapes.std), batch.y).backward()
    assert close(update.tensors, {n: p.grad for n, p in module.named_parameters()})  # type: ignore[misc]
    assert (update.kind, update.examples) == ("gradient", 5)
    assert torch.equal(trace.original.x, batch.x)
    assert torch.equal(trace.fed.x, batch.x)
    assert torch.equal(trace.fed.y, batch.y)
    assert trace.secrets == {}
    assert not any(t.requires_grad for t in update.tensors.values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sizes", [{"epochs": 3}, {"epochs": 3, "batch_size": 2}, {"batch_size": 2, "accumulate": 2}])
def test_a_delta_is_that_of_torch(optimizer: str, sizes: dict[str, int], shapes: DataSet) -> None:
    training = LocalTraining(lr=0.05, optimizer=optimizer, **sizes)  # type: ignore[arg-type]
    client, state, module = client_of(shapes, "none", training)
    batch = shapes.private[BATCH]
    update, trace = client.round(state, batch, 0)
    x = (batch.x - shapes.mean) / shapes.std
    assert close(update.tensors, sent(module, x, batch.y, training, orders_of(client, training)), 1e-5)
    assert update.kind == "delta"
    assert torch.equal(trace.fed.x, batch.x)  # each image once, however many epochs there were


def orders_of(client: Client, training: LocalTraining) -> list[Tensor]:
    """In which order each epoch of the round 0 takes the images: a new one from the second on, where there are mini-batches."""
    rng, images, small = client.draws("order", 0), len(BATCH), (training.batch_size or len(BATCH)) < len(BATCH)
    return [torch.arange(images) if not epoch or not small else rng.permutation(images) for epoch in range(training.epochs)]


def test_the_state_of_the_round_is_left_alone(shapes: DataSet) -> None:
    client, state, _ = client_of(shapes, "gaussian", LocalTraining(epochs=2, lr=0.1))
    before = {n: t.clone() for n, t in state.items()}
    client.round(state, shapes.private[BATCH], 0)
    assert equal(state, before)


# -- draws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("defense", ["gaussian:std=0.1", "mixup", "precode:k=8", "ats", "dpsgd"])
def test_a_draw_is_named_by_its_key_alone(defense: str, shapes: DataSet) -> None:
    client, state, _ = client_of(shapes, defense)
    batch = shapes.private[BATCH]
    first, trace = client.round(state, batch, 7, "again")
    client.round(state, batch, 8)  # what happens in between does not matter
    again, same = client.round(state, batch, 7, "again")
    assert equal(first.tensors, again.tensors)
    assert equal(trace.secrets, same.secrets)
    other_key, _ = client.round(state, batch, 7, "once")
    other_seed, _ = client_of(shapes, defense, seed=1)[0].round(state, batch, 7, "again")
    assert not equal(first.tensors, other_key.tensors)
    assert not equal(first.tensors, other_seed.tensors)


@pytest.mark.parametrize("defense", ["none", "prune", "clip", "quantize", "soteria"])
def test_a_defense_without_chance_sends_the_same_whatever_the_key(defense: str, shapes: DataSet) -> None:
    client, state, _ = client_of(shapes, defense)
    one, other = (client.round(state, shapes.private[BATCH], key)[0] for key in (0, 1))
    assert equal(one.tensors, other.tensors)
    assert not parse(defense).random


def test_the_global_random_stream_is_not_touched(shapes: DataSet) -> None:
    before = torch.random.get_rng_state()
    for defense in ("gaussian", "mixup", "precode:k=8", "dcs2:steps=1", "refiner:steps=1,epochs=1"):
        client, state, _ = client_of(shapes, defense)
        client.round(state, shapes.private[BATCH], 0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_draw_of_a_random_model_is_a_secret_and_explains_the_update(shapes: DataSet) -> None:
    client, state, _ = client_of(shapes, "precode:k=8")
    batch = shapes.private[BATCH]
    update, trace = client.round(state, batch, 0)
    (name,) = trace.secrets
    assert trace.secrets[name].shape == (5, 8)
    again = client.task.model.gradient(state, (batch.x - shapes.mean) / shapes.std, batch.y, trace.secrets)
    assert close(update.tensors, again)


# -- combinations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "prune:ratio=0.5+quantize",
        "quantize+prune:ratio=0.5",
        "clip:norm=0.1+prune:ratio=0.9+quantize:bits=16",
        "prune:ratio=0.9+clip:norm=0.1",
        "gaussian:std=0.1+prune:ratio=0.5+laplace:scale=0.1",
    ],
)
def test_a_combination_is_its_parts_one_after_the_other(spec: str, shapes: DataSet) -> None:
    batch = shapes.private[BATCH]
    plain, state, _ = client_of(shapes, "none")
    tensors = plain.round(state, batch, 4)[0].tensors
    method = parse(spec)
    rng = generator(0, "round", 4)
    for part in method.parts:
        step = Step(plain.task, state, batch, rng)
        tensors = part.update(tensors, step)
    client, _, _ = client_of(shapes, spec)
    assert equal(client.round(state, batch, 4)[0].tensors, tensors)


def test_the_order_of_a_combination_matters(shapes: DataSet) -> None:
    batch = shapes.private[BATCH]
    one, state, _ = client_of(shapes, "prune:ratio=0.9+gaussian:std=0.1")
    other, _, _ = client_of(shapes, "gaussian:std=0.1+prune:ratio=0.9")
    noisy, sparse = (c.round(state, batch, 0)[0].tensors["fc.weight"] for c in (one, other))
    assert int((noisy == 0).sum()) == 0
    assert float((sparse == 0).float().mean()) > 0.85


def test_a_combination_speaks_for_its_parts() -> None:
    found = parse("mixup+precode+prune:ratio=0.5+dcs2+gaussian+laplace")
    assert isinstance(found, Chain)
    assert found.stages == ["model", "batch", "gradient", "update"]
    assert found.random
    assert not parse("prune+clip").random
    counters = Counters.of(found).accepted
    assert len(counters) == len(set(counters))
    assert {"mixup-decode", "prune-mask", "noise-likelihood"} <= set(counters)
    assert Chain([parse("prune+clip"), parse("none")]).parts == parse("prune+clip+none").parts
    assert parse("none").stages == []
    assert parse("loda").stages == ["data"]


class Recorder(Defense):
    """Notes each stage as it is called, and adds its number to pixels or tensors."""

    def __init__(self, number: float, log: list[str]):
        self.number, self.log = number, log

    def _note(self, stage: str, step: Step | None = None) -> None:
        self.log.append(f"{stage}{self.number:g}")
        assert step is None or step.memory == self.number, "a part of a combination has its own memory"

    def prepare(self, setup: Setup) -> Any:
        self._note("prepare")
        return self.number

    def model(self, module: nn.Module, input_shape: tuple[int, int, int]) -> nn.Module:
        self._note("model")
        return module

    def data(self, batch: Batch, step: Step) -> Batch:
        self._note("data", step)
        step.secrets[f"data{self.number:g}"] = torch.tensor(self.number)
        return Batch(batch.x + self.number, batch.y)

    def batch(self, batch: Batch, step: Step) -> Batch:
        self._note("batch", step)
        assert torch.equal(step.batch.x, batch.x), "a part sees the batch as the part before it left it"
        return Batch(batch.x * (1 + self.number), batch.y)

    def gradient(self, tensors: Tensors, step: Step) -> Tensors:
        self._note("gradient", step)
        step.secrets[f"gradient{self.number:g}"] = torch.tensor(self.number)
        return {n: g + self.number for n, g in tensors.items()}

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        self._note("update", step)
        return {n: g * 2 for n, g in tensors.items()}


def test_stages_act_in_the_journeys_order_each_as_often_as_it_should(shapes: DataSet) -> None:
    log: list[str] = []
    chain = Chain([Recorder(1, log), Recorder(2, log)])
    client, state, _ = client_of(shapes, chain, LocalTraining(epochs=2, batch_size=3, lr=0.1))
    assert log == ["model1", "model2", "prepare1", "prepare2"]
    log.clear()
    batch = shapes.private[BATCH]
    _, trace = client.round(state, batch, 0)
    each = ["batch1", "batch2", "gradient1", "gradient2"]
    assert log == ["data1", "data2", *each * 4, "update1", "update2"]
    assert torch.equal(trace.fed.x, (batch.x + 1 + 2) * 2 * 3)
    assert torch.equal(trace.original.x, batch.x)
    assert set(trace.secrets) == {"data1", "data2", "gradient1", "gradient2"}


def test_gradient_and_update_stages_change_what_is_sent(shapes: DataSet) -> None:
    class OnlyTensors(Recorder):
        data, batch = Defense.data, Defense.batch  # type: ignore[assignment]

    batch = shapes.private[BATCH]
    plain, state, _ = client_of(shapes, "none")
    client, _, _ = client_of(shapes, OnlyTensors(1, []))
    true, found = (c.round(state, batch, 0)[0].tensors for c in (plain, client))
    assert close(found, {n: (g + 1) * 2 for n, g in true.items()})
    # Under local training the gradient stage acts at every step, before the learning rate, the update stage once.
    training = LocalTraining(epochs=1, lr=0.1)
    local, _, _ = client_of(shapes, OnlyTensors(1, []), training)
    assert close(local.round(state, batch, 0)[0].tensors, {n: -0.1 * (g + 1) * 2 for n, g in true.items()}, 1e-5)


def test_what_the_data_stage_made_can_be_used_again(shapes: DataSet) -> None:
    log: list[str] = []
    client, state, _ = client_of(shapes, Recorder(1, log))
    batch = shapes.private[BATCH]
    protected, secrets = client.protect(state, batch, 0)
    assert torch.equal(protected.x, batch.x + 1)
    assert set(secrets) == {"data1"}
    log.clear()
    update, trace = client.round(state, batch, 0, protected=protected)
    assert "data1" not in log
    assert torch.equal(trace.original.x, batch.x)
    assert equal(update.tensors, client.round(state, batch, 0)[0].tensors)


def test_soft_labels_can_be_private_too(shapes: DataSet) -> None:
    client, state, module = client_of(shapes, "none")
    soft: Tensor = torch.rand(5, 3, generator=generator(0, "soft")).softmax(1)
    update, trace = client.round(state, Batch(shapes.private.x[BATCH], soft), 0)
    F.cross_entropy(module.eval()((shapes.private.x[BATCH] - shapes.mean) / shapes.std), soft).backward()
    assert close(update.tensors, {n: p.grad for n, p in module.named_parameters()})  # type: ignore[misc]
    assert torch.equal(trace.fed.hard_labels, soft.argmax(1))
