"""The cells of an audit and what each waits for. A cell's key is a hash of all that determines its content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from gradveil.attacks.base import Attack
from gradveil.attacks.suite import VERSION, suite_attacks
from gradveil.auditing.case import Case, short_hash, source_of
from gradveil.auditing.spec import SUITE, written
from gradveil.defenses.base import Defense

Kind = Literal["baseline", "train", "observe", "attack", "utility"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Cell:
    """One piece of work: stored when it is done, and never done twice."""

    key: str
    kind: Kind
    defense: str = ""
    attack: str = ""  # of an observe cell: the malicious server's, whose model the update was computed on
    needs: tuple[str, ...] = ()

    @classmethod
    def read(cls, value: dict[str, Any]) -> Cell:
        return cls(**{**value, "needs": tuple(value["needs"])})

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        what = {"attack": self.attack, "utility": "accuracy", "train": "training", "observe": "updates"}
        if self.kind == "baseline":
            return "baseline without an update"
        return f"{what[self.kind]} under {self.defense}" + (f" from {self.attack}" if self._malicious else "")

    @property
    def _malicious(self) -> bool:
        return self.kind == "observe" and bool(self.attack)


@dataclass(frozen=True)
class Plan:
    cells: tuple[Cell, ...]

    def __iter__(self) -> Iterator[Cell]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)

    def of(self, kind: Kind, defense: str = "") -> list[Cell]:
        return [c for c in self.cells if c.kind == kind and c.defense == defense]


def make_plan(case: Case) -> Plan:
    """Every cell once, what is waited for first."""
    cells = [_cell(case, "baseline")]
    for text, defense in case.defenses.items():
        own = [source_of(type(part)) for part in defense.parts]
        train = []
        if case.spec.trained_rounds or case.spec.trained_epochs:
            train = [_cell(case, "train", text, source=own)]
        honest = _cell(case, "observe", text, needs=train, source=own)
        cells += [*train, honest]
        for name in attacks_on(case, defense):
            attack = case.attack(name)
            seen, source = honest, source_of(type(attack))
            if type(attack).tamper is not Attack.tamper:
                seen = _cell(case, "observe", text, name, needs=train, source=[*own, source])
                cells.append(seen)
            cells.append(_cell(case, "attack", text, name, needs=[*train, seen], source=source))
        if case.spec.utility:
            cells.append(_cell(case, "utility", text, source=own, how=case.spec.utility.model_dump()))
    return Plan(tuple(sorted(cells, key=lambda c: KINDS.index(c.kind))))


def _cell(case: Case, kind: Kind, defense: str = "", attack: str = "", needs: Any = (), **facts: Any) -> Cell:
    waits = tuple(c.key for c in needs)
    key = short_hash([case.id, kind, defense, attack, waits, facts])
    return Cell(key, kind, defense, attack, waits)


def attacks_on(case: Case, defense: Defense) -> list[str]:
    """Exactly the attacks that were named; with the suite among them also the counters of the defense."""
    names: list[str] = []
    for given in case.spec.attacks:
        if given == SUITE:
            names += suite_attacks(defense, case.spec.budget, case.spec.updates)
        else:
            names.append(written(given))
    return list(dict.fromkeys(names))


def suite_name(case: Case) -> str:
    return VERSION if SUITE in case.spec.attacks else "custom"
