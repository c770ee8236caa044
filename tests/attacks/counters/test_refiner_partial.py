"""Refiner's update matched where it is close to the truth."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradveil.attacks import parse
from gradveil.attacks.counters.refiner import RefinerPartial

GENTLE = "refiner:alpha=0.5,steps=20,epochs=1"


def test_only_the_share_of_most_weight_counts() -> None:
    weight = torch.tensor([[1.0, 4.0], [2.0, 3.0]])
    assert RefinerPartial(share=0.25)._largest(weight).count_nonzero() <= 2
    assert torch.equal(RefinerPartial(share=1.0)._largest(weight), weight)
    assert RefinerPartial(share=0.5)._largest(weight)[0, 1] == 4


def test_half_refined_digits_are_seen_better_than_what_was_fed(observe_often: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_often(GENTLE, victims=3, seed=100)
    fed = torch.stack([10 * -(t.fed.x - t.original.x).square().mean().log10() for t in truth])
    quality = best_psnr(parse("refiner-partial:tv=0.1,steps=200")(seen), truth)
    assert quality.mean() > fed.mean() + 1, (quality, fed)


def test_two_updates_tell_more_than_one(observe_often: Callable, best_psnr: Callable) -> None:
    once, truth = observe_often(GENTLE, victims=2, seed=100)
    often, _ = observe_often(GENTLE, victims=2, updates=4, seed=100)
    attack = parse("refiner-partial:tv=0.1,steps=200")
    assert best_psnr(attack(often), truth).mean() >= best_psnr(attack(once), truth).mean() - 0.2
