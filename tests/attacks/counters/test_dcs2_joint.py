"""DCS² on single images: the classifier's gradient tells the two images apart, and the sensitive one comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.attacks import parse
from gradveil.attacks.counters.dcs2.pair import separate
from gradveil.core.randomness import generator


def _classifier_gradients(
    weight: torch.Tensor, bias: torch.Tensor, features: torch.Tensor, targets: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """By autograd: the gradient of scale · loss of the first image plus loss of the second."""
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    losses = -(targets * (features @ weight.T + bias).log_softmax(-1)).sum(-1)
    (scale * losses[0] + losses[1]).backward()
    assert weight.grad is not None and bias.grad is not None
    return weight.grad, bias.grad


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.3, 0.7]), st.sampled_from([1.0, 3.0]))
def test_two_images_behind_one_classifier_are_told_apart(seed: int, share: float, scale: float) -> None:
    rng = generator(seed, "pair")
    weight, bias = torch.rand(10, 60, generator=rng) - 0.5, torch.rand(10, generator=rng) - 0.5
    features = torch.rand(2, 60, generator=rng)
    own, other = torch.randperm(10, generator=rng)[:2].tolist()
    hard = torch.eye(10)
    targets = torch.stack([hard[own], share * hard[other] + (1 - share) * hard[own]])
    sent = _classifier_gradients(weight.double(), bias.double(), features.double(), targets.double(), scale)
    found = separate(sent, (weight, bias), share)
    assert found.error < 1e-6
    assert found.labels == (own, other)
    assert torch.allclose(found.features, features.double(), atol=1e-4)


def test_a_single_image_or_noise_is_not_taken_for_a_pair() -> None:
    rng = generator("pair", "noise")
    weight, bias = torch.rand(10, 60, generator=rng) - 0.5, torch.rand(10, generator=rng) - 0.5
    noise = torch.randn(10, 60, generator=rng), torch.randn(10, generator=rng)
    assert separate(noise, (weight, bias), 0.7).error > 1e-2


@pytest.mark.parametrize("clamp", ["true", "false"])
def test_the_sensitive_image_comes_back(clamp: str, observe_often: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_often(f"dcs2:steps=150,clamp={clamp}", victims=3, seed=100)
    found = parse("dcs2-joint")(seen, budget="quick")
    assert best_psnr(found, truth).min() >= 25
    assert [int(r.labels[0]) for r in found] == [int(t.original.y[0]) for t in truth]
    # Plain matching, which takes the update for that of one image, does not get there.
    assert best_psnr(parse("rgap")(seen), truth).max() < 15


def test_fully_connected_nets_give_it_back_exactly(observe_victims: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_victims(data="mnist-5k", model="smlp", victims=2, defense="dcs2:steps=20")
    assert best_psnr(parse("dcs2-joint")(seen), truth).min() >= 80


@pytest.mark.slow
def test_after_pruning_it_falls_back_on_matching_both(observe_often: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_often("dcs2:steps=50+prune:ratio=0.5", victims=1, seed=100)
    (found,) = parse("dcs2-joint:guesses=1")(seen, budget="quick")
    assert found.failed is None
    assert found.images.shape == truth[0].original.x.shape
