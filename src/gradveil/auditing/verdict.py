"""From cells to `summary.json`: the rows, what the worst attack got of every victim, the test and the verdict.

A verdict is the outcome of a test with a known error rate, and never says more than the attacks have shown.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradveil import __version__
from gradveil.attacks.suite import Counters, is_countered
from gradveil.auditing.advice import Evidence, advise
from gradveil.auditing.case import Case
from gradveil.auditing.cost import utility_row
from gradveil.auditing.line_up import line_up_risk
from gradveil.auditing.notices import audit_notices, defense_notices, not_tested, only_rescaled
from gradveil.auditing.plan import KIND_NAMES, Cell, Plan, attacks_on, needed_for_shares, suite_name, trained_under
from gradveil.auditing.spec import written
from gradveil.core.errors import UserError
from gradveil.core.results import ImageScores, ScoreRow, Statistic, strongest
from gradveil.core.text import duration, plural
from gradveil.defenses.base import Defense
from gradveil.metrics import identification_rate
from gradveil.metrics.leak_test import (
    DRAWS,
    LEAST_EXCESS,
    LEVEL,
    POWER,
    Background,
    Exchanged,
    Numbers,
    detectable,
    exchange_test,
    null_rate,
    power,
)
from gradveil.storage.run_folder import StoredCell
from gradveil.summary import (
    CANNOT_TELL,
    CONTROL,
    LEAKS,
    NO_LEAK,
    UNREFUTED,
    AttackRow,
    CaseFacts,
    DefenseRow,
    DirectLook,
    Doubt,
    LeakTest,
    Summary,
    Verdict,
    VictimWorst,
    Worst,
)

Cells = Mapping[str, StoredCell]  # by key


def judge(case: Case, plan: Plan, cells: Cells) -> Summary:
    """The whole summary. `cells` are the stored cells of the plan."""
    control = Control.of(case, [cells[c.key] for c in plan.of("attack", CONTROL)], _looked(plan, cells, CONTROL))
    clean = _history(plan, cells, CONTROL)
    defenses = tuple(_defense(case, plan, cells, text, control, clean) for text in case.defenses)
    baseline = cells[plan.of("baseline")[0].key]
    data = case.data
    training = case.training
    facts: dict[str, object] = {"local_steps": training.number_of_steps(case.spec.batch_size), "local_lr": training.lr}
    facts |= {"local_epochs": training.epochs, "frozen": training.frozen}
    facts |= {"input_shape": data.input_shape, "num_classes": data.num_classes, "class_names": tuple(data.class_names)}
    facts |= {"mean": tuple(data.mean.tolist()), "std": tuple(data.std.tolist())}
    granted = dict.fromkeys(item for cell in cells.values() for item in cell.granted)
    needed = needed_for_shares(control.background, control.leaked) if control.ran else ()
    classes = data.num_classes if data.has_classes else None
    cost = sum(cell.expected_cpu_seconds or 0.0 for cell in cells.values() if cell.status == "not run") or None
    unpriced = [text for text in case.defenses if case.spec.utility and not plan.of("utility", text)]
    evidence = Evidence(case.spec, defenses, case.defenses, needed, classes, len(data.private), cost, unpriced)
    return Summary(
        gradveil=__version__,
        suite=suite_name(case),
        command=case.spec.command(),
        scope=scope(case),
        case=CaseFacts.model_validate({**case.terms, **facts}),
        granted=("the model and every update that is sent", *granted),
        not_tested=(*not_tested(case), *left_out(case, cells.values()), *_not_asked(case, plan)),
        warnings=audit_notices(case, defenses, control.weak),
        victims_needed=needed,
        defenses=defenses,
        baseline=baseline.rows[0] if baseline.status == "ok" else None,
        cost_left_out=cost,
        recommendation=advise(evidence),
    )


def scope(case: Case, malicious: Sequence[str] = ()) -> str:
    """Where a verdict holds, in a sentence's worth of words."""
    spec, names = case.spec, case.names
    state = "an untrained model"
    for count, word in ((spec.trained_rounds, "round"), (spec.trained_epochs, "epoch")):
        state = f"a model trained for {plural(count, word)}" if count else state
    if spec.trained_under == "none":
        state += " without a defense"
    sent = case.training.in_words(spec.batch_size)
    seen = f", {spec.updates} updates of each batch" if spec.updates > 1 else ""
    summed = f" of each of {spec.aggregate} clients, only their sum is seen" if spec.aggregate > 1 else ""
    fresh = f" beyond the first {spec.skip_victims}" if spec.skip_victims else ""
    server = f"; a malicious server in {', '.join(malicious)}" if malicious else ""
    return (
        f"{names['model']} on {names['data']}, {state}, batches of {plural(spec.batch_size, 'image')}{summed}, {sent}{seen}, "
        f"{plural(spec.victims, 'victim')}{fresh}, adversary of level {spec.knowledge}, budget {spec.budget}{server}"
    )


