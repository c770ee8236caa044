"""Swift: single images, a batch, several local steps; and that noise stops it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradveil.attacks import parse
from gradveil.core.local_training import LocalTraining

QUICK = "swift:restarts=0,cycles=0,adam_steps=0"  # one portfolio: enough for these


def test_single_digits_come_back_and_noise_stops_it(observe_victims: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_victims(victims=4)
    noisy, hidden = observe_victims(victims=4, defense="gaussian:std=1.0")
    found = parse("swift:adam_steps=200")([*seen, *noisy])  # Adam works on the noisy ones only
    quality = best_psnr(found[:4], truth)
    assert quality.mean() >= 45, quality
    assert quality.min() >= 25, quality
    assert best_psnr(found[4:], hidden).max() < 12
    # The adversary knows which of its answers to believe.
    assert max(r.score for r in found[:4]) < 1e-2 < 0.1 < min(r.score for r in found[4:])
    labels = torch.cat([r.labels for r in found[:4]])
    assert torch.equal(labels, torch.cat([t.original.y for t in truth]))


def test_half_of_a_batch_comes_back(observe_victims: Callable, best_ssim: Callable) -> None:
    seen, truth = observe_victims(victims=1, batch_size=4, seed=1)
    noisy, hidden = observe_victims(victims=1, batch_size=4, seed=1, defense="gaussian:std=1.0")
    found = parse(QUICK)([*seen, *noisy])
    assert (best_ssim(found[:1], truth) >= 0.6).float().mean() >= 0.5
    assert (best_ssim(found[1:], hidden) >= 0.6).float().mean() == 0


def test_three_local_steps_are_no_protection(observe_victims: Callable, best_psnr: Callable) -> None:
    training = LocalTraining(epochs=3, lr=0.01)
    seen, truth = observe_victims(victims=2, training=training)
    assert seen[0].update.kind == "delta"
    assert best_psnr(parse(QUICK)(seen), truth).min() >= 25
