"""Matching through the adversary's own copy of a defense, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradveil.attacks import parse
from gradveil.attacks.adaptive.expectation import _through
from gradveil.data import DataSet
from gradveil.defenses.base import Defense
from gradveil.errors import UserError


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


def test_a_gradient_is_its_own_or_goes_straight_through() -> None:
    before = {"a": torch.tensor([0.4, 1.6], requires_grad=True), "b": torch.tensor([1.0, 3.0], requires_grad=True)}
    after = _through(before, {"a": before["a"].round(), "b": 2 * before["b"]})
    assert after["a"].tolist() == [0.0, 2.0]
    assert torch.autograd.grad(after["a"].sum(), before["a"])[0].tolist() == [1.0, 1.0]
    assert torch.autograd.grad(after["b"].sum(), before["b"])[0].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("defense", "why"), [("none", "changes nothing"), ("dcs2:steps=100", "one round of the defense")]
)
def test_where_it_has_nothing_to_do_or_too_much_it_says_so(
    defense: str, why: str, shapes: DataSet, observe_victims: Callable
) -> None:
    seen, _ = observe_victims(data=shapes, victims=1, defense=defense)
    with pytest.raises(UserError, match=f"attack 'expectation' does not apply: .*{why}"):
        parse("expectation")(seen)