def left_out(case: Case, cells: Iterable[StoredCell]) -> list[str]:
    """Attacks that the audit would have had by itself, and cells for which there was no time."""
    cells = list(cells)
    not_run = [cell for cell in cells if cell.status == "not run"]
    late = [f"{cell.attack or KIND_NAMES[cell.kind]} under {cell.defense}{_expected(cell)}" for cell in not_run]
    named = {written(attack) for attack in case.spec.attacks}
    items = {"left out of the suite": [a for a in case.spec.without if a not in named], "left out for lack of time": late}
    failed = [cell for cell in cells if cell.kind == "line-up" and cell.status not in ("ok", "not run")]
    return [f"{reason}: {', '.join(names)}" for reason, names in items.items() if names] + [
        f"the line-up under {cell.defense}: {cell.status} ({cell.error})" for cell in failed
    ]


def _not_asked(case: Case, plan: Plan) -> list[str]:
    """Attacks on defenses that leak without them."""
    planned = {(cell.attack, cell.defense) for cell in plan if cell.kind == "attack"}
    pairs = [(name, text) for text, defense in case.defenses.items() for name in attacks_on(case, defense)]
    names = [f"{name} under {text}" for name, text in pairs if (name, text) not in planned]
    return [f"left out, as a leak was seen before (all attacks together may get more): {', '.join(names)}"] if names else []


def _expected(cell: StoredCell) -> str:
    return f" ({duration(cell.expected_cpu_seconds)} of one core)" if cell.expected_cpu_seconds else ""


# -- the test --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Likenesses:
    """How alike every image is to any answer of any attack, and the most similar distractor of every victim."""

    images: Numbers  # batches × victims and strangers
    nearest: Numbers  # per victim

    @classmethod
    def of(cls, case: Case, ran: Sequence[StoredCell]) -> "Likenesses":
        used, victims = case.slots.used, len(case.slots.batch)
        images, nearest = np.zeros(used.shape), np.zeros(victims)
        for cell in ran:
            row_lengths, scored = [len(row) for row in cell.likeness], victims if cell.kind == "attack" else 0
            if row_lengths != used.sum(axis=1).tolist() or len(cell.victims) != scored:
                raise UserError(f"cell {cell.key} does not hold the likenesses of this audit; delete it and resume the audit.")
            images[used] = np.maximum(images[used], np.concatenate(cell.likeness))
            if cell.victims:
                nearest = np.maximum(nearest, [image.nearest or 0.0 for image in cell.victims])
        return cls(images, nearest)

    def exchanged(self, case: Case) -> Exchanged:
        return exchange_test(self.images, case.slots, case.spec.seed, nearest=self.nearest)

    def background(self, case: Case) -> Background:
        """What the answers have in common with images that no update was computed from."""
        return Background(self.images[:, len(case.slots.batch) :], case.slots, case.private_counts, self.nearest)


