"""The route without gradients on fully connected nets, against the exact one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradveil.attacks.base import Target
from gradveil.attacks.labels import infer_labels
from gradveil.attacks.matching import dense
from gradveil.attacks.matching.distances import L2, Cosine
from gradveil.attacks.matching.priors import TV
from gradveil.attacks.matching.problem import Match, Problem
from gradveil.core.randomness import generator


def target(observe_victims: Callable, **how: object) -> Target:
    seen, _ = observe_victims(**how)
    return Target(seen, torch.stack([infer_labels(o) for o in seen]), generator(0, "dense"))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("defense", ["none", "precode"])
@pytest.mark.parametrize("model", ["smlp", "dmlp"])
def test_it_gives_what_the_exact_route_gives(observe_victims: Callable, model: str, defense: str, batch: int) -> None:
    one = target(observe_victims, model=model, victims=2, batch_size=batch, defense=defense)
    problem = Problem(one, Match(Cosine(), (TV(1e-3),), restarts=2))
    route = dense.objective(problem)
    assert route is not None
    x = torch.randn(4, *one.shape[1:], generator=generator(1, "x"))
    value, gradient = route(x)
    exact_value, exact_gradient = problem(x)
    assert torch.allclose(value, exact_value, atol=1e-5)
    assert torch.allclose(gradient, exact_gradient, atol=1e-3 * float(exact_gradient.abs().max()))


def test_it_stands_back_where_it_does_not_apply(observe_victims: Callable) -> None:
    assert dense.objective(Problem(target(observe_victims, model="lenet", victims=1), Match(Cosine(), ()))) is None
    assert dense.objective(Problem(target(observe_victims, model="smlp", victims=1), Match(L2(), ()))) is None
