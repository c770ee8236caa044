"""The suite of a defense: its counters, accepted and claimed, and the generic ones where no counter is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradveil.attacks import Answer, Attack, Target, attack, registry
from gradveil.attacks import parse as parse_attack
from gradveil.attacks.suite import (
    GENERIC,
    NEWEST,
    SUITES,
    Counters,
    accepted_counters,
    is_countered,
    suite_attacks,
    suite_named,
)
from gradveil.core.errors import UserError
from gradveil.core.types import Tensors
from gradveil.defenses import parse
from gradveil.defenses.base import Chain, Defense, Step
from gradveil.defenses.registry import registry as defenses
from gradveil.defenses.update.clip import Clip

COMMON = [*NEWEST.common("quick")]


class Mine(Defense):
    """A defense of a user."""

    name = "mine"
    counters = ("linear", " clip-aware", "test_suite:Breaker", "test_suite:Mine", "no-attack", "no.module:Name")

    def update(self, tensors: Tensors, step: Step) -> Tensors:
        return tensors


class Breaker(Attack):
    """An attack of a user."""

    def run(self, target: Target) -> Answer:
        return Answer(torch.zeros(target.shape), torch.zeros(target.shape[0]))


@pytest.mark.parametrize("cls", [cls for cls in defenses if cls.name not in ("none", "quantize")])
def test_a_defense_of_the_project_gets_its_counters_and_not_the_generic_ones(cls: type[Defense]) -> None:
    counters = accepted_counters(cls)
    assert counters
    assert suite_attacks(cls()) == [*COMMON, *counters]


def test_what_has_no_counter_gets_the_generic_ones_whatever_it_claims() -> None:
    assert suite_attacks(parse("none")) == COMMON
    assert suite_attacks(parse("quantize")) == [*COMMON, *GENERIC]
    assert suite_attacks(parse("clip+quantize")) == [*COMMON, "clip-aware", *GENERIC]
    assert suite_attacks(Mine()) == [*COMMON, "clip-aware", "test_suite:Breaker", *GENERIC]  # `linear` is there already
    assert set(GENERIC) <= set(suite_attacks(Chain([Clip(), Mine()])))


def test_claims_are_read_and_told_from_what_is_accepted() -> None:
    alone = Counters.of(Mine())
    assert alone.accepted == ()
    assert alone.claimed == ("linear", "clip-aware", "test_suite:Breaker")
    assert alone.unknown == ("test_suite:Mine", "no-attack", "no.module:Name")
    both = Counters.of(Chain([Clip(), Mine()]))
    assert both.accepted == ("clip-aware",)
    assert both.claimed == ("linear", "test_suite:Breaker")
    ran = [registry["clip-aware"], registry["linear"], Breaker]
    assert is_countered(Clip(), ran)
    assert not is_countered(Mine(), ran)
    assert not is_countered(Chain([Clip(), Mine()]), ran)


@pytest.mark.parametrize(
    ("counters", "claimed", "unknown"),
    [
        ("linear", ("linear",), ()),
        (None, (), ("object of class NoneType",)),
        ((Breaker(), {"linear"}), (), ("object of class Breaker", "object of class set")),
        (("exits_on_import:Name",), (), ("exits_on_import:Name",)),
    ],
)
def test_counters_that_are_written_wrongly_are_named_and_stop_nothing(
    counters: object, claimed: tuple[str, ...], unknown: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exits_on_import.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Mine, "counters", counters)
    defense = Mine()
    for whole in (defense, Chain([defense])):
        assert Counters.of(whole) == Counters((), claimed, unknown)
        assert set(GENERIC) <= set(suite_attacks(whole))


def test_no_class_takes_the_name_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    impostor = type("Linear", (Breaker,), {"name": "linear"})
    with pytest.raises(UserError, match="'linear' is not the class Linear"):
        parse_attack(impostor())
    with pytest.raises(ValueError, match="two attacks are named 'linear'"):
        attack("linear")(type(registry["linear"].__qualname__, (Breaker,), {"__doc__": "Another."}))
    monkeypatch.setattr(Mine, "name", "none")
    for defense in (Mine(), Chain([Mine()])):
        with pytest.raises(UserError, match="'none' is not the class Mine"):
            parse(defense)


def test_a_subclass_is_another_defense() -> None:
    class Looser(Clip):
        """Clips nothing."""

        def update(self, tensors: Tensors, step: Step) -> Tensors:
            return tensors

    assert accepted_counters(Looser) == ()
    assert set(GENERIC) <= set(suite_attacks(Looser()))


def test_an_attack_that_a_user_registers_against_a_defense_is_only_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.names()  # so that all are there before the copy
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    attack("mine-breaker", against=(Clip, Mine))(type("Registered", (Breaker,), {"__doc__": "Another."}))
    assert accepted_counters(Clip) == ("clip-aware",)
    assert Counters.of(Clip()) == Counters(("clip-aware",), ("mine-breaker",), ())
    assert suite_attacks(Clip()) == [*COMMON, "clip-aware", "mine-breaker"]
    assert accepted_counters(Mine) == ()
    assert "mine-breaker" in Counters.of(Mine()).claimed
    assert not is_countered(Mine(), [registry["mine-breaker"]])


def test_an_older_suite_stays_runnable_by_its_name() -> None:
    assert [suite.name for suite in SUITES] == ["standard-v1", "standard-v2"]
    assert suite_named("standard") is NEWEST is SUITES[-1] and suite_named("swift") is None
    assert suite_attacks(Clip(), suite=SUITES[0]) == ["linear", "rgap", "swift", "clip-aware"]
    assert suite_attacks(Clip()) == [
        *("linear", "rgap", "april", "token-span", "features", "patch-span", "swift", "clip-aware")
    ]