@dataclass(frozen=True, eq=False)
class Control:
    """What the attacks got where nothing was defended: the measure of what they can do here."""

    rate: float  # share of tested victims that are identified
    null: float  # the same, victims and strangers exchanged
    leaked: tuple[float, ...]  # likenesses of the identified victims; of a perfect image where there are none
    leaks: bool
    background: Background
    ran: frozenset[str]  # attacks
    weak: tuple[str, ...]  # attacks that show no leak on their own

    @classmethod
    def of(cls, case: Case, attacked: Sequence[StoredCell], looked: Sequence[StoredCell]) -> "Control":
        ran, slots = [cell for cell in attacked if cell.status == "ok"], case.slots
        together = Likenesses.of(case, [*ran, *looked])
        images = _strongest(ran)[0]
        identified = np.array([bool(image.identified) for image in images], dtype=bool) & slots.tested[: len(images)]
        likeness = together.images[slots.batch, np.arange(len(slots.batch))][: len(images)]
        alone = {cell.attack: Likenesses.of(case, [cell]).exchanged(case) for cell in ran}
        return cls(
            rate=float(identified.sum() / max(1, slots.tested.sum())),
            null=null_rate(together.images, together.nearest, slots),
            leaked=tuple(likeness[identified].tolist()) or (1.0,),
            leaks=together.exchanged(case).leaks,
            background=together.background(case),
            ran=frozenset(cell.attack for cell in ran),
            weak=tuple(name for name, outcome in alone.items() if not outcome.leaks),
        )

    @property
    def excess(self) -> float:
        return max(0.0, self.rate - self.null)


def _looked(plan: Plan, cells: Cells, text: str) -> list[StoredCell]:
    """The direct look at the updates of a defense, if it is part of the audit and worked."""
    return [stored for cell in plan.of("look", text) if (stored := cells[cell.key]).status == "ok"]


def _look(case: Case, looked: Sequence[StoredCell]) -> DirectLook | None:
    if not looked:
        return None
    table, slots, victims = Likenesses.of(case, looked).images, case.slots, range(len(case.slots.batch))
    strangers = table[:, len(victims) :].max(axis=1, initial=0.0)
    seen = [(s.tensor, s.reading) for k in victims if (s := looked[0].sights[k]).likeness > strangers[slots.batch[k]]]
    (tensor, reading), _ = Counter(seen or [("", "")]).most_common(1)[0]
    return DirectLook(p=exchange_test(table, slots, case.spec.seed).p, seen=len(seen), tensor=tensor, reading=reading)


def _test(case: Case, compared: Sequence[StoredCell], control: Control) -> LeakTest | None:
    """None where no attack ran and nothing was looked at."""
    if not compared:
        return None
    likenesses, slots = Likenesses.of(case, compared), case.slots
    outcome, background = likenesses.exchanged(case), likenesses.background(case)
    return LeakTest(
        statistic=outcome.statistic,
        null_mean=outcome.null_mean,
        p=outcome.p,
        level=LEVEL,
        draws=DRAWS,
        strangers=len(slots.stranger_label),
        untested=int((~slots.tested).sum()),
        smallest_p=slots.smallest_p,
        control_rate=control.rate,
        control_null=control.null,
        power=power(background, control.leaked, control.excess / 2, case.spec.victims),
        detectable=detectable(background, control.leaked),
    )


def _verdict(
    case: Case, defense: Defense, test: LeakTest | None, control: Control, observed: StoredCell, attacked: Sequence[StoredCell]
) -> tuple[Verdict, tuple[Doubt, ...]]:
    """In order of precedence. The control leaks, or nothing can be told; what only rescales is the control."""
    if (test is not None and test.leaks) or (control.leaks and only_rescaled(observed)):
        return LEAKS, ()
    if doubts := tuple(_doubts(case, test, control, attacked)):
        return CANNOT_TELL, doubts
    ran = {type(case.attack(c.attack)) for c in attacked if c.status == "ok" and c.kind == "attack"}
    late = {c.attack for c in attacked if c.status == "not run"}
    missing = (late | set(case.spec.without) - {c.attack for c in attacked}) & set(Counters.of(defense).accepted)
    countered = is_countered(defense, ran) and not missing
    return NO_LEAK if countered else UNREFUTED, ()


def _doubts(case: Case, test: LeakTest | None, control: Control, attacked: Sequence[StoredCell]) -> Iterator[Doubt]:
    """Why it would say nothing that no leak was shown. The control itself always has one, unless it leaks."""
    if test is None:
        yield "no-attack-ran"
    elif case.slots.smallest_p > LEVEL:
        yield "few-strangers"
    elif not control.leaks:
        yield "control-does-not-leak"
    elif control.excess < LEAST_EXCESS:
        yield "control-leaks-little"
    elif test.power < POWER:
        yield "few-victims"
    if any(c.status in ("failed", "not run") and (c.kind == "look" or c.attack in control.ran) for c in attacked):
        yield "attacks-failed"


