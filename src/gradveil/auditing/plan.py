"""The cells of an audit and what each needs. A cell's key is a hash of all that determines its content, code included."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from gradveil.attacks import lineup
from gradveil.attacks.base import Attack, Cost, Workload
from gradveil.attacks.suite import suite_attacks, suite_named
from gradveil.auditing import utility
from gradveil.auditing.case import Case
from gradveil.auditing.spec import CONTROL, written
from gradveil.core.hashing import digest, short_hash, source_hash
from gradveil.defenses.base import Defense
from gradveil.metrics import direct_look, likeness_table
from gradveil.metrics.leak_test import Background, detectable, victims_needed
from gradveil.metrics.registry import registered
from gradveil.summary import VictimsNeeded

KIND_NAMES = {
    "utility": "accuracy",
    "train": "training",
    "observe": "updates",
    "look": "direct look",
    "line-up": "line-up",
}  # in words
CellKind = Literal[
    "baseline", "train", "observe", "look", "attack", "line-up", "utility"
]  # in the order in which they are done: where time ends early, the verdict comes before the second risk and the cost
SHARES = (0.1, 0.25, 0.5)  # leaks for which an audit says how many victims it would need
KINDS: tuple[CellKind, ...] = get_args(CellKind)
SMALL = 50.0  # iterations that take as long as a cell without a search


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
        work = KIND_NAMES.get(self.kind, self.attack)
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


def make_plan(case: Case, unpriced: Collection[str] = (), asked: Mapping[str, Collection[str]] | None = None) -> Plan:
    """Every cell once, what is needed first.

    The cost of `unpriced` defenses is not measured. Of defenses in `asked`, only the attacks that it names are planned.
    """
    asked = asked or {}
    metrics = [[metric.name, metric.version, source_hash(metric.measure)] for metric in registered()]
    cells = [_cell(case, "baseline", metrics)]
    for text, defense in case.defenses.items():
        code = [_code(part) for part in defense.parts]
        train = _training(case, trained_under(case, text))
        honest = _cell(case, "observe", code, text, needs=train)
        cells += [*(cell for cell in train if cell.defense == text), honest]
        for name in attacks_on(case, defense):
            if text in asked and name not in asked[text]:
                continue
            attack, observed = case.attack(name), honest
            if type(attack).tamper is not Attack.tamper:
                observed = _cell(case, "observe", [*code, _code(attack)], text, name, needs=train)
                cells.append(observed)
            cells.append(_cell(case, "attack", [_code(attack), metrics], text, name, needs=[*train, observed]))
        if case.spec.suite:
            cells.append(_cell(case, "look", [direct_look.VERSION], text, needs=[*train, honest]))
        if case.spec.candidates:
            cells.append(_cell(case, "line-up", [lineup.VERSION, case.spec.candidates], text, needs=[*train, honest]))
        if case.spec.utility and text not in unpriced:
            cells.append(_cell(case, "utility", [*code, utility.VERSION, case.spec.utility.model_dump()], text))
    return Plan(tuple(sorted(cells, key=lambda c: KINDS.index(c.kind))))


def trained_under(case: Case, text: str) -> str:
    """The defense under which its attacked model is trained. Layers that a defense adds are not trained without it."""
    without = case.spec.trained_under == "none" and "model" not in case.defenses[text].stages
    return CONTROL if without else text


def _training(case: Case, text: str) -> list[Cell]:
    """The training of the attacked model under a defense; none for an untrained one."""
    if not (case.spec.trained_rounds or case.spec.trained_epochs):
        return []
    return [_cell(case, "train", [_code(part) for part in case.defenses[text].parts], text)]


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


def expected_power(case: Case) -> tuple[float | None, tuple[VictimsNeeded, ...]]:
    """Before the run: the smallest leak that would be seen, and the victims needed for a leak of each of `SHARES`.

    Assumed: a victim that leaks is rebuilt exactly; for the others the answer is another image of the class.
    """
    rng, pool, slots = np.random.default_rng(case.spec.seed), case.distractors, case.slots
    if not len(pool) or not len(slots.stranger_label):
        return None, ()
    classes = pool.y.numpy()
    same_class = [np.flatnonzero(classes == label) for label in slots.label]
    answers = pool.x[[rng.choice(images if len(images) else len(pool)) for images in same_class]]
    table = likeness_table(answers, torch.from_numpy(slots.batch), case.tested.x[len(slots.label) :]).numpy()
    background = Background(table, slots, case.private_counts)
    return detectable(background, [1.0]), needed_for_shares(background, [1.0])


def needed_for_shares(background: Background, leaked: Sequence[float]) -> tuple[VictimsNeeded, ...]:
    """The victims that are needed to see a leak of each of `SHARES`."""
    return tuple(VictimsNeeded(share=share, victims=victims_needed(background, leaked, share)) for share in SHARES)


def attacks_on(case: Case, defense: Defense) -> list[str]:
    """Exactly the attacks that were named; with the suite among them also the counters of the defense, but not
    those of the suite that are left out."""
    spec, named = case.spec, list[str]()
    for attack in spec.attacks:
        if suite := suite_named(attack):
            named += [a for a in suite_attacks(defense, spec.budget, spec.updates, suite) if a not in spec.without]
        else:
            named.append(written(attack))
    return list(dict.fromkeys(named))


def cost_of(case: Case, cell: Cell) -> Cost:
    """What the attack of a cell says of its cost; nothing for other cells."""
    if cell.kind != "attack":
        return Cost(0)
    task, _ = case.task(case.defenses[cell.defense])
    images = 0 if case.public is None else len(case.public)
    work = Workload(task, case.spec.budget, case.spec.images, case.seen_training, images)
    return case.attack(cell.attack).cost(work)


def weights_of(case: Case, cells: Iterable[Cell]) -> dict[str, float]:
    """About how much work each cell is, without timing anything: good for telling the time that is left."""
    weights = {}
    for cell in cells:
        try:
            cost = cost_of(case, cell)
        except Exception:  # in the code of a user, which fails again in its cell and is reported there
            cost = Cost(0)
        trained = _trained_updates(case) if cell.kind == "utility" else 0
        weights[cell.key] = SMALL + cost.iterations * cost.rows + trained / case.spec.victims
    return weights


def _trained_updates(case: Case) -> int:
    """The updates of clients in the trainings of one utility cell."""
    training = case.spec.utility
    assert training is not None
    plan = training.plan(case.training, case.spec.batch_size, len(case.data.private), case.spec.seed)
    tried = len(training.factors) // 2  # of half the rounds
    steps = plan.local_training(0).number_of_steps(plan.images_per_client or 1)
    return (training.seeds + tried) * plan.rounds * (plan.sampled or plan.clients) * steps


def suite_name(case: Case) -> str:
    return case.spec.suite.name if case.spec.suite else "custom"
