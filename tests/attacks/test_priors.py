"""What images are taken to be like, against formulas written out pixel by pixel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.attacks.matching.priors import TV, BatchNormPrior, BoxPenalty, GroupPrior, L2Norm, LabelTerm
from gradveil.attacks.matching.rows import Rows
from gradveil.core.gradients import ModelFunction
from gradveil.core.local_training import LocalTraining

ROWS, BATCH, SHAPE = 4, 2, (2, 5, 6)
X = torch.randn(ROWS, BATCH, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def rows(module: nn.Module | None = None, restarts: int = 1, labels: Tensor | None = None, at: Tensor | None = None) -> Rows:
    """Rows with as much of a target as a prior looks at."""
    function = ModelFunction(module) if module is not None else None
    low, high = torch.full((2, 1, 1), -1.0).double(), torch.full((2, 1, 1), 1.5).double()
    target: Any = SimpleNamespace(
        model=function,
        state=function.state() if function else None,
        pixel_range=(low, high),
        observations=[],
        training=LocalTraining(),
    )
    return Rows(target, restarts, torch.zeros(ROWS, BATCH) if labels is None else labels, {}).at(at)


@pytest.mark.parametrize("form", ["absolute", "squared", "smoothed"])
def test_total_variation(form: str) -> None:
    def size(d: float) -> float:
        return abs(d) if form == "absolute" else d * d if form == "squared" else (d * d + 1e-4) ** 0.5 - 1e-2

    values = TV(0.1, form)(X, rows())  # type: ignore[arg-type]
    for row in range(ROWS):
        right, down = [], []
        for image in X[row].numpy():
            for channel in image:
                right += [size(a - b) for line in channel for a, b in zip(line[1:], line[:-1], strict=True)]
                down += [size(a - b) for line in channel.T for a, b in zip(line[1:], line[:-1], strict=True)]
        assert float(values[row]) == pytest.approx(0.1 * (np.mean(right) + np.mean(down)), rel=1e-6)
    assert float(TV(0.1, form)(torch.ones_like(X), rows()).abs().max()) < 1e-12  # type: ignore[arg-type]


def test_a_weight_for_each_row_follows_the_rows() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    plain = TV(1.0)(X, rows())
    assert torch.allclose(TV(weights)(X, rows()), weights * plain)
    some = torch.tensor([3, 1])
    assert torch.allclose(TV(weights)(X[some], rows(at=some)), weights[some] * plain[some])


def test_norm_and_box() -> None:
    values = L2Norm(0.2)(X, rows())
    outside = BoxPenalty(3.0)(X, rows())
    for row in range(ROWS):
        pixels = X[row].numpy().ravel()
        assert float(values[row]) == pytest.approx(0.2 * 0.5 * float((pixels**2).sum()))
        beyond = np.maximum(-1.0 - pixels, 0) + np.maximum(pixels - 1.5, 0)
        assert float(outside[row]) == pytest.approx(3.0 * float((beyond**2).mean()))
    assert float(BoxPenalty(3.0)(X.clamp(-1, 1.5), rows()).sum()) == 0


def test_restarts_of_a_victim_are_pulled_together() -> None:
    values = GroupPrior(0.5)(X, rows(restarts=2))
    for row in range(ROWS):
        pair = X[2 * (row // 2) : 2 * (row // 2) + 2]
        assert float(values[row]) == pytest.approx(0.5 * float((X[row] - pair.mean(0)).norm()), rel=1e-6)
    assert float(GroupPrior(0.5)(X, rows(restarts=1)).sum()) == 0


def test_an_images_output_should_be_its_label() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(60, 3)).double()
    labels = torch.tensor([[0, 1], [2, 2], [1, 0], [0, 0]])
    values = LabelTerm(0.1)(X, rows(module, labels=labels))
    with torch.no_grad():
        for row in range(ROWS):
            gap = module(X[row]) - F.one_hot(labels[row], 3)
            assert float(values[row]) == pytest.approx(0.1 * float((gap**2).sum()))
    some = torch.tensor([2, 0])
    assert torch.allclose(LabelTerm(0.1)(X[some], rows(module, labels=labels, at=some)), values[some])


def test_statistics_should_be_the_running_ones() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)).double()
    with torch.no_grad():
        for norm in (module[1], module[4]):
            norm.running_mean.normal_(generator=torch.Generator().manual_seed(1))
            norm.running_var.uniform_(0.5, 2, generator=torch.Generator().manual_seed(2))
    module.eval()
    values = BatchNormPrior(0.1)(X, rows(module))
    with torch.no_grad():
        for row in range(ROWS):
            total, a = 0.0, X[row]
            for layer in (0, 3):
                a = module[layer](a)
                mean, var = a.mean((0, 2, 3)), a.var((0, 2, 3))
                norm = module[layer + 1]
                total += float((mean - norm.running_mean).norm() + (var - norm.running_var).norm())
                a = torch.relu(norm(a))
            assert float(values[row]) == pytest.approx(0.1 * total, rel=1e-6)


def test_without_batch_norm_that_prior_is_void() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(60, 3)).double()
    assert BatchNormPrior(0.1)(X, rows(module)).tolist() == [0.0] * ROWS
