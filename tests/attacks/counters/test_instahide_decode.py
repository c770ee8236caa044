"""InstaHide undone: signs and mixing together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradveil.attacks import parse
from gradveil.attacks.counters.instahide import Habits, confirmed, mirrored, nearest
from gradveil.attacks.counters.mixup import Mixture
from gradveil.core.randomness import generator
from gradveil.core.types import Batch

FEW = {"victims": 6, "updates": 3, "private": 6, "seed": 100}


def test_the_nearer_of_two_values() -> None:
    low, high = torch.tensor([0.0, 0.0, 0.4]), torch.tensor([0.3, 0.3, 0.4])
    assert nearest(low, high, torch.tensor([0.1, 0.2, 0.9])).tolist() == pytest.approx([0.0, 0.3, 0.4])


def _encoded(rng: torch.Generator, mean: float = 0.45) -> tuple[torch.Tensor, Mixture, torch.Tensor, torch.Tensor]:
    """Smooth images, their mixture, and the two values that signs leave every pixel of it."""
    coarse = torch.rand(6, 1, 5, 5, generator=rng)
    images = torch.nn.functional.interpolate(coarse, (12, 12), mode="bicubic").clamp(0, 1)
    mixing = torch.rand(18, 6, generator=rng)
    mixing /= mixing.sum(1, keepdim=True)
    away = (torch.einsum("nm,mchw->nchw", mixing, images) - mean).abs()
    mixture = Mixture(mixing, torch.full_like(images, 0.5), torch.arange(6)[:, None])
    return images, mixture, mean - away, mean + away


@pytest.mark.parametrize("seed", range(5))
def test_known_shares_give_every_pixel_but_for_a_mirror(seed: int) -> None:
    images, mixture, low, high = _encoded(generator(seed, "instahide"))
    found = confirmed(mixture, low, high)
    assert found is not None
    either = torch.minimum((found - images).abs().amax(0), (0.9 - found - images).abs().amax(0))
    # In the box some pixels have no mirror image; none may be other than the truth or its mirror image.
    assert either.max() < 0.02


@pytest.mark.parametrize("seed", range(5))
def test_neighbours_undo_the_mirror(seed: int) -> None:
    images, mixture, low, high = _encoded(generator(seed, "instahide"))
    turned = torch.rand(12, 12, generator=generator(seed, "turned")) < 0.5
    muddled = torch.where(turned, 0.9 - images, images)
    middle = torch.full(images.shape[1:], 0.45)
    found = mirrored(muddled, mixture, low, high, middle, Habits(Batch(images, torch.zeros(6, dtype=torch.long))))
    wrong = min(float((found - other).abs().gt(0.02).float().mean()) for other in (images, 0.9 - images))
    assert wrong < 0.05  # all right, or all mirrored


def test_signs_are_only_tried_out_where_encodings_can_confirm_them() -> None:
    _, mixture, low, high = _encoded(generator(0, "instahide"))
    few = Mixture(mixture.mixing[:6], mixture.mean, mixture.victims)
    assert confirmed(few, low[:6], high[:6]) is None  # nothing left to confirm by
    alike = Mixture(mixture.mixing[:1].expand(18, -1), mixture.mean, mixture.victims)
    assert confirmed(alike, low, high) is None


@pytest.mark.parametrize(("level", "least"), [("upper-bound", 35), ("realistic", 16)])
def test_a_small_private_set_comes_back(level: str, least: float, observe_often: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_often("instahide", level=level, **FEW)
    quality = best_psnr(parse("instahide-decode")(seen, budget="quick"), truth)
    assert quality.mean() >= least, quality


def test_undoing_signs_shows_more_than_the_encoding(observe_often: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_often("instahide", victims=4, seed=100)
    encoded = torch.stack([10 * -(t.fed.x.clamp(0, 1) - t.original.x).square().mean().log10() for t in truth])
    for spec in ("instahide-decode:cheap=true", "instahide-decode"):
        quality = best_psnr(parse(spec)(seen, budget="quick"), truth)
        assert quality.mean() > encoded.mean() + 2, spec
        assert quality.max() < 25, spec  # the partners are still in it
