"""Closed forms: exact where their conditions hold, nothing but noise where the update was noised."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from gradveil.attacks import parse
from gradveil.core.errors import UserError
from gradveil.core.local_training import LocalTraining
from gradveil.core.types import Batch
from gradveil.data import DataSet

NOISE = "gaussian:std=1.0"


@pytest.mark.parametrize(
    ("attack", "model", "level"),
    [("linear", "smlp", 60), ("linear", "ffn", 60), ("rgap", "lenet", 30), ("rgap", "lenet4", 30), ("rgap", "cnn", 25)],
)
def test_a_single_image_is_read_off(
    attack: str, model: str, level: float, observe_victims: Callable, best_psnr: Callable
) -> None:
    seen, truth = observe_victims(model=model, victims=3)
    assert best_psnr(parse(attack)(seen), truth).min() >= level
    noisy, hidden = observe_victims(model=model, victims=3, defense=NOISE)
    assert best_psnr(parse(attack)(noisy), hidden).max() < 16


def test_an_imprint_reads_a_batch_off(observe_victims: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_victims(victims=2, batch_size=16, tampering="imprint")
    quality = best_psnr(parse("imprint")(seen), truth)
    assert ((quality >= 40).sum(1) >= 10).all(), quality
    noisy, hidden = observe_victims(victims=2, batch_size=16, tampering="imprint", defense=NOISE)
    assert best_psnr(parse("imprint")(noisy), hidden).max() < 20


def test_an_imprint_reaches_through_filters_that_an_image_of_one_colour_silences(
    observe_victims: Callable, best_psnr: Callable
) -> None:
    """All six filters of this first layer have negative sums: for one colour per image its ReLUs would all be off."""
    seen, truth = observe_victims(model="flower-cnn", victims=2, batch_size=8, tampering="imprint", seed=614)
    assert (seen[0].state["model.conv1.weight"].sum(dim=(1, 2, 3)) < 0).all()
    quality = best_psnr(parse("imprint")(seen), truth)
    assert ((quality >= 40).sum(1) >= 6).all(), quality


def test_an_imprint_without_public_images_still_finds_some(observe_victims: Callable, shapes: DataSet) -> None:
    alone = dataclasses.replace(shapes, public=Batch(shapes.public.x[:0], shapes.public.y[:0]))
    seen, truth = observe_victims(data=alone, model="lenet", victims=1, batch_size=4, tampering="imprint")
    found = parse("imprint")(seen)[0]
    gaps = (found.images[:, None] - truth[0].original.x[None]).abs().amax((2, 3, 4))
    assert int((gaps.amin(0) < 0.02).sum()) >= 2


def test_trap_weights_isolate_the_images_of_a_batch(observe_victims: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_victims(model="smlp", victims=2, batch_size=8, tampering="trap-weights")
    quality = best_psnr(parse("trap-weights")(seen), truth)
    assert ((quality >= 40).float().mean(1) >= 0.5).all(), quality
    noisy, hidden = observe_victims(model="smlp", victims=2, batch_size=8, tampering="trap-weights", defense=NOISE)
    assert best_psnr(parse("trap-weights")(noisy), hidden).max() < 16


@pytest.mark.parametrize("tampering", ["imprint", "trap-weights"])
def test_a_tampered_model_still_tells_classes_apart(tampering: str, observe_victims: Callable) -> None:
    """The client gets finite scores of the right shape, and the block is seen in the model, not hidden."""
    seen, _ = observe_victims(model="smlp", victims=1, batch_size=4, tampering=tampering)
    logits = seen[0].model(seen[0].state, torch.randn(3, 1, 28, 28))
    assert logits.shape == (3, 10)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    ("attack", "ground", "reason"),
    [
        ("linear", {"model": "lenet"}, "not the 784 pixels"),
        ("rgap", {"model": "flower-cnn"}, "without pooling"),
        ("rgap", {"batch_size": 2}, "single image"),
        ("rgap", {"training": LocalTraining(epochs=2, lr=0.1)}, "single image"),
        ("imprint", {}, "no imprint block"),
        ("imprint", {"tampering": "imprint", "training": LocalTraining(epochs=2, lr=0.1)}, "single gradients"),
    ],
)
def test_where_it_does_not_apply_it_says_why(
    attack: str, ground: dict[str, object], reason: str, observe_victims: Callable
) -> None:
    seen, _ = observe_victims(victims=1, **ground)
    with pytest.raises(UserError, match=f"attack '{attack}' does not apply: .*{reason}"):
        parse(attack)(seen)
