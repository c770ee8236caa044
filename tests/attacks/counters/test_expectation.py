"""Matching through the adversary's own copy of a defense, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradveil.attacks import parse
from gradveil.attacks.base import Target
from gradveil.attacks.generative.rehearsal import copy_of_client
from gradveil.attacks.generic.expectation import _Defended
from gradveil.attacks.matching.problem import Match
from gradveil.core.errors import UserError
from gradveil.core.randomness import generator
from gradveil.data import DataSet
from gradveil.defenses.base import Defense


class Reversed(Defense):
    """Sends every tensor with its entries in reverse order."""

    def update(self, tensors: dict, step: object) -> dict:
        return {n: t.flip(0) for n, t in tensors.items()}


def test_what_the_defense_does_is_done_to_our_update_too(
    shapes: DataSet, observe_victims: Callable, best_psnr: Callable
) -> None:
    seen, truth = observe_victims(data=shapes, victims=2, defense=f"{__name__}:Reversed", level="paper")
    found = parse("expectation:tv=1e-4,steps=400")(seen, budget="quick")
    assert best_psnr(found, truth).mean() > 20
    assert best_psnr(parse("ig:steps=200")(seen), truth).mean() < 14


class Coarse(Defense):
    """Sends the first tensor rounded to tenths, the others doubled."""

    def update(self, tensors: dict, step: object) -> dict:
        first, *others = tensors
        return {first: (tensors[first] * 10).round() / 10, **{n: 2 * tensors[n] for n in others}}


def test_a_gradient_is_its_own_or_goes_straight_through(shapes: DataSet, observe_victims: Callable) -> None:
    seen, _ = observe_victims(data=shapes, victims=1, defense=f"{__name__}:Coarse", level="paper")
    target = Target(seen, torch.stack([o.knowledge.labels for o in seen]), generator("test"))
    problem = _Defended(target, Match(restarts=1), copy_of_client(target, None), draws=1)
    x = torch.rand(target.shape, generator=generator("x")).requires_grad_()
    sent = problem._defended(x, target.labels, target.state, (0, 0, 0))
    plain = target.model.gradients(target.state, x, target.labels)
    first, *others = plain
    assert torch.allclose(sent[first], (plain[first] * 10).round() / 10)
    for name, factor in [(first, 1.0), (others[0], 2.0)]:
        found, own = (torch.autograd.grad(t[name].sum(), x, retain_graph=True)[0] for t in (sent, plain))
        assert torch.allclose(found, factor * own, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("defense", "why"), [("none", "changes nothing"), ("dcs2:steps=100", "one round of the defense")])
def test_where_it_has_nothing_to_do_or_too_much_it_says_so(
    defense: str, why: str, shapes: DataSet, observe_victims: Callable
) -> None:
    seen, _ = observe_victims(data=shapes, victims=1, defense=defense)
    with pytest.raises(UserError, match=f"attack 'expectation' does not apply: .*{why}"):
        parse("expectation")(seen)
