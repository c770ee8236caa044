"""Labels read from the classifier's gradient: how many of a batch's are right, and the rules on made-up gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks import parse
from gradveil.attacks.labels import infer_labels
from gradveil.attacks.labels.rules import bias_rule, idlg, llg, minimum_rule
from gradveil.attacks.layers import classifier_name
from gradveil.core.local_training import LocalTraining

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
