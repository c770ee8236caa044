"""The learned inverter: smooth little pictures come back through pruning, noise and a defense it has never heard of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from gradveil import metrics
from gradveil.attacks import parse
from gradveil.attacks.base import Target
from gradveil.attacks.generative import inverter
from gradveil.attacks.generative.rehearsal import copy_of_client, cost_of_round, rehearse
from gradveil.core.errors import UserError
from gradveil.core.observation import Reconstruction, Trace
from gradveil.core.randomness import generator
from gradveil.core.types import Batch
from gradveil.data import DataSet
from gradveil.defenses.base import Defense


class Signs(Defense):
    """Sends nothing but signs: a user's own idea, given by its import path."""

    def update(self, tensors: dict, step: object) -> dict:
        return {n: t.sign() for n, t in tensors.items()}


class Half(Defense):
    """Sends half precision."""

    def update(self, tensors: dict, step: object) -> dict:
        return {n: t.half() for n, t in tensors.items()}


@pytest.fixture(scope="module")
def many() -> DataSet:
    """The pictures of `shapes`, with more public ones."""

    def made(n: int, purpose: str) -> Batch:
        coarse = torch.rand(n, 1, 4, 4, generator=generator(1, "many", purpose))
        x = torch.nn.functional.interpolate(coarse, scale_factor=3, mode="bilinear", align_corners=False)
        return Batch((x * 255).round() / 255, torch.arange(n) % 3)

    parts = [made(n, purpose) for n, purpose in ((60, "private"), (300, "public"), (200, "test"))]
    return DataSet("many", *parts, 3, ("a", "b", "c"), torch.tensor([0.5]), torch.tensor([0.25]))


def identified(found: list[Reconstruction], truth: list[Trace], data: DataSet) -> float:
    x, y = torch.cat([t.original.x for t in truth]), torch.cat([t.original.y for t in truth])
    ranks = metrics.identify(x, y, torch.cat([r.images for r in found]), data.pool())
    return float(ranks.identified.float().mean())


@pytest.mark.parametrize("defense", ["none", "prune:ratio=0.97", "gaussian:std=0.02", f"{__name__}:Signs", f"{__name__}:Half"])
def test_who_it_was_shows_through(defense: str, many: DataSet, observe_victims: Callable, best_psnr: Callable) -> None:
    seen, truth = observe_victims(data=many, defense=defense, victims=12)
    found = parse("inverter")(seen, budget="quick")
    means = metrics.baseline(many.public, torch.cat([t.original.y for t in truth]))
    without = metrics.psnr(torch.cat([t.original.x for t in truth]), means).mean()
    assert best_psnr(found, truth).mean() > without + 1.5
    assert identified(found, truth, many) >= 0.4  # chance: below 1 in 200
    # Held against the truth of another victim the same pictures say nothing.
    assert identified(found, truth[3:] + truth[:3], many) <= 0.1


def test_noise_that_drowns_everything_leaves_the_class_mean(many: DataSet, observe_victims: Callable) -> None:
    seen, truth = observe_victims(data=many, defense="gaussian:std=100", victims=12, level="paper")
    found = parse("inverter")(seen, budget="quick")
    assert identified(found, truth, many) <= 0.1
    means = metrics.baseline(many.public, torch.cat([t.original.y for t in truth]))
    assert (torch.cat([r.images for r in found]) - means).abs().mean() < 0.1


def test_an_answer_does_not_depend_on_who_else_is_asked_about(many: DataSet, observe_victims: Callable) -> None:
    seen, _ = observe_victims(data=many, victims=3)
    together, alone = parse("inverter")(seen)[2], parse("inverter")(seen[2:])[0]
    assert torch.allclose(together.images, alone.images, atol=1e-4)


def test_public_images_must_be_of_the_same_kind(many: DataSet, shapes: DataSet, observe_victims: Callable) -> None:
    (one,), _ = observe_victims(data=many, victims=1)
    for public, why in ((None, "needs public"), (Batch(torch.rand(50, 1, 8, 8), torch.zeros(50).long()), "kind")):
        other = dataclasses.replace(one, knowledge=dataclasses.replace(one.knowledge, public=public))
        with pytest.raises(UserError, match=why):
            parse("inverter")([other])


def test_hashing_keeps_inner_products(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(6, 40_000, generator=generator("rows"))
    rows[1] = rows[0]
    monkeypatch.setattr(inverter, "WIDTH", 4_096)
    short = inverter._hashed(rows, "layer")
    assert short.shape == (6, 4_096)
    assert torch.allclose(short @ short.T / 40_000, rows @ rows.T / 40_000, atol=0.06)


def test_a_dear_defense_is_rehearsed_without(many: DataSet, observe_victims: Callable) -> None:
    (plain,), _ = observe_victims(data=many, victims=1)
    (dear,), _ = observe_victims(data=many, victims=1, defense="dcs2:steps=100")
    costs = []
    for one in (plain, dear):
        target = Target([one], torch.zeros(1, 1).long(), generator(0), "quick")
        client = copy_of_client(target, many.public)
        costs.append(cost_of_round(client, target.state, many.public[:1]))
        assert costs[-1] == cost_of_round(client, target.state, many.public[:1]), "not counted but timed"
    assert costs[1] > 50 * costs[0]
    assert rehearse(Target([plain], torch.zeros(1, 1).long(), generator(0), "quick")).defended
