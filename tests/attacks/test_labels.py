"""Labels read from the classifier's gradient: how many of a batch's are right, and the rules on made-up gradients."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks import parse
from gradveil.attacks.labels import beliefs, infer_labels
from gradveil.attacks.labels.rules import bias_rule, expected_rule, idlg, llg, minimum_rule, rehearsed_rule
from gradveil.attacks.labels.targets import infer_targets
from gradveil.attacks.layers import classifier_name
from gradveil.attacks.unit_length import unit_length
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining
from gradveil.core.losses import find_loss
from gradveil.core.observation import Sighting, Trace, observe
from gradveil.core.randomness import generator
from gradveil.core.task import Task
from gradveil.core.types import Batch, Update
from gradveil.data import DataSet, load

LEVEL = {1: 1.0, 8: 0.85, 32: 0.75}


def share(found: Tensor, true: Tensor) -> float:
    """How much of the multiset is right."""
    return sum((Counter(found.tolist()) & Counter(true.tolist())).values()) / len(true)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        *[("lenet", size) for size in (1, 32)],
        *[("smlp", size) for size in (1, 8)],
        *[("flower-cnn", size) for size in (1, 8)],
        ("lenet", 8),
        ("smlp", 32),
        ("flower-cnn", 32),
    ],
)
def test_labels_of_an_untrained_net(model: str, size: int, observe_victims: Callable) -> None:
    """Random draws, so classes repeat."""
    shares = []
    for seed in (0, 1):
        seen, truth = observe_victims(model=model, victims=12 if size < 32 else 6, batch_size=size, seed=seed)
        shares += [share(infer_labels(o), t.original.y) for o, t in zip(seen, truth, strict=True)]
    assert sum(shares) / len(shares) >= LEVEL[size]
    assert all(len(infer_labels(o)) == size for o in seen)


def test_labels_of_a_weight_delta(observe_victims: Callable) -> None:
    seen, truth = observe_victims(victims=8, training=LocalTraining(epochs=3, lr=0.01))
    assert [infer_labels(o).tolist() for o in seen] == [t.original.y.tolist() for t in truth]


def test_labels_from_the_weight_where_there_is_no_bias(observe_victims: Callable) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(784, 40), nn.ReLU(), nn.Linear(40, 10, bias=False))
    seen, truth = observe_victims(model=module, victims=8)
    assert [infer_labels(o).tolist() for o in seen] == [t.original.y.tolist() for t in truth]


def test_labels_that_are_granted_are_not_guessed(observe_victims: Callable) -> None:
    seen, truth = observe_victims(victims=1, batch_size=4, level="paper")
    found = parse("ig:steps=1")(seen)[0]
    assert torch.equal(found.labels, truth[0].fed.y)


def test_the_classifier_is_the_last_layer_with_an_output_a_class(observe_victims: Callable) -> None:
    for model, name in (("lenet", "fc"), ("smlp", "fc"), ("cnn", "fc")):
        assert classifier_name(observe_victims(model=model, victims=1)[0][0]) == name


def gradients(labels: list[int], classes: int, features: int = 6) -> tuple[Tensor, Tensor]:
    """Bias and weight gradient of a classifier that is sure of nothing, on positive features."""
    rng = torch.Generator().manual_seed(0)
    a = torch.rand(len(labels), features, generator=rng) + 0.5
    signal = torch.full((len(labels), classes), 1 / classes)
    signal[torch.arange(len(labels)), labels] -= 1
    return signal.mean(0), signal.T @ a / len(labels)


@pytest.mark.parametrize("labels", [[3], [0, 5], [1, 1, 1], [2, 2, 7, 9], [4, 4, 4, 6]])
def test_rules_on_a_net_that_is_sure_of_nothing(labels: list[int]) -> None:
    bias, weight = gradients(labels, 20)
    assert bias_rule(bias, len(labels)).tolist() == sorted(labels)
    assert llg(weight, len(labels)).tolist() == sorted(labels)
    if len(labels) == 1:
        assert idlg(weight).tolist() == labels
    if len(set(labels)) == len(labels):
        assert minimum_rule(weight, len(labels)).tolist() == sorted(labels)


def test_a_rule_gives_as_many_labels_as_there_are_images_whatever_it_sees() -> None:
    for bias in (torch.zeros(5), torch.ones(5), -torch.ones(5), torch.randn(5)):
        assert len(bias_rule(bias, 7)) == 7
        assert len(bias_rule(bias, 2)) == 2
    assert len(minimum_rule(torch.randn(3, 4), 8)) == 8


# -- trained nets ------------------------------------------------------------------------------------------------------


def confident(labels: Tensor, classes: int, seed: int) -> Tensor:
    """What a trained net believes of images with these labels: it is right, more or less surely; class 0 it rarely sees."""
    rng = torch.Generator().manual_seed(seed)
    true = nn.functional.one_hot(labels, classes).double()
    sure = torch.rand(len(labels), 1, generator=rng, dtype=torch.double) * 3 + torch.where(labels == 0, 0.0, 1.0)[:, None]
    return (torch.randn(len(labels), classes, generator=rng, dtype=torch.double) + sure * true).softmax(-1)


def rehearsal(count: int, seed: int, classes: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The bias gradient and labels of a batch; beliefs and labels of public images."""
    public, labels = (
        torch.arange(500) % classes,
        torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed)),
    )
    signal = confident(labels, classes, 100 + seed) - nn.functional.one_hot(labels, classes)
    return signal.mean(0), labels, confident(public, classes, 1), public


