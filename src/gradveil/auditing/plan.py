"""The cells of an audit and what each needs. A cell's key is a hash of all that determines its content, code included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from gradveil.attacks.base import Attack
from gradveil.attacks.suite import VERSION, suite_attacks
from gradveil.auditing.case import Case
from gradveil.auditing.spec import SUITE, written
from gradveil.core.hashing import digest, short_hash, source_hash
from gradveil.defenses.base import Defense
from gradveil.metrics.registry import registered

CellKind = Literal["baseline", "train", "observe", "attack", "utility"]
KINDS: tuple[CellKind, ...] = get_args(CellKind)


@dataclass(frozen=True)
class Cell:
    """One piece of work: stored when it is done, and never done twice."""

    key: str
    kind: CellKind
    defense: str = ""
    attack: str = ""  # of an observe cell: the malicious server's, whose model the update was computed on
    needs: tuple[str, ...] = ()

    @classmethod
    def read(cls, value: dict[str, Any]) -> Cell:
        return cls(**{**value, "needs": tuple(value["needs"])})

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.kind == "baseline":
            return "baseline without an update"
        work = {"attack": self.attack, "utility": "accuracy", "train": "training", "observe": "updates"}[self.kind]
        server = f" from {self.attack}" if self.kind == "observe" and self.attack else ""
        return f"{work} under {self.defense}{server}"


@dataclass(frozen=True)
class Plan:
    cells: tuple[Cell, ...]

    def __iter__(self) -> Iterator[Cell]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)

    def of(self, kind: CellKind, defense: str = "") -> list[Cell]:
        return [c for c in self.cells if c.kind == kind and c.defense == defense]


def make_plan(case: Case) -> Plan:
    """Every cell once, what is needed first."""
    metrics = [[metric.name, metric.version, source_hash(metric.measure)] for metric in registered()]
    cells = [_cell(case, "baseline", metrics)]
    for text, defense in case.defenses.items():
        code = [_code(part) for part in defense.parts]
        trained = case.spec.trained_rounds or case.spec.trained_epochs
        train = [_cell(case, "train", code, text)] if trained else []
        honest = _cell(case, "observe", code, text, needs=train)
        cells += [*train, honest]
        for name in attacks_on(case, defense):
            attack, observed = case.attack(name), honest
            if type(attack).tamper is not Attack.tamper:
                observed = _cell(case, "observe", [*code, _code(attack)], text, name, needs=train)
                cells.append(observed)
            cells.append(_cell(case, "attack", [_code(attack), metrics], text, name, needs=[*train, observed]))
        if case.spec.utility:
            cells.append(_cell(case, "utility", [*code, case.spec.utility.model_dump()], text))
    return Plan(tuple(sorted(cells, key=lambda c: KINDS.index(c.kind))))


def _code(method: Attack | Defense) -> list[object]:
    """What results depend on beside a method's text: its version, and the code and attributes of a user's class."""
    attributes = {} if is_dataclass(method) else vars(method)
    tensors = {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in attributes.items() if name not in tensors}
    return [method.version, source_hash(method), digest(repr(others), tensors)]


def _cell(
    case: Case, kind: CellKind, facts: Sequence[object], defense: str = "", attack: str = "", *, needs: Sequence[Cell] = ()
) -> Cell:
    """`facts` are what the content depends on beside the case, the methods' texts and the cells it needs."""
    keys = tuple(cell.key for cell in needs)
    return Cell(short_hash([case.id, kind, defense, attack, keys, facts]), kind, defense, attack, keys)


def attacks_on(case: Case, defense: Defense) -> list[str]:
    """Exactly the attacks that were named; with the suite among them also the counters of the defense."""
    suite = suite_attacks(defense, case.spec.budget, case.spec.updates)
    named = [suite if attack == SUITE else [written(attack)] for attack in case.spec.attacks]
    return list(dict.fromkeys(name for names in named for name in names))


def suite_name(case: Case) -> str:
    return VERSION if SUITE in case.spec.attacks else "custom"
