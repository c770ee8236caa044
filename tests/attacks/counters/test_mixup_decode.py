"""MixUp undone: many encodings of few images give them back, one encoding of one image does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradveil.attacks import parse
from gradveil.attacks.counters.mixup import Mixture, unmix
from gradveil.core.randomness import generator

FEW = {"victims": 6, "updates": 3, "private": 6, "seed": 100}


def test_least_squares_in_the_pixel_range_agree_with_the_closed_form() -> None:
    rng = generator(0, "unmix")
    truth, mixing = torch.rand(5, 1, 3, 4, generator=rng), torch.rand(12, 5, generator=rng)
    encodings = torch.einsum("nm,mchw->nchw", mixing, truth)
    mixture = Mixture(mixing, torch.full_like(truth, 0.5), torch.arange(5)[:, None])
    found = unmix(mixture, encodings, 2000)
    exact = torch.linalg.lstsq(mixing, encodings.flatten(1)).solution.view_as(truth)
    assert torch.allclose(found, exact, atol=0.01)
    # What no equation speaks of stays at the mean.
    alone = Mixture(torch.cat([mixing, torch.zeros(12, 1)], 1), torch.full((6, 1, 3, 4), 0.25), mixture.victims)
    assert torch.allclose(unmix(alone, encodings, 200)[5], torch.tensor(0.25))


@pytest.mark.parametrize(("level", "least"), [("upper-bound", 25), ("realistic", 14)])
def test_a_small_private_set_comes_back(level: str, least: float, observe_often: Callable, best_psnr: Callable) -> None:
    """Four of six images are in every encoding, so without the coefficients images are hardest to tell apart."""
    seen, truth = observe_often("mixup", level=level, **FEW)
    quality = best_psnr(parse("mixup-decode")(seen, budget="quick"), truth)
    assert quality.mean() >= 25, quality
    assert quality.min() >= least, quality


def test_wrong_coefficients_do_not_decode(observe_often: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_often("mixup", level="upper-bound", **FEW)
    for observation in seen:
        for name in ("mixing", "mixing@1", "mixing@2"):
            observation.knowledge.secrets[name] = observation.knowledge.secrets[name].flip(1)
    assert best_psnr(parse("mixup-decode")(seen, budget="quick"), truth).mean() < 20


def test_one_encoding_among_many_partners_is_split_in_part_only(observe_often: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_often("mixup", victims=4, seed=100)
    found = parse("mixup-decode")(seen, budget="quick")
    quality = best_psnr(found, truth)
    encoded = torch.stack([10 * -(t.fed.x - t.original.x).square().mean().log10() for t in truth])
    assert quality.mean() > encoded.mean() + 0.5  # more than the encoding shows …
    assert quality.max() < 25  # … and far from the image


@pytest.mark.slow
@pytest.mark.parametrize("level", ["upper-bound", "realistic"])
def test_sixteen_images_in_forty_eight_encodings(level: str, observe_often: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_often("mixup", victims=16, updates=3, private=16, level=level, seed=101)
    assert best_psnr(parse("mixup-decode")(seen, budget="quick"), truth).min() >= 25
