"""The image behind an obscured one, from where LODA's search ended."""

from __future__ import annotations

import pytest
import torch

from gradveil.attacks.counters.loda import LodaStationarity
from gradveil.attacks.generative.public_prior import ImageGaussian, gaussians
from gradveil.core.randomness import generator
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.defenses.data.loda import extractors
from gradveil.defenses.data.loda.defense import Loda, Memory
from gradveil.metrics import identify

Obscured = tuple[Batch, torch.Tensor, Memory, list[ImageGaussian]]


@pytest.fixture(scope="module")
def obscured() -> Obscured:
    """Six digits, obscured without edges in the way: a weak push, many steps."""
    data = load("mnist-5k")
    patch = pytest.MonkeyPatch()
    patch.setattr(extractors, "STEPS", 60)
    loda = Loda(variant="loda2", steps=200)
    memory = loda.equip(data.public, data.input_shape)
    patch.undo()
    private = data.private[:6]
    start = memory.starts(private.x.shape, generator(100, "start"))
    kinds = gaussians(data.public, data.num_classes)
    return private, loda.obscure(private.x, start, memory), memory, [kinds[int(c)] for c in private.y]


def test_the_slope_is_that_of_the_defense(obscured: Obscured) -> None:
    """Half the derivative of ‖g(x') − g(x)‖² − c‖x' − x‖² at x', by plain automatic differentiation."""
    private, hidden, memory, _ = obscured
    with torch.enable_grad():
        at = hidden.clone().requires_grad_()
        gaps = zip(memory.features(at), memory.features(private.x), strict=True)
        near = sum((a - b).square().sum() for a, b in gaps)
        (slope,) = torch.autograd.grad(near - memory.c * (at - private.x).square().sum(), at)
        again = hidden.clone().requires_grad_()
        found = LodaStationarity()._slope(hidden, again, memory.features(again), memory, private.x)
    assert torch.allclose(2 * found, slope, atol=1e-3 * float(slope.abs().max()))


def test_edges_that_explain_a_slope() -> None:
    hidden, slope = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    assert LodaStationarity(edges="ignore")._unexplained(slope, hidden).tolist() == slope.tolist()
    assert LodaStationarity(edges="mask")._unexplained(slope, hidden).tolist() == [0, 0, 0, 0, 1]
    assert LodaStationarity(edges="sign")._unexplained(slope, hidden).tolist() == [0, -1, 1, 0, 1]


def test_the_originals_are_identified_and_not_from_other_images(obscured: Obscured) -> None:
    private, hidden, memory, kinds = obscured
    pool = load("mnist-5k").test
    attack = LodaStationarity(steps=150)
    found = attack.original(hidden, memory, kinds)
    blind = attack.original(torch.rand(hidden.shape, generator=generator(0, "blind")), memory, kinds)

    def nearness(images: torch.Tensor) -> torch.Tensor:
        return identify(private.x, private.y, images, pool).likeness

    assert nearness(found).mean() > nearness(blind).mean() + 0.05


def test_without_a_prior_the_equation_alone_is_met(obscured: Obscured) -> None:
    private, hidden, memory, _ = obscured
    attack = LodaStationarity(steps=150, prior="none")
    found = attack.original(hidden, memory, [])  # no class is asked for
    grey = torch.full_like(hidden, 0.5)
    assert (attack._misfit(hidden, memory, found) < 0.1 * attack._misfit(hidden, memory, grey)).all()
    assert (found - private.x).square().mean() < 0.5 * (grey - private.x).square().mean()
