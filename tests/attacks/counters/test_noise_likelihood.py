"""A noise defense is attacked by what it declares, whoever wrote it: attacks name no defense that adds noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from gradveil.attacks import parse
from gradveil.attacks.base import Target
from gradveil.attacks.counters.noise_likelihood import WEIGHTS, NoiseLikelihood, expected_misfit
from gradveil.attacks.matching.bayes import likelihood
from gradveil.attacks.matching.distances import GaussianLikelihood, LaplaceLikelihood
from gradveil.attacks.matching.problem import Insight
from gradveil.core.errors import UserError
from gradveil.core.types import Noise, Tensors
from gradveil.data import DataSet
from gradveil.defenses import parse as parse_defense
from gradveil.defenses.base import Defense, Step
from gradveil.defenses.update.noise import Gaussian

STD = 0.05


class Secretive(Defense):
    """A user's defense: Gaussian noise of which it declares nothing."""

    random = True

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return {n: g + STD * torch.randn(g.shape, generator=step.rng) for n, g in tensors.items()}


class Honest(Secretive):
    """The same, with the size of its noise."""

    def added_noise(self, examples: int) -> Noise:
        return Noise(STD)


class Understated(Secretive):
    """The same, with a tenth of the size of its noise."""

    def added_noise(self, examples: int) -> Noise:
        return Noise(STD / 10)


def test_a_users_noise_gets_the_weight_of_its_declared_size(observe_victims: Callable, shapes: DataSet) -> None:
    attack = parse("noise-likelihood:steps=300")
    named = {"gaussian": f"gaussian:std={STD}", **{c.__name__: f"{__name__}:{c.__name__}" for c in (Honest, Understated)}}
    answers, expected = {}, {}
    for name, defense in named.items():
        seen, _ = observe_victims(data=shapes, victims=2, defense=defense)
        answers[name] = attack(seen)
        expected[name] = [expected_misfit(o) for o in seen]
    # The draws are those of `gaussian`, so the same declaration gives the same images …
    for ours, theirs in zip(answers["Honest"], answers["gaussian"], strict=True):
        assert torch.equal(ours.images, theirs.images)
    entries = sum(t.numel() for t in seen[0].update.tensors.values())
    assert expected["Honest"] == pytest.approx([entries * STD**2] * 2)
    # … and another declaration another choice among the priors: nothing fits noise that small, so the best fit is kept.
    assert expected["Understated"] == pytest.approx([entries * STD**2 / 100] * 2)
    for honest, understated in zip(answers["Honest"], answers["Understated"], strict=True):
        assert not torch.equal(honest.images, understated.images)
        assert understated.score < honest.score


def test_undeclared_noise_is_not_its_business(observe_victims: Callable, shapes: DataSet) -> None:
    seen, _ = observe_victims(data=shapes, victims=1, defense=f"{__name__}:Secretive")
    with pytest.raises(UserError, match="adds no noise of known size"):
        parse("noise-likelihood")(seen)


@pytest.mark.parametrize(
    ("spec", "examples", "noise", "norm"),
    [
        ("none", 1, None, None),
        ("gaussian:std=0.3", 4, Noise(0.3), None),
        ("laplace:scale=0.5", 4, Noise(0.5 * 2**0.5, "laplace"), None),
        ("clip:norm=2", 4, None, 2.0),
        ("dpsgd:noise=3,clip=2", 1, Noise(6.0), 2.0),
        ("dpsgd:noise=3,clip=2", 4, Noise(1.5), None),  # images are clipped one by one, their mean is not
        ("dpsgd:noise=0,clip=2", 1, None, 2.0),
        ("graddefense:std=0.2", 1, Noise(0.2), None),
        ("prune+laplace:scale=0.5", 1, Noise(0.5 * 2**0.5, "laplace"), None),
        ("gaussian:std=3+laplace:scale=2.8284271247461903", 1, Noise(5.0), None),  # variances add up
        ("clip:norm=2+clip:norm=0.5", 1, None, 0.5),
    ],
)
def test_what_defenses_declare(spec: str, examples: int, noise: Noise | None, norm: float | None) -> None:
    defense = parse_defense(spec)
    declared = defense.added_noise(examples)
    assert defense.clip_norm(examples) == norm
    assert (declared is None) == (noise is None)
    if declared and noise:
        assert declared.std == pytest.approx(noise.std)
        assert declared.law == noise.law


def test_the_likelihood_is_that_of_the_declared_noise() -> None:
    gaussian = likelihood([Noise(0.2), Noise(1e-6), Noise(0.3)], 1e-3)  # one per row
    assert isinstance(gaussian, GaussianLikelihood)
    assert gaussian.std.tolist() == pytest.approx([0.2, 1e-3, 0.3])
    assert gaussian.select(torch.tensor([2, 1])).std.tolist() == pytest.approx([0.3, 1e-3])
    without = likelihood([None], 1e-3)
    assert isinstance(without, GaussianLikelihood)
    assert without.std.tolist() == pytest.approx([1e-3])
    laplace = likelihood([Noise(0.2 * 2**0.5, "laplace")], 1e-3)
    assert isinstance(laplace, LaplaceLikelihood)
    assert laplace.scale.tolist() == pytest.approx([0.2])


def test_a_part_is_asked_for_by_its_class(observe_victims: Callable, shapes: DataSet) -> None:
    knowledge = observe_victims(data=shapes, victims=1, defense=f"prune+gaussian:std={STD}")[0][0].knowledge
    assert knowledge.part(Gaussian) == Gaussian(std=STD)
    assert knowledge.part(Honest) is None


def test_where_the_strongest_prior_explains_an_update_no_other_is_tried(
    observe_victims: Callable, shapes: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[int, int]] = []
    search = NoiseLikelihood._search

    def counted(self: NoiseLikelihood, target: Target, insight: Insight, weights: Sequence[float]) -> object:
        tried.append((target.shape[0], len(weights)))
        return search(self, target, insight, weights)

    monkeypatch.setattr(NoiseLikelihood, "_search", counted)
    attack = parse("noise-likelihood:steps=20")
    attack(observe_victims(data=shapes, victims=2, defense="gaussian:relative=10.0")[0])
    assert tried == [(2, 1)]
    tried.clear()
    attack(observe_victims(data=shapes, victims=2, defense="gaussian:relative=0.01")[0])
    assert tried == [(2, 1), (2, len(WEIGHTS) - 1)]
