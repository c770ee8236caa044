"""Counters on batches: the first fully connected layer is read apart in spite of the defense, and where that ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradveil.attacks import parse
from gradveil.attacks.counters.batches import READABLE, BatchCounter
from gradveil.attacks.counters.prune_mask import completed
from gradveil.attacks.unit_length import unit_length
from gradveil.core.errors import UserError
from gradveil.core.local_training import LocalTraining
from gradveil.core.observation import Reconstruction, Trace
from gradveil.core.randomness import generator
from gradveil.data import DataSet

Quality = Callable[[list[Reconstruction], list[Trace]], Tensor]


def pooled(hidden: int = 100) -> nn.Module:
    """A convolution with max-pooling, which stops a search, and a hidden layer, which gives its inputs away."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layers = (nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(432, hidden), nn.ReLU(), nn.Linear(hidden, 3))


COUNTERS = {
    "clip-aware": ("clip:norm=1e-3", "clip:norm=1e-3+gaussian:std=1"),
    "soteria-drop": ("soteria", "soteria:layers=all,ratio=0.8"),
    "prune-mask": ("prune:ratio=0.5", "prune:ratio=0.98"),
    "percentile-bounds": ("percentile:percentile=40,gamma=0.05", "percentile:percentile=98"),
    "precode-signal": ("precode:k=16", "precode:k=16+gaussian:std=1"),
    "dcs2-joint": ("dcs2:steps=100", "dcs2:steps=100+gaussian:std=1"),
}


@pytest.mark.parametrize("counter", COUNTERS)
def test_a_batch_comes_back_and_a_stronger_defense_stops_it(
    counter: str, observe_victims: Callable, shapes: DataSet, best_psnr: Quality
) -> None:
    attack, (defense, stronger) = parse(counter), COUNTERS[counter]
    # DCS² doubles the images that are read.
    size, units = (2, 300) if counter == "dcs2-joint" else (3, 100)
    common = {"data": shapes, "model": pooled(units), "batch_size": size, "victims": 1}
    seen, truth = observe_victims(**common, defense=defense)
    quality = best_psnr(attack(seen, budget="quick"), truth)
    assert quality.min() >= 20 and quality.mean() >= 22, quality
    hidden, truth = observe_victims(**common, defense=stronger)
    if isinstance(attack, BatchCounter):  # it would search instead
        reading = attack.read(unit_length(hidden[0]))
        assert reading is None or reading.error > READABLE
    elif counter == "dcs2-joint":
        with pytest.raises(UserError, match="does not give away its inputs"):
            attack(hidden, budget="quick")
    else:
        assert best_psnr(attack(hidden, budget="quick"), truth).mean() < 18


def test_a_batch_that_cannot_be_read_is_searched_beside_one_that_can(
    observe_victims: Callable, shapes: DataSet, hurried: int
) -> None:
    common = {"data": shapes, "model": pooled(), "batch_size": 2, "victims": 1}
    (clear,), _ = observe_victims(**common, defense="clip:norm=1e-3")
    (noisy,), _ = observe_victims(**common, defense="clip:norm=1e-3+gaussian:std=1")
    noisy = replace(clear, seen=(replace(clear.seen[0], update=noisy.update),))
    attack = parse("clip-aware")
    together, alone = attack([noisy, clear], budget="quick"), attack([clear], budget="quick")
    assert all(r.failed is None for r in together)
    assert together[1].score == pytest.approx(alone[0].score, rel=1e-3)
    (searched,) = attack([noisy], budget="quick")
    assert together[0].score == pytest.approx(searched.score, rel=1e-3)


@given(st.integers(0, 10_000), st.integers(1, 5), st.floats(0.0, 0.5))
@settings(max_examples=6, deadline=None)
def test_a_matrix_of_low_rank_follows_from_its_largest_entries(seed: int, rank: int, ratio: float) -> None:
    rng = generator(seed, "completed")
    left, right = (torch.randn(n, rank, generator=rng, dtype=torch.float64) for n in (40, 60))
    whole = left @ right.T
    sent = whole * (whole.abs() > whole.abs().quantile(ratio))
    error = (completed(sent, rank) - whole)[(sent != 0).sum(1) >= 3 * rank][:, (sent != 0).sum(0) >= 3 * rank]
    assert error.norm() < 1e-3 * whole.norm()


def test_for_which_batches_they_are_counters(observe_victims: Callable, shapes: DataSet) -> None:
    plain = nn.Sequential(nn.Conv2d(1, 4, 5, stride=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 3))
    common = {"data": shapes, "batch_size": 2, "victims": 1}
    (seen,), _ = observe_victims(**common, model=plain, defense="precode:k=4")
    assert "no fully connected layer comes before the encoder" in str(parse("precode-signal").why_not(seen))
    assert "single images" in str(parse("precode-latent").why_not(seen))
    (seen,), _ = observe_victims(**common, model=plain, defense="dcs2:steps=1")
    with pytest.raises(UserError, match="does not give away its inputs"):
        parse("dcs2-joint")([seen], budget="quick")
    local = LocalTraining(epochs=2, lr=0.1)
    (seen,), _ = observe_victims(**common, model=pooled(), defense="dcs2:steps=1", training=local)
    assert "behind one gradient" in str(parse("dcs2-joint").why_not(seen))


def test_only_some_images_are_sensitive(observe_victims: Callable, shapes: DataSet, best_psnr: Quality) -> None:
    common = {"data": shapes, "model": pooled(300), "batch_size": 2, "victims": 1}
    seen, truth = observe_victims(**common, defense="dcs2:steps=100,sensitive=last:1")
    quality = best_psnr(parse("dcs2-joint")(seen, budget="quick"), truth)
    assert quality.min() >= 20, quality
