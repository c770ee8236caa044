"""Batched L-BFGS: as good as scipy's on known valleys, and every row a problem of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize, rosen, rosen_der
from torch import Tensor

from gradveil.attacks.matching.optimizers import LBFGS, SGD, Adam

THOROUGH = LBFGS(history=20, tolerance=0.0, patience=10_000)


def rosenbrock(x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    points = x.numpy()
    return (torch.tensor(np.array([rosen(p) for p in points])), torch.tensor(np.array([rosen_der(p) for p in points])))


class Bowls:
    """A quadratic of its own for each row: ½ (x − c)ᵀ A (x − c), condition number 1,000."""

    def __init__(self, rows: int, size: int):
        rng = torch.Generator().manual_seed(0)
        turn = torch.linalg.qr(torch.randn(rows, size, size, generator=rng, dtype=torch.float64)).Q
        self.a = turn @ torch.diag(torch.logspace(0, 3, size, dtype=torch.float64)) @ turn.mT
        self.centre = torch.randn(rows, size, generator=rng, dtype=torch.float64)
        self.asked: list[int] = []

    def __call__(self, x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(self.a)) if rows is None else rows
        self.asked.append(len(rows))
        away = x - self.centre[rows]
        slope = (self.a[rows] @ away[..., None]).squeeze(-1)
        return 0.5 * (away * slope).sum(1), slope


@pytest.mark.parametrize("dimensions", [2, 10])
def test_it_finds_the_floor_of_rosenbrocks_valley(dimensions: int) -> None:
    start = torch.tensor(np.random.default_rng(0).uniform(-1.5, 1.5, (5, dimensions)))
    x, value, used = THOROUGH.minimize(rosenbrock, start, 300)
    for row, begin in enumerate(start.numpy()):
        theirs = minimize(rosen, begin, jac=rosen_der, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-10})
        assert float(value[row]) <= max(1e-10, float(theirs.fun) * 1.01)
        assert np.allclose(x[row].numpy(), theirs.x, atol=1e-4)
    assert used < 3_000
    assert torch.allclose(value, rosenbrock(x, None)[0])  # the value is that of the point it comes with


def test_it_reaches_the_centre_of_every_bowl() -> None:
    bowls = Bowls(4, 12)
    x, value, _ = THOROUGH.minimize(bowls, torch.zeros(4, 12, dtype=torch.float64), 150)
    assert float((x - bowls.centre).abs().max()) < 1e-5
    assert float(value.max()) < 1e-9


def test_rows_do_not_know_of_each_other() -> None:
    """Together or one by one: the same path, up to rounding."""
    together, _, _ = LBFGS().minimize(Bowls(4, 12), torch.zeros(4, 12, dtype=torch.float64), 40)
    bowls = Bowls(4, 12)
    for row in range(4):

        def alone(x: Tensor, rows: Tensor | None, own: int = row) -> tuple[Tensor, Tensor]:
            return bowls(x, torch.tensor([own]))

        x, _, _ = LBFGS().minimize(alone, torch.zeros(1, 12, dtype=torch.float64), 40)
        assert torch.allclose(x[0], together[row], rtol=1e-6, atol=1e-8)


def test_rows_that_are_done_are_not_asked_again() -> None:
    bowls = Bowls(3, 12)
    start = bowls.centre.clone()
    start[1] += 1.0  # two rows begin at their end
    x, _, _ = LBFGS(patience=5).minimize(bowls, start, 60)
    assert bowls.asked[0] == 3
    assert bowls.asked[-1] == 1
    assert torch.allclose(x, bowls.centre, atol=1e-4)


def test_a_row_that_is_not_finite_does_not_harm_the_others() -> None:
    bowls = Bowls(3, 6)

    def objective(x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        value, slope = bowls(x, rows)
        places = torch.arange(3) if rows is None else rows
        broken = (places == 1) & (x != 0).any(1)
        return torch.where(broken, torch.full_like(value, float("nan")), value), slope

    x, value, _ = THOROUGH.minimize(objective, torch.zeros(3, 6, dtype=torch.float64), 100)
    assert torch.isfinite(x).all()
    assert torch.isfinite(value).all()
    assert float((x - bowls.centre)[[0, 2]].abs().max()) < 1e-5


def test_shapes_of_images_are_kept() -> None:
    target = torch.rand(3, 2, 1, 4, 4)

    def objective(x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        away = x - (target if rows is None else target[rows])
        return (away**2).flatten(1).sum(1), 2 * away

    x, _, _ = LBFGS().minimize(objective, torch.zeros_like(target), 20)
    assert x.shape == target.shape
    assert torch.allclose(x, target, atol=1e-4)


def torch_path(optimizer: torch.optim.Optimizer, x: Tensor, slopes: list[Tensor]) -> Tensor:
    for slope in slopes:
        x.grad = slope.clone()
        optimizer.step()
    return x.detach()


SLOPES = [torch.randn(3, 5, generator=torch.Generator().manual_seed(i)) for i in range(12)]


def own_path(stepper: Adam | SGD) -> NDArray[np.float32]:
    x = torch.zeros(3, 5)
    step = stepper.stepper(x)
    for slope in SLOPES:
        x = x + step(slope, 1.0)
    return x.numpy()


def test_adam_is_torchs() -> None:
    x = torch.zeros(3, 5, requires_grad=True)
    assert np.allclose(own_path(Adam(0.05)), torch_path(torch.optim.Adam([x], lr=0.05), x, SLOPES), atol=1e-6)
    x = torch.zeros(3, 5, requires_grad=True)
    signs = [s.sign() for s in SLOPES]
    signed = own_path(Adam(0.05, signed=True))
    assert np.allclose(signed, torch_path(torch.optim.Adam([x], lr=0.05), x, signs), atol=1e-6)


def test_sgd_is_torchs() -> None:
    x = torch.zeros(3, 5, requires_grad=True)
    theirs = torch.optim.SGD([x], lr=0.05, momentum=0.9, nesterov=True)
    assert np.allclose(own_path(SGD(0.05)), torch_path(theirs, x, SLOPES), atol=1e-6)
