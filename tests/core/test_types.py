"""The vocabulary: what a round is made of, and that nothing private can be reached from what an attack receives."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from gradveil.client import Client, prepare_client
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Knowledge, Observation, Sighting, Trace, observe
from gradveil.core.randomness import generator
from gradveil.core.types import Batch, Level
from gradveil.data import DataSet
from gradveil.defenses import parse
from gradveil.defenses.base import Setup
from gradveil.models import build

LEVELS: tuple[Level, ...] = ("realistic", "paper", "upper-bound")
# One of each stage and kind of secret; the costly ones with few steps.
DEFENSES = (
    "none",
    "prune",
    "gaussian",
    "mixup",
    "instahide",
    "precode:k=8",
    "ats",
    "soteria",
    "dpsgd",
    "graddefense",
    "dcs2:steps=2",
    "refiner:steps=2,epochs=1",
    "mixup+prune:ratio=0.5",
)
DEEP = LocalTraining(epochs=2, batch_size=2, lr=0.1)


# -- a round -----------------------------------------------------------------------------------------------------------


def test_a_batch_has_as_many_labels_as_images() -> None:
    with pytest.raises(ValueError, match="labels"):
        Batch(torch.zeros(2, 1, 3, 3), torch.zeros(3))
    with pytest.raises(ValueError, match="images"):
        Batch(torch.zeros(2, 9), torch.zeros(2))
    soft = Batch(torch.zeros(2, 1, 3, 3), torch.tensor([[0.2, 0.8], [0.6, 0.4]]))
    assert soft.hard_labels.tolist() == [1, 0]


def test_a_random_stream_is_its_key_and_nothing_else() -> None:
    def first(*key: int | str) -> float:
        return float(torch.rand((), generator=generator(*key)))

    assert first(0, "data", 3) == first(0, "data", 3)
    others = [first(0, "data", 3), first(0, "data", 4), first(1, "data", 3), first(0, "round", 3), first(0, "data3")]
    assert len(set(others)) == len(others)


# -- what an attack receives -------------------------------------------------------------------------------------------


def victim(
    data: DataSet, defense: str, level: Level, training: LocalTraining | None = None
) -> tuple[Observation, Trace, Client]:
    training, method = training or LocalTraining(), parse(defense)
    module = build("lenet", input_shape=data.input_shape, num_classes=data.num_classes)
    function = ModelFunction(method.model(module, data.input_shape))
    state = function.state()
    task = data.task(function)
    client = prepare_client(method, training, Setup(task, state, data.private, data.public))
    # Labels 1 2 0 2: no other tensor of whole numbers is like them.
    update, trace = client.round(state, data.private[torch.tensor([10, 20, 30, 41])], 0)
    known = {"level": level, "training": training, "defense": method, "public": data.public, "trace": trace}
    return observe(task, [Sighting(state, update)], **known), trace, client


def reachable(root: object) -> Iterator[object]:
    """Everything that can be reached from an object, but for modules, classes and what a function's module holds."""
    met, waiting = {id(root)}, [root]
    while waiting:
        thing = waiting.pop()
        yield thing
        if isinstance(thing, types.FunctionType):  # what it closes over and its defaults, not its module's names
            found: list[object] = [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
        else:
            found = gc.get_referents(thing)
            if isinstance(thing, Tensor) and thing.is_leaf:
                found.append(thing.grad)
        for other in found:
            if id(other) not in met and not isinstance(other, (type, types.ModuleType, types.CodeType)):
                met.add(id(other))
                waiting.append(other)


def tensors_of(root: object) -> list[Tensor]:
    return [t for t in reachable(root) if isinstance(t, Tensor)]


def storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def images_in(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor as images, if it can be read so."""
    pixels = torch.Size(shape).numel()
    whole = t.numel() and t.numel() % pixels == 0 and t.is_floating_point()
    return t.detach().reshape(-1, pixels).float() if whole else torch.empty(0, pixels)


def test_the_walk_finds_what_is_hidden(shapes: DataSet) -> None:
    """The test below means nothing unless the walk goes through closures, attributes, containers and graphs."""
    secret = torch.rand(3)

    class Holder:
        def __init__(self, inner: object):
            self.inner = inner

    hidden = [Holder(secret), {"a": [(secret,)]}, lambda: secret, nn.ParameterDict({"a": nn.Parameter(secret)})]
    for root in hidden:
        assert storage(secret) in {storage(t) for t in tensors_of(root)}
    observation, *_ = victim(shapes, "none", "realistic")
    assert storage(observation.update.tensors["fc.weight"]) in {storage(t) for t in tensors_of(observation)}
    assert storage(shapes.public.x) in {storage(t) for t in tensors_of(observation)}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("defense", DEFENSES)
def test_nothing_private_can_be_reached(defense: str, level: Level, shapes: DataSet) -> None:
    observation, trace, _ = victim(shapes, defense, level)
    found = tensors_of(observation)
    assert len(found) > 10
    assert not [type(t) for t in found if t.grad_fn is not None], "a graph leads back to what it was computed from"

    private = [shapes.private.x, shapes.private.y, trace.original.x, trace.original.y, trace.fed.x, trace.fed.y]
    kept = {storage(t) for t in (*private, *trace.secrets.values())}
    assert not [t.shape for t in found if storage(t) in kept]

    granted = {id(t) for t in observation.knowledge.secrets.values()}
    own = torch.cat([shapes.private.x, trace.fed.x]).flatten(1)
    own = torch.cat([own, (own - shapes.mean) / shapes.std])
    for t in found:
        images = images_in(t, shapes.input_shape)
        if id(t) not in granted and len(images):
            assert torch.cdist(images, own).min() > 1e-3

    labels = [t for t in found if t.shape == trace.fed.y.shape and torch.equal(t.to(trace.fed.y), trace.fed.y)]
    assert [id(t) for t in labels] == ([] if level == "realistic" else [id(observation.knowledge.labels)])


@pytest.mark.parametrize("defense", ["none", "mixup", "gaussian"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_level_grants_what_it_says(defense: str, level: Level, shapes: DataSet) -> None:
    observation, trace, _ = victim(shapes, defense, level)
    known = observation.knowledge
    assert known.level == level
    assert known.batch_size == 4
    if level == "realistic":
        assert known.labels is None
    else:
        assert known.labels is not None
        assert torch.equal(known.labels, trace.fed.y)  # those of what entered the network: soft under MixUp
        assert known.labels.ndim == (2 if defense == "mixup" else 1)
    assert set(known.secrets) == (set(trace.secrets) if level == "upper-bound" else set())
    words = known.granted()
    assert ("labels" in words) == (level != "realistic")
    assert ("secret: mixing" in words) == (level == "upper-bound" and defense == "mixup")


def test_several_local_steps_leak_no_more(shapes: DataSet) -> None:
    observation, trace, _ = victim(shapes, "mixup", "realistic", DEEP)
    kept = {storage(t) for t in (trace.original.x, trace.fed.x, trace.fed.y, *trace.secrets.values(), shapes.private.x)}
    assert not [t for t in tensors_of(observation) if storage(t) in kept or t.grad_fn is not None]


def test_what_was_observed_is_a_copy(shapes: DataSet) -> None:
    observation, trace, _ = victim(shapes, "gaussian", "upper-bound")
    labels = observation.knowledge.labels
    assert labels is not None
    before = {n: t.clone() for n, t in observation.update.tensors.items()}
    trace.fed.y.add_(1)
    shapes_mean = observation.task.mean.clone()
    try:
        assert not torch.equal(labels, trace.fed.y)
        shapes.mean.add_(1)
        assert torch.equal(observation.task.mean, shapes_mean)
    finally:
        shapes.mean.sub_(1)
    copied = observation.update.received(observation.model.parameters(observation.state))
    copied.tensors["fc.bias"].zero_()
    assert torch.equal(observation.update.tensors["fc.bias"], before["fc.bias"])


def test_without_a_trace_nothing_can_be_granted(shapes: DataSet) -> None:
    observation, *_ = victim(shapes, "mixup", "realistic")
    again = observe(observation.task, list(observation.seen), level="upper-bound")
    entries = sum(t.numel() for t in observation.update.tensors.values())
    assert again.knowledge == Knowledge(level="upper-bound", batch_size=4, entries=entries)