def test_the_rehearsed_rule_is_exact_where_the_net_believes_the_same_of_all_images() -> None:
    belief = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.double)
    public = torch.arange(40) % 4
    for labels in ([0, 0, 0, 0], [0, 1, 2, 3], [3, 3, 1, 1], [2, 2, 2, 0, 3, 3]):
        counts = torch.bincount(torch.tensor(labels), minlength=4)
        bias = belief - counts / len(labels)
        told = rehearsed_rule(bias, len(labels), belief.expand(40, 4), public)
        assert told is not None and told.tolist() == sorted(labels)


def test_the_rehearsed_rule_tells_more_than_the_expected_one_on_a_net_that_knows_classes() -> None:
    shares: dict[str, list[float]] = {"expected": [], "rehearsed": []}
    for seed in range(40):
        bias, labels, beliefs, public = rehearsal(16, seed)
        rehearsed = rehearsed_rule(bias, 16, beliefs, public)
        assert rehearsed is not None
        shares["rehearsed"].append(share(rehearsed, labels))
        shares["expected"].append(share(expected_rule(bias, 16, beliefs.mean(0)), labels))
    told = {name: sum(values) / len(values) for name, values in shares.items()}
    assert told["rehearsed"] > 0.8
    assert told["rehearsed"] > told["expected"] + 0.03


def test_a_class_whose_entry_is_below_zero_is_present_unless_noise_explains_it() -> None:
    beliefs = torch.full((30, 3), 1 / 3, dtype=torch.double)
    bias = torch.tensor([0.3, -0.01, -0.29], dtype=torch.double)
    public = torch.arange(30) % 3
    surely, noisy = (rehearsed_rule(bias, 2, beliefs, public, noise) for noise in (0.0, 0.1))
    assert surely is not None and surely.tolist() == [1, 2]
    assert noisy is not None and len(noisy) == 2


@pytest.mark.parametrize("factor", [1e-4, 100.0])
def test_a_gradient_of_another_size_is_not_rehearsed(factor: float) -> None:
    bias, _, beliefs, public = rehearsal(16, 0)
    assert rehearsed_rule(factor * bias, 16, beliefs, public) is None


def test_labels_on_a_trained_net(observe_victims: Callable) -> None:
    """More are told than by the rule that does not know the size of the gradient."""
    data = load("mnist-5k")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(784, 40), nn.ReLU(), nn.Linear(40, 10))
        optimizer = torch.optim.Adam(module.parameters(), 3e-3)
        for places in torch.randperm(2000).split(50):
            optimizer.zero_grad()
            batch = data.private[places]
            nn.functional.cross_entropy(module((batch.x - data.mean) / data.std), batch.y).backward()
            optimizer.step()
    seen, truth = observe_victims(model=module, victims=24, batch_size=16)
    told = [share(infer_labels(unit_length(o)), t.original.y) for o, t in zip(seen, truth, strict=True)]
    hidden = [dataclasses.replace(o, knowledge=dataclasses.replace(o.knowledge, norm=1e9)) for o in seen]
    without = [share(infer_labels(o), t.original.y) for o, t in zip(hidden, truth, strict=True)]
    assert sum(told) / len(told) > 0.7
    assert sum(told) / len(told) > sum(without) / len(without) + 0.02


@pytest.mark.parametrize(("size", "error"), [(1, 0.0), (8, 0.1), (32, 0.1)])
def test_targets_of_a_batch_are_told_on_average(size: int, error: float) -> None:
    rng = generator(size)
    images = torch.rand(400, 1, 6, 6, generator=rng)
    targets = torch.rand(400, 4, generator=rng) < torch.tensor([0.1, 0.5, 0.7, 0.9])
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 30), nn.ReLU(), nn.Linear(30, 4))
    function = ModelFunction(model, find_loss("multi-label"))
    task = Task(function, (1, 6, 6), 4, torch.zeros(1), torch.ones(1), has_classes=False)
    batch, public = Batch(images[:size], targets[:size].float()), Batch(images[100:], 1 - targets[100:].float())
    update = Update(function.gradient(function.state(), batch.x, batch.y), "gradient", size)
    seen = observe(task, [Sighting(function.state(), update)], level="realistic", trace=Trace(batch, batch), public=public)
    told = infer_targets(unit_length(seen))
    assert told.shape == (size, 4)
    assert (told.mean(0) - batch.y.mean(0)).abs().max() <= error  # although public targets are the opposite
    hidden = dataclasses.replace(seen, seen=(Sighting(function.state(), dataclasses.replace(update, kind="delta")),))
    assert torch.allclose(infer_targets(unit_length(hidden))[0], public.y.mean(0))


def test_victims_that_share_a_model_share_what_it_says_of_public_images(
    observe_victims: Callable, shapes: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, _ = observe_victims(data=shapes, model="smlp", victims=3, batch_size=2)
    other, _ = observe_victims(data=shapes, model="smlp", victims=1, batch_size=2, seed=1)
    other.append(dataclasses.replace(seen[0], task=dataclasses.replace(seen[0].task, std=2 * seen[0].task.std)))
    expected = [beliefs._computed(o) for o in (*seen, *other)]
    computed = Mock(wraps=beliefs._computed)
    monkeypatch.setattr(beliefs, "_computed", computed)
    monkeypatch.setattr(beliefs, "_last", [])
    for observation, outputs in zip((*seen, *other), expected, strict=True):
        answer = beliefs.outputs(observation)
        assert torch.equal(answer, outputs)
        answer.zero_()  # what a caller does to it stays with the caller
    assert computed.call_count == 3
