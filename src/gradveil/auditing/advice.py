"""Which defense to take, why not the others, and what to do next: rules on the rows of a summary, never on impressions.

A defense is recommended only where no leak was shown, in spite of an accepted counter, by attacks that work without a
defense, on enough victims, at a measured and tolerable cost. docs/verdicts.md states the same rules for readers.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gradveil.attacks.suite import suite_named
from gradveil.auditing.notices import is_near_chance
from gradveil.auditing.spec import FIRST, SUITE, AuditSpec, as_list, make_spec
from gradveil.auditing.strength import NEAR, StrengthScale
from gradveil.auditing.tuning.spec import MOST_FAMILIES, TuneSpec
from gradveil.core.errors import UserError
from gradveil.core.results import GradientChange
from gradveil.core.text import duration, listing, plural
from gradveil.defenses import parse
from gradveil.defenses.base import Defense
from gradveil.defenses.gradient.dpsgd import DpSgd
from gradveil.defenses.update.clip import Clip
from gradveil.metrics.leak_test import LEAST_EXCESS
from gradveil.summary import (
    CANNOT_TELL,
    LEAKS,
    NO_LEAK,
    DefenseRow,
    NextStep,
    Recommendation,
    Rejection,
    RejectionCode,
    StepCode,
    VictimsNeeded,
)

# Of 16 images without a hit at most 21% leak (95% interval). Images of a batch share one update, hence several batches.
LEAST_IMAGES, LEAST_BATCHES = 16, 8
MOST_UNSEEN = 0.25  # share of leaking images above which a leak must be seen with a probability of 80%
DP = "dpsgd:clip=1.0,noise=1.0"
DP_START = "dpsgd:noise=0.01"  # where a search begins
LARGER, LARGEST = 8, 64  # images in a batch that is proposed
AGGREGATE, MOST_AGGREGATE = 8, 64  # clients of a sum that is proposed
_BUDGETS = {"quick": "standard", "standard": "thorough"}


def is_strong(control: DefenseRow | None) -> bool:
    """Whether the attacks get so much without a defense that their failing under one means something."""
    test = control.test if control else None
    leaks = control is not None and control.verdict == LEAKS
    return leaks and test is not None and test.control_rate - test.control_null >= LEAST_EXCESS


@dataclass(frozen=True)
class Evidence:
    """All that a recommendation rests on."""

    spec: AuditSpec
    rows: Sequence[DefenseRow]
    methods: Mapping[str, Defense]  # by the text of the row
    needed: Sequence[VictimsNeeded] = ()
    classes: int | None = None  # None: the targets are no classes
    private: int = 0  # images
    cost_left_out: float | None = None  # CPU seconds of the trainings for which there was no time
    unpriced: Collection[str] = ()  # defenses whose cost was not to be measured

    @property
    def audited(self) -> list[DefenseRow]:
        return [row for row in self.rows if not row.control]

    @property
    def control(self) -> DefenseRow | None:
        return next((row for row in self.rows if row.control), None)

    @property
    def strong_control(self) -> bool:
        return is_strong(self.control)

    def near_chance(self, row: DefenseRow | None) -> bool:
        """Whether the model was measured and has learnt next to nothing."""
        if row is None or row.accuracy is None or self.classes is None:
            return False
        return is_near_chance(row.accuracy, self.classes)

    def images(self, row: DefenseRow) -> int:
        """Images that took part in the test."""
        return row.worst.scored - row.test.untested if row.worst and row.test else 0

    def command(self, **changes: object) -> str | None:
        """The command of this audit with only these settings replaced; None where they do not fit the others."""
        values: dict[str, object] = {name: getattr(self.spec, name) for name in type(self.spec).model_fields}
        values |= changes
        if isinstance(self.spec, TuneSpec):
            values["defenses"] = _weakest_of_each(values["defenses"])
        try:
            return make_spec(values, type(self.spec)).command()
        except UserError:  # the step stays, in words
            return None

    def tune_command(self, families: Sequence[str]) -> str | None:
        """The command that searches the strengths of these defenses in the same case: with counters, on enough victims."""
        spec = self.spec
        values = {name: getattr(spec, name) for name in AuditSpec.model_fields}
        victims = max(spec.victims, LEAST_BATCHES, -(-LEAST_IMAGES // spec.images))
        attacks = spec.attacks if spec.suite else (*spec.attacks, SUITE)
        changes = {"defenses": families, "attacks": attacks, "victims": victims, "utility": spec.utility or True}
        try:
            return make_spec(values | changes, TuneSpec).command()
        except UserError:
            return None


def _weakest_of_each(defenses: object) -> list[object]:
    """A search takes each defense once, at the strength where it begins."""
    weakest: dict[str, tuple[float, object]] = {}
    for defense in as_list(defenses):
        scale = StrengthScale.of(parse(defense)) if isinstance(defense, str | Defense) else None
        if scale and scale.level < weakest.get(scale.family, (math.inf, None))[0]:
            weakest[scale.family] = scale.level, defense
    return [defense for _, defense in weakest.values()]


def advise(evidence: Evidence) -> Recommendation:
    """The cheapest defense against which nothing speaks; else what is missing."""
    reasons = {row.spec: reasons_against(evidence, row) for row in evidence.audited}
    eligible = [row for row in evidence.audited if not reasons[row.spec]]
    best = min(eligible, key=lambda row: (row.loss, row.overhead or math.inf), default=None)
    reasons |= {row.spec: ("costs-more",) for row in eligible if row is not best}
    return Recommendation(
        defense=best.spec if best else None,
        max_loss=evidence.spec.max_loss,
        rejected=tuple(Rejection(spec=spec, reasons=codes) for spec, codes in reasons.items() if codes),
        next_steps=tuple(after(evidence, best) if best else _steps(evidence, reasons)),
    )


def reasons_against(evidence: Evidence, row: DefenseRow) -> tuple[RejectionCode, ...]:
    """All that speaks against a defense."""
    if row.verdict == LEAKS:
        return ("leaks",)
    if row.verdict == CANNOT_TELL:
        return ("cannot-tell",)
    unseen = row.test.detectable if row.test else None
    applies: dict[RejectionCode, bool] = {
        "weak-control": not evidence.strong_control,
        "no-counter": row.verdict != NO_LEAK or not any(attack.adaptive and attack.ok for attack in row.attacks),
        "few-victims": evidence.images(row) < LEAST_IMAGES or evidence.spec.victims < LEAST_BATCHES,
        "coarse-test": unseen is None or unseen > MOST_UNSEEN,
    }
    return (*(code for code, holds in applies.items() if holds), *cost_reasons(evidence, row))


def cost_reasons(evidence: Evidence, row: DefenseRow) -> tuple[RejectionCode, ...]:
    """What speaks against its cost in accuracy."""
    if row.loss is not None and evidence.near_chance(evidence.control):
        return ("nothing-to-lose",)
    applies: dict[RejectionCode, bool] = {
        "cost-not-measured": row.loss is None or row.accuracy is None,
        "too-costly": row.loss is not None and row.loss > evidence.spec.max_loss,
        "uncertain-cost": row.loss is not None and row.loss <= evidence.spec.max_loss < (row.most_lost or 0.0),
        "near-chance": evidence.near_chance(row),
    }
    return tuple(code for code, holds in applies.items() if holds)


# -- what to do next ---------------------------------------------------------------------------------------------------

Reasons = Mapping[str, tuple[RejectionCode, ...]]


def after(evidence: Evidence, best: DefenseRow) -> Iterator[NextStep]:
    """What remains to be asked of a recommended defense."""
    if any(notice.code == "single-draw" for notice in best.warnings):
        why = f"{best.spec} is random and was judged on a single draw. Who sees several updates of an image can average."
        yield _step(evidence, "several-updates", why, updates=4)


def _steps(evidence: Evidence, reasons: Reasons) -> Iterator[NextStep]:
    """Where nothing can be recommended: first what makes the audit able to tell, then other defenses and settings."""
    if not evidence.audited:
        yield _step(evidence, "audit-defenses", "No defense was audited.", defenses=FIRST)
        return
    if not evidence.strong_control:
        yield _stronger_attacks(evidence)
    final = {"leaks", "too-costly", "near-chance"}
    open_rows = [row for row in evidence.audited if not final & set(reasons[row.spec])]
    if open_rows and evidence.strong_control:
        yield from _complete(evidence, open_rows, reasons)
    if not open_rows:
        yield from _settings_to_try(evidence)
        yield from _other_protection(evidence)


def _step(evidence: Evidence, code: StepCode, reason: str, **changes: object) -> NextStep:
    return NextStep(code=code, reason=reason, command=evidence.command(**changes) if changes else None)


def _stronger_attacks(evidence: Evidence) -> NextStep:
    """What lets the attacks get more where nothing is defended."""
    spec, control = evidence.spec, evidence.control
    if control is not None and "few-strangers" in control.doubts:
        why = "There are too few private images to compare the victims with. Give the audit more of them, or fewer victims."
        return _step(evidence, "more-private-images", why)
    tried = control is not None and control.test is not None
    got = "Without a defense the attacks get too little here" if tried else "No attack ran without a defense"
    why = f"{got}, so it says nothing if none succeeds under one. "
    if spec.without and spec.suite:
        why += f"{listing(spec.without)} took no part. The command runs the whole suite; --plan tells how long it takes."
        return _step(evidence, "stronger-attacks", why, without=(), attacks=tuple(a for a in spec.attacks if suite_named(a)))
    if not spec.suite:
        return _step(evidence, "stronger-attacks", f"{why}The standard suite has more attacks.", attacks=(*spec.attacks, SUITE))
    if larger := _BUDGETS.get(spec.budget):
        return _step(evidence, "stronger-attacks", f"{why}The budget {larger} has more and longer attacks.", budget=larger)
    if spec.batch_size > 1:
        smaller = f"{why}Smaller batches are easier to attack; what holds there holds for larger ones more likely."
        return _step(evidence, "stronger-attacks", smaller, batch_size=spec.batch_size // 2)
    return _step(evidence, "stronger-attacks", f"{why}No stronger setting of the suite is left to try.")


def _complete(evidence: Evidence, rows: Sequence[DefenseRow], reasons: Reasons) -> Iterator[NextStep]:
    """What is missing of the evidence for defenses that may hold."""
    rows = [row for row in rows if row.spec not in evidence.unpriced] or rows
    # Defenses that are out of the question stay out: measuring what they cost can take longer than all the rest.
    changes: dict[str, object] = {"defenses": [row.spec for row in evidence.rows if row.control or row in rows]}
    missing: list[str] = []
    codes = {code for row in rows for code in reasons[row.spec]}
    doubts = {doubt for row in rows for doubt in row.doubts}
    if {"few-victims", "coarse-test"} & codes or "few-victims" in doubts:
        victims = _victims(evidence, coarse="coarse-test" in codes or "few-victims" in doubts)
        if victims is None:
            why = f"A leak of {MOST_UNSEEN:.0%} of the images can be seen only with more private images than the data has."
            yield _step(evidence, "more-private-images", why)
        else:
            changes["victims"] = victims
            missing.append(plural(victims, "victim"))
    counters = dict.fromkeys(name for row in rows if "no-counter" in reasons[row.spec] for name in row.left_out)
    if counters:
        left_out = evidence.spec.without
        changes["without"] = tuple(name for name in left_out if name not in counters)
        changes["attacks"] = (*evidence.spec.attacks, *(name for name in counters if name not in left_out))
        missing.append(f"attacks that are built to break the defense ({listing(counters)})")
    if evidence.spec.utility is None:
        changes["utility"] = True
        missing.append("the cost in accuracy")
    elif evidence.cost_left_out is not None:
        missing.append(f"the cost in accuracy, which takes {duration(evidence.cost_left_out)} of one core")
    else:
        training = _longer_training(evidence, codes)
        changes |= {"utility": evidence.spec.utility.model_copy(update=training)} if training else {}
        missing += [f"{plural(count, unit[:-1])} of the training" for unit, count in training.items()]
    if missing:
        names = listing(row.spec for row in rows)
        why = f"What is missing for {names}: {listing(missing)}."
        yield NextStep(code="complete-evidence", reason=why, command=evidence.command(**changes))
    if failed := [row.spec for row in rows if "attacks-failed" in row.doubts or "no-attack-ran" in row.doubts]:
        why = f"Under {listing(failed)} attacks failed or did not run; the table of results says why."
        yield _step(evidence, "failed-attacks", why)
    if evidence.spec.utility is not None and evidence.cost_left_out is None and "cost-not-measured" in codes:
        failed_for = [
            row.spec for row in rows if "cost-not-measured" in reasons[row.spec] and row.spec not in evidence.unpriced
        ]
        if failed_for:
            why = f"The training that measures what {listing(failed_for)} costs failed; "
            yield _step(evidence, "failed-training", f"{why}its file in the run's folder `cells` says why.")
    if late := [row.spec for row in rows if any(attack.status == "not run" for attack in row.attacks)]:
        why = f"Under {listing(late)} there was no time for all attacks. Without --minutes the command runs what is missing."
        yield NextStep(code="more-time", reason=why, command=evidence.spec.command())
    if not counters and not late and all("no-counter" in reasons[row.spec] for row in rows):
        names = listing(row.spec for row in rows)
        yield from _differential_privacy(evidence, f"No attack that is built to break {names} can be run here. ")


def _longer_training(evidence: Evidence, codes: Collection[RejectionCode]) -> dict[str, int]:
    """Seeds or rounds of the trainings that the cost needs."""
    measured, changes = evidence.control.utility if evidence.control else None, dict[str, int]()
    if measured and "uncertain-cost" in codes:
        changes["seeds"] = 2 * measured.seeds
    if measured and "nothing-to-lose" in codes:
        changes["rounds"] = 4 * measured.rounds
    return changes


def _victims(evidence: Evidence, coarse: bool) -> int | None:
    """How many victims suffice; None where the private images do not."""
    spec = evidence.spec
    wanted = max(LEAST_BATCHES, -(-LEAST_IMAGES // spec.images))
    if coarse:
        needed = [n.victims for n in evidence.needed if n.share == MOST_UNSEEN]
        if needed == [None]:
            return None
        wanted = max(wanted, *(n or 0 for n in needed), 0)
    wanted = wanted if wanted > spec.victims else 2 * spec.victims  # the estimate was too low, or victims are untested
    return wanted if wanted * spec.images < evidence.private else None


# -- where all leak, or cost too much ----------------------------------------------------------------------------------


@dataclass
class Family:
    """The audited settings of one defense that differ in its strength alone."""

    leaking: dict[float, str] = field(default_factory=dict)  # by level
    costly: dict[float, str] = field(default_factory=dict)
    hopeless: list[str] = field(default_factory=list)  # which leak and cost too much
    changes: dict[float, GradientChange | None] = field(default_factory=dict)  # of the update, by level

    @property
    def start(self) -> tuple[str, str]:
        """Where a search begins, and why one is needed."""
        weak, strong = max(self.leaking, default=None), min(self.costly, default=None)
        if weak is None:
            assert strong is not None
            return self.costly[strong], f"{self.costly[strong]} costs too much"
        leaks = f"{self.leaking[weak]} leaks"
        return self.leaking[weak], leaks if strong is None else f"{leaks} and {self.costly[strong]} costs too much"

    @property
    def exhausted(self) -> str | None:
        """Why no other strength is worth a search."""
        if self.hopeless:
            return f"{self.hopeless[-1]} leaks and costs too much already, so that a stronger one is no use"
        weak, strong = max(self.leaking, default=None), min(self.costly, default=None)
        last = sorted(self.changes)[-2:]
        same = len(last) == 2 and self.changes[last[0]] == self.changes[last[1]] is not None
        if same and all(level in self.leaking for level in last):
            return f"{self.leaking[last[1]]} leaks, and a stronger one sends the same"
        if weak is None or strong is None or strong - weak > NEAR:
            return None
        return f"none is left to try between {self.leaking[weak]}, which leaks, and {self.costly[strong]}, which costs too much"


def _families(evidence: Evidence) -> list[Family]:
    families: dict[str, Family] = {}
    for row in evidence.audited:
        scale = StrengthScale.of(evidence.methods[row.spec])
        if scale is not None:
            family = families.setdefault(scale.family, Family())
            family.changes[scale.level] = row.gradient
            (family.leaking if row.verdict == LEAKS else family.costly)[scale.level] = row.spec
            if row.verdict == LEAKS and row.loss is not None and row.loss > evidence.spec.max_loss:
                family.hopeless.append(row.spec)
    return list(families.values())


def _settings_to_try(evidence: Evidence) -> Iterator[NextStep]:
    """Other strengths of the audited defenses, and of `dpsgd`, whose noise proves a limit: one search for all of them."""
    families = _families(evidence)
    starts = dict(family.start for family in families if not family.exhausted)
    reasons = [f"{reason}." for reason in starts.values()]
    rescaled = [row.spec for row in evidence.audited if type(evidence.methods[row.spec]) is Clip]
    if rescaled:
        reasons.append(f"{listing(rescaled)} alone only rescales the update, whatever the norm.")
    if not _has_dpsgd(evidence):
        reasons.append("Differential privacy (dpsgd) bounds by a proof what an update tells about one image.")
        starts[DP_START] = ""
    if starts:
        why = f"{' '.join(reasons)} The command finds the cheapest strength that survives, and what it costs."
        yield NextStep(code="tune", reason=why, command=evidence.tune_command([*starts][-MOST_FAMILIES:]))
    if exhausted := [family.exhausted for family in families if family.exhausted]:
        yield _step(evidence, "no-setting-left", f"No setting was found: {'; '.join(exhausted)}.")


def _with(evidence: Evidence, *added: str) -> dict[str, object]:
    """More defenses beside the audited ones, whose stored results are used again, and what all of them cost."""
    return {"defenses": (*evidence.spec.defenses, *added), "utility": evidence.spec.utility or True}


def _other_protection(evidence: Evidence) -> Iterator[NextStep]:
    """What protects in another way than the audited defenses."""
    spec = evidence.spec
    size = LARGER if spec.batch_size < LARGER else 2 * spec.batch_size
    if size <= LARGEST:
        why = "In a larger batch the images of one update hide each other, and attacks get less of each; that is no proof."
        fits = 2 * size * spec.victims <= evidence.private
        yield _step(evidence, "larger-batches", why, **({"batch_size": size} if fits else {}))
    clients = AGGREGATE if spec.aggregate == 1 else 2 * spec.aggregate
    fits = clients <= MOST_AGGREGATE and 2 * clients * spec.batch_size * spec.victims <= evidence.private
    why = "With secure aggregation the server sees only the sum of many updates, in which clients hide each other."
    yield _step(evidence, "secure-aggregation", why, **({"aggregate": clients} if fits else {}))


def _has_dpsgd(evidence: Evidence) -> bool:
    return any(type(part) is DpSgd for method in evidence.methods.values() for part in method.parts)


def _differential_privacy(evidence: Evidence, before: str) -> Iterator[NextStep]:
    if not _has_dpsgd(evidence):
        why = (
            f"{before}Differential privacy (dpsgd) bounds by a proof what an update tells about one image. Its price is "
            "accuracy; the command measures it."
        )
        yield _step(evidence, "differential-privacy", why, **_with(evidence, DP))
