"""Source separation: known mixtures are unmixed, and images behind a layer without ReLU come back roughly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gradveil.attacks import parse
from gradveil.attacks.analytic.separation import separated, unmixing


def test_a_mixture_of_sparse_sources_is_unmixed() -> None:
    draw = torch.Generator().manual_seed(0)
    uniform = torch.rand(6, 20_000, generator=draw, dtype=torch.float64) - 0.5
    sources = -uniform.sign() * torch.log1p(-2 * uniform.abs())  # Laplace
    mixing = torch.randn(6, 6, generator=draw, dtype=torch.float64)
    product = (unmixing(mixing @ sources) @ mixing).abs()
    shares = product / product.amax(1, keepdim=True)
    assert sorted(product.argmax(1).tolist()) == list(range(6))  # every source once
    assert shares.sort(1).values[:, -2].max() < 0.05  # and hardly anything of another


def test_sign_and_size_come_from_the_last_entry() -> None:
    draw = torch.Generator().manual_seed(1)
    steps = (torch.rand(3, 1, 24, 24, generator=draw, dtype=torch.float64) < 0.05) * torch.randn(
        3, 1, 24, 24, generator=draw, dtype=torch.float64
    )
    images = steps.cumsum(3).flatten(1)
    mixing = torch.tensor([[-2.0, 0.5, 1.0], [0.3, 1.0, -1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    mixtures = mixing @ torch.cat([images, torch.ones(3, 1, dtype=torch.float64)], 1)
    recovered = separated(mixtures, (1, 24, 24))
    gaps = torch.cdist(images, recovered) / images.norm(dim=1)[:, None]
    assert sorted(gaps.argmin(1).tolist()) == [0, 1, 2] and gaps.amin(1).max() < 0.25


def test_images_behind_a_sigmoid_are_separated(observe_victims: Callable, best_psnr: Callable) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.Sigmoid(), nn.Linear(200, 10))
    seen, truth = observe_victims(model=net, victims=2, batch_size=8)
    assert best_psnr(parse("linear")(seen), truth).median() > 24
    noisy, hidden = observe_victims(model=net, victims=2, batch_size=8, defense="gaussian:std=1.0")
    assert best_psnr(parse("linear")(noisy), hidden).max() < 16
