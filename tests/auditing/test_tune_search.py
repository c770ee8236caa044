"""The search of a tune without any audit: which strength is next, what a setting rests on, what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.auditing.spec import AuditSpec, make_spec
from gradveil.auditing.strength import NEAR, StrengthScale
from gradveil.auditing.tuning.bracket import Bracket
from gradveil.auditing.tuning.spec import FAMILIES, TuneSpec
from gradveil.auditing.utility import rounds_of_an_image
from gradveil.core.errors import UserError
from gradveil.core.results import GradientChange
from gradveil.defenses import parse
from gradveil.federation import FederationPlan


def scale(text: str) -> StrengthScale:
    at = StrengthScale.of(parse(text))
    assert at is not None
    return at


def searched(text: str, threshold: float, most: int = 9, least: float | None = None) -> Bracket:
    """A search of a defense that leaks below a level."""
    bracket = Bracket(scale(text), most, least)
    while (setting := bracket.next()) is not None:
        bracket.record(setting, "leaks" if scale(setting).level < threshold else "holds")
    return bracket


# -- strengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*FAMILIES, "clip:norm=2.0+gaussian:std=0.3"])
def test_a_setting_is_read_back_at_its_level(text: str) -> None:
    at = scale(text)
    for level in (0.3, 1.0, 2.5):
        again = scale(at.at(level))
        assert again.level == pytest.approx(level, abs=0.03) and again.family == at.family
        assert scale(at.at(level, at_least=True)).level >= level - 1e-9


def test_a_combination_keeps_its_other_parts() -> None:
    assert scale("clip:norm=2.0+gaussian:std=0.3").at(0) == "clip:norm=2.0+gaussian:std=1.0"
    assert scale("clip:norm=2.0+gaussian:std=0.3").name == "clip+gaussian"
    assert StrengthScale.of(parse("gaussian+prune")) is None, "two strengths"
    assert StrengthScale.of(parse("clip")) is None and StrengthScale.of(parse("gaussian:std=0")) is None


# -- the bracket --------------------------------------------------------------------------------------------------------


@given(st.floats(-3, 3), st.floats(-2, 2))
def test_the_weakest_setting_that_holds_is_found_within_a_factor_of_two(threshold: float, start: float) -> None:
    bracket = searched(f"gaussian:std={10**start}", threshold, most=20)
    assert bracket.leaking is not None and bracket.level(bracket.leaking) < threshold <= bracket.level(bracket.holding[0])
    assert bracket.level(bracket.holding[0]) - bracket.level(bracket.leaking) <= NEAR + 0.03
    assert len(bracket.tried) <= 2 + abs(threshold - start) + 1 + 2, "steps of ten, then halves"


def test_at_most_so_many_strengths_are_tried() -> None:
    assert len(searched("gaussian:std=0.001", 9.0, most=4).tried) == 4
    assert not searched("gaussian:std=0.001", 9.0, most=4).holding


def test_pruning_nothing_is_known_to_leak() -> None:
    bracket = searched("prune:ratio=0.9", 0.4)
    assert bracket.level(bracket.holding[0]) == pytest.approx(0.5, abs=0.03) and all(
        level > 0 for level, _ in bracket.tried.values()
    )


@pytest.mark.parametrize("text", ["prune:ratio=0.9999999", "gaussian:std=1e+300", "dpsgd:noise=1e-310", "laplace:scale=1.0"])
@pytest.mark.parametrize("threshold", [-math.inf, math.inf])
def test_a_search_ends_before_a_strength_is_no_number(text: str, threshold: float) -> None:
    assert text in searched(text, threshold, most=60).tried


def test_below_a_promise_nothing_is_tried() -> None:
    least = math.log10(1.234)
    bracket = searched("dpsgd:noise=0.01", -5, least=least)
    assert list(bracket.tried) == ["dpsgd:noise=1.24"], "rounded up"
    bracket = searched("dpsgd:noise=0.01", 0.8, least=least)
    assert min(level for level, _ in bracket.tried.values()) >= least and bracket.level(bracket.holding[0]) >= 0.8


def test_the_search_ends_where_a_stronger_setting_sends_the_same_or_nothing_can_be_told() -> None:
    bracket, same = Bracket(scale("prune:ratio=0.9"), 9), GradientChange(cosine=0.1, noise_ratio=0.9, norm=1.0)
    for text in (bracket.next(), bracket.next()):
        assert text is not None
    bracket.record("prune:ratio=0.9", "leaks", same)
    bracket.record("prune:ratio=0.99", "leaks", same)
    assert bracket.at_its_end and bracket.next() is None
    bracket = Bracket(scale("gaussian"), 9)
    bracket.record("gaussian:std=0.01", "unknown")
    assert bracket.next() is None and not bracket.holding


def test_what_fails_on_fresh_victims_makes_room_for_a_stronger_one() -> None:
    bracket = searched("gaussian:relative=1.0", 0.9, most=4)
    weakest = bracket.holding[0]
    bracket.fail(weakest)
    assert bracket.leaking == weakest and bracket.is_below_failed("gaussian:relative=1.0")
    stronger = bracket.next()
    assert stronger is None or scale(stronger).level > bracket.level(weakest)


# -- the settings ---------------------------------------------------------------------------------------------------------


def test_the_settings_are_those_of_an_audit_and_the_command_says_them() -> None:
    spec = make_spec({"model": "smlp", "risk": 0.05, "max_loss": 2.0, "defenses": ["dpsgd:noise=0.1"], "seed": 3}, TuneSpec)
    assert isinstance(spec, TuneSpec) and spec.utility is not None
    assert spec.command() == "gradveil tune --model smlp --defense dpsgd:noise=0.1 --seed 3 --max-loss 2.0 --risk 0.05"
    audit = spec.audit(defenses=["dpsgd:noise=0.5"])
    assert type(audit) is AuditSpec and audit.defenses == ("none", "dpsgd:noise=0.5") and audit.utility is None
    assert audit.terms() == AuditSpec(model="smlp", seed=3, victims=16).terms(), "cells of audits are used again"
    assert spec.fresh().skip_victims == 16 and spec.fresh().victims == 16
    assert TuneSpec().defenses == FAMILIES and "--no-utility" in str(TuneSpec(utility=None).command())


@pytest.mark.parametrize(
    ("defenses", "says"),
    [
        (["clip"], "'clip' has no strength to search"),
        (["gaussian+prune"], "has no strength to search"),
        (["dpsgd:epsilon=1"], "has no strength to search"),
        (["gaussian", "gaussian:std=1"], "one defense at two strengths"),
        (["gaussian", "laplace", "prune", "dpsgd", "graddefense"], "at most 4"),
        (["none"], "'none' is no defense"),
    ],
)
def test_defenses_that_cannot_be_searched_are_refused(defenses: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_spec({"defenses": defenses}, TuneSpec)


# -- how often an image takes part ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [
        ({"rounds": 7, "clients": 3}, 7),
        ({"rounds": 10, "clients": 2, "fedsgd": True, "images_per_client": 10, "batch_size": 2}, 2),
        ({"rounds": 11, "clients": 2, "fedsgd": True, "images_per_client": 10, "batch_size": 2}, 3),
        ({"rounds": 5, "clients": 2, "fedsgd": True, "images_per_client": 10, "batch_size": 64}, 5),
        (
            {
                "rounds": 5,
                "clients": 2,
                "fedsgd": True,
                "images_per_client": 10,
                "batch_size": 1,
                "partition": "classes:per_client=1",
            },
            5,
        ),
    ],
)
def test_the_rounds_of_an_image(settings: dict, rounds: int) -> None:
    assert rounds_of_an_image(FederationPlan(**settings)) == rounds


def test_clients_that_are_drawn_take_part_as_often_as_they_are_drawn() -> None:
    plan = FederationPlan(rounds=20, clients=50, sampled=5)
    assert rounds_of_an_image(plan) == max(sum(c in plan.chosen(r) for r in range(20)) for c in range(50)) < 20
