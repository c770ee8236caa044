"""The standard suites: which attacks an audit tries, fixed by a version name so that its verdicts can be compared.

Closed forms first, then the inversion of features, then `swift`, then the counters of the defense at hand; the published
matching attacks and the learned priors from the budget `standard` on. Attacks are batched over victims, so every attack sees
all of them. An older suite stays runnable by its name: it has the attacks of its time, each as it is now.

A counter is an attack that is built to break a defense. The project accepts its own attacks as counters of exactly the
classes that they declare (`against`): a subclass may do anything. What the author of a defense calls its counters, and what
a user's attack declares, is *claimed*: it runs too, and it never suffices. A part of a defense that has no accepted counter
always gets the generic counters, which need no insight.
"""

from collections.abc import Collection
from dataclasses import dataclass

from gradveil.attacks.base import Attack, Budget
from gradveil.attacks.registry import parse, registry
from gradveil.core.errors import UserError
from gradveil.defenses.base import Chain, Defense, claimed_counters
from gradveil.defenses.update.none import NoDefense

LEARNED = ("inverter", "ggl")
MATCHING: dict[Budget, tuple[str, ...]] = {
    "quick": ("swift",),
    "standard": ("swift", "ig", "idlg", "gradinversion", "bayes", *LEARNED),
    "thorough": (
        *("swift", "ig", "dlg", "idlg", "cpl", "gradinversion", "bayes"),
        *("adam-cosine", "adam-l1", "adam-l2", "sgd-cosine", "lbfgs-cosine", "lbfgs-l2"),
        *LEARNED,
    ),
}
GENERIC = ("layer-subsets", "expectation", "inverter")  # need only that the defense can be run


@dataclass(frozen=True)
class Suite:
    """The attacks on any defense; counters come on top."""

    name: str
    first: tuple[str, ...]  # in every budget, before all others; fast
    searches: tuple[str, ...] = ()  # in every budget, before the matching ones

    def common(self, budget: Budget) -> tuple[str, ...]:
        return (*self.first, *self.searches, *MATCHING[budget])


SUITES = (
    Suite("standard-v1", ("linear", "rgap")),
    Suite("standard-v2", ("linear", "rgap", "april", "token-span", "features"), ("patch-span",)),
)
NEWEST = SUITES[-1]


def suite_named(text: object) -> Suite | None:
    """The suite that a text names: `standard` is the newest; None where it names none."""
    return NEWEST if text == "standard" else next((suite for suite in SUITES if suite.name == text), None)


def accepted_counters(defense: type[Defense]) -> tuple[str, ...]:
    """The attacks that the project accepts as counters of this class."""
    return tuple(attack.name for attack in registry if _accepted(attack, defense))


def is_countered(defense: Defense, attacks: Collection[type[Attack]]) -> bool:
    """Whether an accepted counter of every part of the defense is among the attacks."""
    return all(any(_accepted(attack, type(part)) for attack in attacks) for part in _parts(defense))


@dataclass(frozen=True)
class Counters:
    """The counters of all parts of one defense, as texts that name attacks."""

    accepted: tuple[str, ...]
    claimed: tuple[str, ...]
    unknown: tuple[str, ...]  # claimed, but no attack

    @classmethod
    def of(cls, defense: Defense) -> "Counters":
        parts = _parts(defense)
        accepted = dict.fromkeys(name for part in parts for name in accepted_counters(type(part)))
        declared = [attack.name for attack in registry if any(type(part) in attack.against for part in parts)]
        named = dict.fromkeys((*claimed_counters(defense), *declared))
        claims = {text: _attack_class(text) for text in named if text not in accepted}
        claimed, unknown = (tuple(t for t, attack in claims.items() if (attack is None) == no) for no in (False, True))
        return cls(tuple(accepted), claimed, unknown)

    def accepts(self, attack: Attack) -> bool:
        return type(attack) in map(_attack_class, self.accepted)

    def claims(self, attack: Attack) -> bool:
        return type(attack) in map(_attack_class, self.claimed)


def suite_attacks(defense: Defense, budget: Budget = "quick", updates: int = 1, suite: Suite = NEWEST) -> list[str]:
    """The suite for one defense: the common attacks, its counters, and what several updates of a batch allow."""
    counters = Counters.of(defense)
    generic = () if all(accepted_counters(type(part)) for part in _parts(defense)) else GENERIC
    repeated = ("repeats",) if updates > 1 and defense.random else ()
    return list(dict.fromkeys([*suite.common(budget), *counters.accepted, *counters.claimed, *generic, *repeated]))


def _accepted(attack: type[Attack], defense: type[Defense]) -> bool:
    return defense in attack.against and attack.__module__.startswith("gradveil.")


def _parts(defense: Defense) -> tuple[Defense, ...]:
    """The parts that may change an update. What another class than `Chain` says about its parts does not count."""
    parts = defense.parts if type(defense) is Chain else (defense,)
    return tuple(part for part in parts if type(part) is not NoDefense)


def _attack_class(text: str) -> type[Attack] | None:
    """The class of the attack that `text` names, or None if it names none."""
    try:
        return type(parse(text))
    except UserError:
        return None
