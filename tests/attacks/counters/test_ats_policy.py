"""ATS undone: movements, light and crop reversed, and the draw found that was drawn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradveil.attacks import parse
from gradveil.attacks.counters.ats.inverse import undo
from gradveil.attacks.counters.ats.policy import every
from gradveil.core.randomness import generator
from gradveil.data import load
from gradveil.defenses.data.ats.defense import ATS, Draw, transform
from gradveil.defenses.data.ats.transforms import FUNCTIONS

EXACT = ("invert", "translateX", "translateY", "brightness", "color", "autocontrast")  # up to clipping and rounding
CLOSE = ("contrast", "sharpness", "posterize", "rotate", "shearY")


def round_trip(policy: tuple[int, ...], crop: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Per image: mean squared error over known pixels, and the share that is known."""
    images = load("mnist-5k").public.x[:16]
    draw = Draw.make(16, (policy,), crop, crop > 0, generator(0, "draw"))
    back, known = undo(transform(images, (policy,), draw, crop), (policy,), draw, crop)
    error = ((back - images).square() * known).flatten(1).sum(1) / known.flatten(1).sum(1)
    return error, known.flatten(1).float().mean(1)


@pytest.mark.parametrize("index", range(len(FUNCTIONS)))
def test_every_function_is_undone(index: int) -> None:
    operation = FUNCTIONS[index].operation
    error, known = round_trip((index,))
    assert known.min() >= 0.5
    if operation == "solarize" and FUNCTIONS[index].magnitude < 255:
        return  # two levels lead to one: nothing tells which it was
    limit = {**dict.fromkeys(EXACT, 0.02), **dict.fromkeys(CLOSE, 0.03)}.get(operation, 0.2)
    assert error.max() <= limit, (operation, error)


def test_crop_and_flip_are_undone() -> None:
    error, known = round_trip((0,), crop=4)  # an inversion, then back
    assert error.max() < 1e-6
    assert known.min() >= (24 / 28) ** 2 - 1e-6


def test_all_draws_are_tried_once() -> None:
    draw = every(ATS(policy="3-1-7+0"))
    rows = torch.cat([draw.policy[:, None], draw.signs, draw.crop, draw.flip[:, None]], 1)
    assert len(rows) == len(rows.unique(dim=0)) == (8 + 1) * 2 * 81


def test_the_original_comes_back_where_the_draw_is_known(observe_often: Callable, best_psnr: Callable) -> None:
    spec = "ats:policy=0-13"  # negative and darker or brighter: nothing leaves the picture but by the crop
    seen, truth = observe_often(spec, victims=3, level="upper-bound", seed=100)
    plain = torch.stack([10 * -(t.fed.x - t.original.x).square().mean().log10() for t in truth])
    quality = best_psnr(parse("ats-policy")(seen, budget="quick"), truth)
    assert plain.max() < 10  # what a perfect plain attack shows
    assert quality.min() >= 20, quality


def test_the_draw_is_found_by_the_adversary_itself(observe_often: Callable, best_psnr: Callable) -> None:
    """As far as it can be: a crop by a pixel more or less leaves a digit that is as likely."""
    seen, truth = observe_often("ats:policy=0-13", victims=3, seed=100)
    plain = torch.stack([10 * -(t.fed.x - t.original.x).square().mean().log10() for t in truth])
    quality = best_psnr(parse("ats-policy")(seen, budget="quick"), truth)
    assert quality.mean() >= plain.mean() + 5, (quality, plain)


def test_in_early_rounds_what_was_fed_is_no_secret(observe_often: Callable) -> None:
    seen, truth = observe_often("ats", victims=2, seed=100)
    found = parse("ats-early:steps=600")(seen)
    for reconstruction, trace in zip(found, truth, strict=True):
        assert (reconstruction.images - trace.fed.x).square().mean() < 0.01
        assert (reconstruction.images - trace.original.x).square().mean() > 0.01
