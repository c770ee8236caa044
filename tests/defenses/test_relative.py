"""Settings relative to the update's own size: the relative change is the same for an update of any size."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from gradveil.attacks.registry import parse as parse_attack
from gradveil.attacks.suite import is_countered
from gradveil.attacks.unit_length import unit_length
from gradveil.auditing.strength import STRENGTHS
from gradveil.core.errors import UserError
from gradveil.core.randomness import Stream, Streams, generator
from gradveil.core.types import Noise, Tensors
from gradveil.core.update_change import update_change
from gradveil.data import DataSet
from gradveil.defenses import parse
from gradveil.defenses.base import Step

FACTORS = (1e-30, 1e-9, 1e-3, 1.0, 7.0, 1e6, 1e30)
EXPECTED = {"clip:relative=0.5": 0.5, "clip:relative=1": 0.0, "gaussian:relative=0.3": 0.3, "laplace:relative=2": 2.0}


def tensors(seed: int = 0) -> Tensors:
    """Tensors of very different sizes, as layers have them."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"a": ((300, 200), 1.0), "b": ((40, 40), 1e-3), "c": ((7,), 30.0)}
    return {name: size * torch.randn(shape, generator=random) for name, (shape, size) in shapes.items()}


def changed(text: str, update: Tensors, rng: Stream) -> Tensors:
    nothing: object = None
    return parse(text).update(dict(update), Step(nothing, {}, nothing, rng))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", EXPECTED)
@pytest.mark.parametrize("seed", range(3))
def test_the_relative_change_does_not_depend_on_the_size(text: str, seed: int) -> None:
    ratios, cosines = [], []
    for factor in FACTORS:
        update = {name: t.double() * factor for name, t in tensors(seed).items()}
        change = update_change(changed(text, update, generator(seed)), update)
        assert change is not None and change.noise_ratio is not None and change.cosine is not None
        ratios.append(change.noise_ratio)
        cosines.append(change.cosine)
    assert ratios == pytest.approx([ratios[0]] * len(FACTORS), rel=1e-6)
    assert cosines == pytest.approx([cosines[0]] * len(FACTORS), rel=1e-6)
    assert ratios[0] == pytest.approx(EXPECTED[text], rel=0.02, abs=1e-9)


@pytest.mark.parametrize("text", ["gaussian:relative=0.3", "laplace:relative=2"])
def test_noise_of_real_protection_has_the_same_size(text: str) -> None:
    for factor in (1e-6, 1.0, 1e6):
        update = {name: t * factor for name, t in tensors().items()}
        change = update_change(changed(text, update, Streams()("update")), update)
        assert change is not None and change.noise_ratio == pytest.approx(EXPECTED[text], rel=0.03)


def test_an_absolute_setting_does_depend_on_it() -> None:
    small, large = ({name: t * factor for name, t in tensors().items()} for factor in (1.0, 100.0))
    ratios = [update_change(changed("gaussian:std=0.1", u, generator(0)), u) for u in (small, large)]
    assert ratios[0] and ratios[1] and ratios[0].noise_ratio and ratios[1].noise_ratio
    assert ratios[0].noise_ratio == pytest.approx(100 * ratios[1].noise_ratio, rel=1e-3)


def test_an_update_of_zeros_stays_zero() -> None:
    for text in EXPECTED:
        assert not changed(text, {"a": torch.zeros(4)}, Streams()("update"))["a"].any()


@pytest.mark.parametrize("text", ["clip:norm=2,relative=0.5", "gaussian:std=1,relative=1", "laplace:scale=1,relative=1"])
def test_one_of_both_settings(text: str) -> None:
    with pytest.raises(UserError, match="not both"):
        parse(text)


def test_what_is_declared() -> None:
    assert parse("clip:relative=0.5").clip_norm(1) is None
    assert parse("gaussian:relative=0.3").added_noise(4) == Noise(0.3, relative=True)
    assert parse("laplace:relative=0.3").added_noise(4) == Noise(0.3, "laplace", relative=True)
    assert parse("prune+gaussian:relative=0.3").added_noise(1) == Noise(0.3, relative=True)
    assert parse("gaussian:std=1+gaussian:relative=0.3").added_noise(1) is None  # of an unknown size
    assert parse("gaussian:relative=0.3").spec == "gaussian:relative=0.3"


def test_the_adversary_knows_the_size_of_relative_noise(observe_victims: Callable, shapes: DataSet) -> None:
    seen, _ = observe_victims(data=shapes, victims=2, defense="gaussian:relative=0.7")
    plain, _ = observe_victims(data=shapes, victims=2, defense="none")
    for noisy, clean in zip(seen, plain, strict=True):
        at_unit = unit_length(noisy)
        noise = torch.cat([(t - clean.update.tensors[n]).flatten() for n, t in noisy.update.tensors.items()])
        declared = at_unit.knowledge.noise
        assert declared is not None and not declared.relative
        assert declared.std == pytest.approx(float(noise.std()) / at_unit.knowledge.norm, rel=0.05)
        assert declared.std * math.sqrt(len(noise)) == pytest.approx(0.7 / math.sqrt(1.49), rel=1e-6)


def test_counters_still_apply(observe_victims: Callable, shapes: DataSet) -> None:
    for defense, counter in (("clip:relative=0.5", "clip-aware"), ("gaussian:relative=0.3", "noise-likelihood")):
        seen, _ = observe_victims(data=shapes, victims=1, defense=defense)
        attack = parse_attack(counter)
        assert attack.applies(seen[0]) is None
        assert is_countered(parse(defense), [type(attack)])


def test_advice_proposes_relative_settings_for_relative_ones() -> None:
    defense = parse("gaussian:relative=0.1")
    strength = STRENGTHS[type(defense)]
    level = strength.level(defense)
    assert level == pytest.approx(-1) and strength.at(defense, level + 1) == "gaussian:relative=1.0"
    assert strength.at(parse("gaussian:std=0.1"), 0.0) == "gaussian:std=1.0"