# -- one defense -----------------------------------------------------------------------------------------------------


def _defense(case: Case, plan: Plan, cells: Cells, text: str, control: Control, clean: StoredCell | None) -> DefenseRow:
    defense, counters = case.defenses[text], Counters.of(case.defenses[text])
    attacked = [cells[cell.key] for cell in plan.of("attack", text)]
    ran, looked = [cell for cell in attacked if cell.status == "ok"], _looked(plan, cells, text)
    observed = cells[next(c for c in plan.of("observe", text) if not c.attack).key]
    test, look = _test(case, [*ran, *looked], control), _look(case, looked)
    all_cells = [*attacked, *(cells[cell.key] for cell in plan.of("look", text))]
    verdict, doubts = _verdict(case, defense, test, control, observed, all_cells)
    row = DefenseRow(
        spec=text,
        stage=tuple(defense.stages),
        counter=counters.accepted,
        claimed=counters.claimed,
        scope=scope(case, [c.attack for c in plan.of("observe", text) if c.attack]),
        verdict=verdict,
        doubts=doubts,
        test=test,
        look=look,
        line_up=line_up_risk(case, defense, [cells[cell.key] for cell in plan.of("line-up", text)]),
        warnings=(),
        utility=utility_row(case, _history(plan, cells, text), clean),
        gradient=observed.gradient,
        attacks=tuple(row for cell in plan.of("attack", text) for row in _rows(case, counters, cell, cells[cell.key])),
        worst=_worst(case, ran),
    )
    trained = [cells[cell.key] for cell in plan.of("train", trained_under(case, text))]
    return row.model_copy(update={"warnings": defense_notices(case, defense, trained, observed, all_cells, row)})


def _rows(case: Case, counters: Counters, cell: Cell, stored: StoredCell) -> Iterable[AttackRow]:
    """One row for every truth the attack is scored against; a single empty one where it has none."""
    attack = case.attack(cell.attack)
    for row in stored.rows or (ScoreRow(),):
        yield AttackRow(
            **dict(row),
            spec=cell.attack,
            status=stored.status,
            adaptive=counters.accepts(attack),
            claimed=counters.claims(attack),
            knowledge=case.spec.knowledge,
            updates=case.spec.updates,
            seconds=stored.seconds,
            iterations=stored.iterations,
            error=stored.error,
            cell=cell.key,
        )


def _worst(case: Case, ran: Sequence[StoredCell]) -> Worst | None:
    """For every image the attack that got most of it. It is identified where no distractor is as alike to any answer."""
    if not ran:
        return None
    images, attacks = _strongest(ran)
    chance = max(rate.chance for cell in ran if (rate := cell.rows[0].identified))
    identified = torch.tensor([bool(image.identified) for image in images])
    return Worst(
        psnr=Statistic.of([image.psnr for image in images]),
        ssim=Statistic.of([image.ssim for image in images]),
        mse=Statistic.of([image.mse for image in images]),
        lpips=Statistic.of([image.lpips for image in images]),
        others={n: s for n in images[0].others if (s := Statistic.of([image.others.get(n) for image in images]))},
        asr=sum(image.recognisable for image in images) / len(images),
        identified=identification_rate(identified, chance, case.spec.victims),
        scored=len(images),
        failed=sum(image.failed for image in images),
        attacks=len(ran),
        by_victim=tuple(
            VictimWorst(**image.model_dump(include=set(VictimWorst.model_fields)), attack=attack)
            for image, attack in zip(images, attacks, strict=True)
        ),
    )


def _strongest(ran: Sequence[StoredCell]) -> tuple[list[ImageScores], list[str]]:
    """Of every image the scores under the attack that got most of it, and this attack."""
    images, attacks = [], []
    for tried in zip(*(cell.victims for cell in ran), strict=True):
        images.append(strongest(tried))
        attacks.append(max(zip(tried, ran, strict=True), key=lambda pair: pair[0].strength)[1].attack)
    return images, attacks


# -- costs -----------------------------------------------------------------------------------------------------------


def _history(plan: Plan, cells: Cells, text: str) -> StoredCell | None:
    """The federated training under a defense, if it was asked for and worked."""
    trained = [cells[c.key] for c in plan.of("utility", text)]
    return trained[0] if trained and trained[0].status == "ok" else None
