"""InstaHide undone: signs and mixing together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradveil.attacks import parse
from gradveil.attacks.adaptive.instahide import nearest

FEW = {"victims": 6, "updates": 3, "private": 6, "seed": 100}


def test_the_nearer_of_two_values() -> None:
    low, high = torch.tensor([0.0, 0.0, 0.4]), torch.tensor([0.3, 0.3, 0.4])
    assert nearest(low, high, torch.tensor([0.1, 0.2, 0.9])).tolist() == pytest.approx([0.0, 0.3, 0.4])


@pytest.mark.parametrize(("level", "least"), [("upper-bound", 22), ("realistic", 16)])
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
