"""Distances between updates against formulas written out, a row and a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradveil.attacks.matching.distances import (
    L1,
    L2,
    Cosine,
    Distance,
    GaussianLikelihood,
    LaplaceLikelihood,
    LayerCosine,
    LayerNorms,
    PerRow,
    RelativeL2,
    fitted,
)

Arrays = list[NDArray[np.float64]]
ROWS, SHAPES = 3, [(4, 2, 3, 3), (4,), (5, 8), (1,)]


def tensors(seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, *shape, generator=rng, dtype=torch.float64) for shape in SHAPES]


def cosine(a: Arrays, b: Arrays) -> float:
    inner = sum(float((x * y).sum()) for x, y in zip(a, b, strict=True))
    sizes = [np.sqrt(sum(float((x**2).sum()) for x in side)) for side in (a, b)]
    return 1 - inner / (sizes[0] * sizes[1])


def count(a: Arrays) -> int:
    return sum(x.size for x in a)


NAIVE: list[tuple[Distance, Callable[[Arrays, Arrays], float]]] = [
    (L2(), lambda a, b: sum(float(((x - y) ** 2).sum()) for x, y in zip(a, b, strict=True))),
    (L1(), lambda a, b: sum(float(np.abs(x - y).sum()) for x, y in zip(a, b, strict=True))),
    (Cosine(), cosine),
    (LayerCosine(), lambda a, b: float(np.mean([cosine([x], [y]) for x, y in zip(a, b, strict=True)]))),
    (RelativeL2(), lambda a, b: float(np.mean([((x - y) ** 2).sum() / (y**2).sum() for x, y in zip(a, b, strict=True)]))),
    (LayerNorms(), lambda a, b: sum(float(np.sqrt(((x - y) ** 2).sum())) for x, y in zip(a, b, strict=True))),
    (
        GaussianLikelihood(torch.full((ROWS,), 0.3)),
        lambda a, b: sum(float(((x - y) ** 2).sum()) for x, y in zip(a, b, strict=True)) / count(a) / (2 * 0.3**2),
    ),
    (
        LaplaceLikelihood(torch.full((ROWS,), 0.3)),
        lambda a, b: sum(float(np.abs(x - y).sum()) for x, y in zip(a, b, strict=True)) / count(a) / 0.3,
    ),
]
EVERY = [pytest.param(d, f, id=type(d).__name__) for d, f in NAIVE]


@pytest.mark.parametrize(("distance", "naive"), EVERY)
def test_it_is_the_formula(distance: Distance, naive: Callable[[Arrays, Arrays], float]) -> None:
    found, wanted = tensors(0), tensors(1)
    values = distance(found, wanted)
    assert values.shape == (ROWS,)
    for row in range(ROWS):
        a, b = ([t[row].numpy() for t in side] for side in (found, wanted))
        assert float(values[row]) == pytest.approx(naive(a, b), rel=1e-6)


@pytest.mark.parametrize(("distance", "naive"), EVERY)
def test_equal_updates_are_at_distance_nought_and_have_a_finite_slope(
    distance: Distance, naive: Callable[[Arrays, Arrays], float]
) -> None:
    wanted = tensors(1)
    wanted[1] = torch.zeros_like(wanted[1])  # a tensor that was pruned away altogether
    found = [t.clone().requires_grad_() for t in wanted]
    value = distance(found, wanted)
    slopes = torch.autograd.grad(value.sum(), found)
    assert all(torch.isfinite(s).all() for s in slopes)
    if not isinstance(distance, LayerCosine):  # nought has no direction, so that term stays at one
        lengths = sum(t.flatten(1).square().sum(1) for t in wanted).sqrt()
        assert float((value.detach().abs() / lengths).max()) < 1e-5


@pytest.mark.parametrize(("distance", "naive"), EVERY)
def test_a_parameter_may_be_a_single_number(distance: Distance, naive: Callable[[Arrays, Arrays], float]) -> None:
    found, wanted = ([*tensors(seed), torch.full((ROWS,), 0.5 + seed).double()] for seed in (0, 1))
    row = [[t[0].numpy() for t in side] for side in (found, wanted)]
    assert float(distance(found, wanted)[0]) == pytest.approx(naive(*row), rel=1e-6)


def test_a_cosine_does_not_see_the_size_of_an_update() -> None:
    found, wanted = tensors(0), tensors(1)
    for distance in (Cosine(), LayerCosine()):
        assert torch.allclose(distance([3 * t for t in found], wanted), distance(found, wanted))


@pytest.mark.parametrize("distance", [d for d, _ in NAIVE if not d.scale_free], ids=lambda d: type(d).__name__)
def test_after_fitting_no_distance_or_slope_depends_on_the_size_of_our_update(distance: Distance) -> None:
    """From 1e-30 to 1e30; of the rows one is near the target, one has no relation to it, one points away from it."""
    wanted = tensors(1)
    towards = torch.tensor([5.0, 0.0, -5.0]).double()
    start = [a + towards.view(-1, *(1 for _ in a.shape[1:])) * b for a, b in zip(tensors(0), wanted, strict=True)]

    def value_and_slopes(factor: float) -> list[Tensor]:
        ours = [t.clone().requires_grad_() for t in start]
        value = distance(fitted([factor * t for t in ours], wanted), wanted)
        return [value.detach(), *torch.autograd.grad(value.sum(), ours)]

    plain = value_and_slopes(1.0)
    assert all(bool((slope.flatten(1).norm(dim=1) > 0).all()) for slope in plain[1:])  # also where it points away
    for factor in (1e-30, 1e-3, 1e30):
        for got, expected in zip(value_and_slopes(factor), plain, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


def test_the_fitted_size_is_the_one_of_the_least_squared_error() -> None:
    wanted = tensors(1)
    near = [3e4 * (b + 0.3 * a) for a, b in zip(tensors(0), wanted, strict=True)]
    best = L2()(fitted(near, wanted), wanted)
    for factor in (0.99, 1.01):
        assert bool((best < L2()([factor * t for t in fitted(near, wanted)], wanted)).all())
    for ours, target in ((wanted, [torch.zeros_like(t) for t in wanted]), ([torch.zeros_like(t) for t in wanted], wanted)):
        assert not any(bool(t.any()) for t in fitted(ours, target))  # nothing to fit, nothing that is not finite


def test_a_portfolio_gives_each_row_its_own_distance() -> None:
    found, wanted = tensors(0), tensors(1)
    mixed = PerRow((L1(), L2()), torch.tensor([1, 0, 1]))
    ones, twos = L1()(found, wanted), L2()(found, wanted)
    assert torch.equal(mixed(found, wanted), torch.stack([twos[0], ones[1], twos[2]]))
    some = torch.tensor([1, 2])
    assert torch.equal(mixed.select(some)([t[some] for t in found], [t[some] for t in wanted]), torch.stack([ones[1], twos[2]]))
