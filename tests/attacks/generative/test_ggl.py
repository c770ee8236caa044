"""GGL: in the range of its generator pictures come back; the generator is trained once and kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradveil import metrics
from gradveil.attacks import parse
from gradveil.attacks.base import Target
from gradveil.attacks.generative import gan, ggl
from gradveil.core.errors import UserError
from gradveil.core.randomness import generator
from gradveil.core.types import Batch
from gradveil.data import DataSet


@pytest.fixture(scope="module")
def bumps() -> DataSet:
    """A light spot somewhere on 12×12 dark pixels: two numbers make a picture, which a small generator learns."""

    def made(n: int, purpose: str) -> Batch:
        places = 2 + 8 * torch.rand(n, 2, generator=generator(0, "bumps", purpose))
        grid = torch.arange(12.0)
        down, right = ((grid - places[:, i, None]) ** 2 for i in (0, 1))
        x = torch.exp(-(down[:, :, None] + right[:, None, :]) / 6)[:, None]
        return Batch((x * 255).round() / 255, torch.arange(n) % 2)

    parts = [made(n, purpose) for n, purpose in ((20, "private"), (150, "public"), (20, "test"))]
    return DataSet("bumps", *parts, 2, ("a", "b"), torch.tensor([0.2]), torch.tensor([0.25]))


@pytest.mark.parametrize("spec", ["ggl:steps=200", "ggl:optimizer=cma,steps=200", "ggl:conditional=false,steps=200"])
def test_pictures_come_back_through_pruning(spec: str, bumps: DataSet, observe_victims: Callable, best_psnr: Callable) -> None:
    if "cma" in spec:
        pytest.importorskip("cma")
    seen, truth = observe_victims(data=bumps, defense="prune:ratio=0.8", victims=4)
    found = parse(spec)(seen, budget="quick")
    x = torch.cat([t.original.x for t in truth])
    without = metrics.psnr(x, bumps.public.x.mean(0).expand_as(x))
    quality = best_psnr(found, truth).flatten()
    assert (quality > without + 3).float().mean() >= 0.75, (quality, without)
    # Updates of nothing but noise bring back nobody.
    noisy, hidden = observe_victims(data=bumps, defense="gaussian:std=100", victims=4)
    assert (best_psnr(parse(spec)(noisy, budget="quick"), hidden).flatten() > without + 3).float().mean() <= 0.25


def test_a_generator_is_trained_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = Batch(torch.rand(40, 1, 9, 14, generator=generator("gan")), torch.arange(40) % 2)
    monkeypatch.setattr(gan, "_KEPT", {})
    z, y = torch.randn(3, gan.LATENT, generator=generator("z")), torch.tensor([0, 1, 0])
    first = gan.generator_for(public, 0, tmp_path)
    (file,) = tmp_path.glob("gan-*.safetensors")
    assert first(z, y).shape == (3, 1, 9, 14)
    assert 0 <= float(first(z, y).min()) <= float(first(z, y).max()) <= 1
    gan._KEPT.clear()
    monkeypatch.setattr(gan, "train", None)  # it must not be called again
    assert torch.equal(gan.generator_for(public, 0, tmp_path)(z, y), first(z, y))
    gan._KEPT.clear()
    file.write_bytes(b"not a file of tensors")
    with pytest.raises(UserError, match="is damaged"):
        gan.generator_for(public, 0, tmp_path)


def test_what_was_not_sent_does_not_count(bumps: DataSet, observe_victims: Callable) -> None:
    for defense, thinned in (("none", False), ("prune:ratio=0.9", True)):
        seen, _ = observe_victims(data=bumps, defense=defense, victims=2)
        masks = ggl._sent(Target(seen, torch.zeros(2, 1).long(), generator(0)))
        assert bool(masks) == thinned
        for name, mask in masks.items():
            for row, observation in zip(mask, seen, strict=True):
                assert torch.equal(row != 0, observation.update.tensors[name] != 0)
