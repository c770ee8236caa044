"""Transformers: images read from positions, from the span of tokens, and batches searched in the span of their patches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_vit import ViT

from gradveil.attacks import parse
from gradveil.core.errors import UserError
from gradveil.core.local_training import LocalTraining
from gradveil.data import DataSet

SGD = LocalTraining(lr=0.05, epochs=3, optimizer="sgd:momentum=0.9,nesterov=true,weight_decay=0.1")


def test_patches_are_told_by_the_weight_difference_of_any_number_of_steps(
    observe_victims: Callable, best_psnr: Callable, shapes: DataSet
) -> None:
    seen, truth = observe_victims(data=shapes, model=ViT(), victims=2, training=SGD)
    assert seen[0].update.kind == "delta" and best_psnr(parse("april")(seen), truth).min() > 50
    noisy, hidden = observe_victims(data=shapes, model=ViT(), victims=2, training=SGD, defense="gaussian:std=0.1")
    assert best_psnr(parse("april")(noisy), hidden).max() < 25


def test_what_steps_moved_is_a_sum_of_gradients_without_weight_decay() -> None:
    """Two weights with the same gradients, one from 0 and one from elsewhere: torch moves only the second by decay."""
    gradients, start = torch.randn(3, 5, dtype=torch.double), torch.randn(5, dtype=torch.double)
    weights = [torch.zeros_like(start).requires_grad_(), start.clone().requires_grad_()]
    optimizer = torch.optim.SGD(weights, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)
    for gradient in gradients:
        for weight in weights:
            weight.grad = gradient
        optimizer.step()
    plain = SGD.as_gradient({"w": weights[0].detach()}, {"w": torch.zeros_like(start)}, 1)["w"]
    assert torch.allclose(SGD.as_gradient({"w": weights[1].detach() - start}, {"w": start}, 1)["w"], plain)
    assert not torch.allclose(start - weights[1].detach(), plain, rtol=1e-2)


@pytest.mark.parametrize("settings", [{"learned": False}, {"width": 64, "learned": False, "rank": 6}])
def test_tokens_in_the_span_of_a_gradient_tell_the_image(
    settings: dict[str, int], observe_victims: Callable, best_psnr: Callable, shapes: DataSet
) -> None:
    seen, truth = observe_victims(data=shapes, model=ViT(**settings), victims=2)
    answers = parse("token-span")(seen)
    assert best_psnr(answers, truth).min() > 60 and max(answer.score for answer in answers) < 1e-3
    noisy, hidden = observe_victims(data=shapes, model=ViT(**settings), victims=2, defense="gaussian:std=0.01")
    answers = parse("token-span")(noisy)
    assert best_psnr(answers, hidden).max() < 30 and min(answer.score for answer in answers) > 1e-2


@pytest.mark.parametrize(
    ("attack", "settings", "more", "reason"),
    [
        ("token-span", {"width": 64, "rank": 3}, {}, "the gradients of trained layers do not span the normalised tokens"),
        ("token-span", {"rank": 6}, {}, "32 features less 4 tokens are fewer equations than the 36 unknowns of a patch"),
        ("token-span", {}, {"batch_size": 2}, "it needs the gradient of a single image"),
        ("april", {"learned": False}, {}, "does not add learned positions to embedded patches"),
        ("april", {}, {"training": LocalTraining(lr=0.01, optimizer="adam")}, "steps that are divided by their size"),
        ("patch-span", {}, {}, "`april` reads a single one"),
        ("patch-span", {}, {"batch_size": 8}, "8 × 4 patches are not fewer than the 32 features and 36 pixels"),
        ("patch-span", {"learned": False}, {"batch_size": 2}, "does not add learned positions to embedded patches"),
    ],
)
def test_what_is_left_open_is_said(
    attack: str, settings: dict[str, int], more: dict[str, object], reason: str, observe_victims: Callable, shapes: DataSet
) -> None:
    seen, _ = observe_victims(data=shapes, model=ViT(**settings), victims=1, **more)
    with pytest.raises(UserError, match=reason):
        parse(attack)(seen)


def test_a_batch_is_found_in_the_span_of_its_patches(observe_victims: Callable, best_psnr: Callable, shapes: DataSet) -> None:
    ground = {"data": shapes, "model": ViT(), "victims": 2, "batch_size": 2, "level": "paper"}
    seen, truth = observe_victims(**ground)
    assert len(set(truth[1].original.y.tolist())) == 2  # images of one class may stop the search at their mean
    assert best_psnr(parse("patch-span:steps=300")(seen[1:]), truth[1:]).min() > 60
    noisy, hidden = observe_victims(**ground, defense="gaussian:std=0.1")
    assert best_psnr(parse("patch-span:steps=40")(noisy[1:]), hidden[1:]).max() < 20
