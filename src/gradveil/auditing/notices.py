"""What a reader must know beside the verdicts. docs/verdicts.md explains each notice under its code."""

from collections.abc import Sequence

from gradveil.attacks.suite import Counters
from gradveil.auditing.case import Case
from gradveil.core.text import listing, plural, shorten
from gradveil.defenses.base import Defense
from gradveil.metrics.leak_test import LEAST_EXCESS, LEVEL
from gradveil.storage.run_folder import StoredCell
from gradveil.summary import LEAKS, DefenseRow, Notice, NoticeCode

LEAST_LEARNT = 0.1  # of the way from a guess to no error; a model below it has learnt too little to measure a cost
SAME = 0.999  # agreement from which on updates are the undefended ones up to their size


def is_near_chance(accuracy: float, classes: int) -> bool:
    """Whether a model has learnt next to nothing."""
    return accuracy < 1 / classes + LEAST_LEARNT * (1 - 1 / classes)


def only_rescaled(observed: StoredCell) -> bool:
    """Whether every tensor of every update is that of the undefended one, up to one common factor per update."""
    return observed.agreement is not None and observed.agreement >= SAME


def not_tested(case: Case) -> tuple[str, ...]:
    """What the audit says nothing about."""
    spec = case.spec
    items = ["other data, models, batch sizes and local training than those of the scope"]
    if not (spec.trained_rounds or spec.trained_epochs):
        items.append("a trained model")
    if spec.knowledge != "upper-bound":
        items.append("an adversary that also knows the defense's secrets (level upper-bound)")
    if spec.updates == 1:
        items.append("an adversary that sees several updates of the same images")
    if not spec.suite:
        items.append("whether images can be seen in the updates without an attack (part of the suite)")
    if spec.aggregate > 1:
        items.append(
            "a server that sees single updates, or that controls other clients of a sum (secure aggregation is assumed)"
        )
    if not spec.candidates:
        items.append("whether someone who has an image can tell that it took part (the line-up)")
    items.append("attacks that are not in this audit, or not yet published")
    return tuple(items)


def audit_notices(case: Case, defenses: Sequence[DefenseRow], weak: Sequence[str]) -> tuple[Notice, ...]:
    """What concerns all defenses. `weak` are the attacks that show no leak on the control."""
    texts: dict[NoticeCode, str] = {}
    control, slots = next(d for d in defenses if d.control), case.slots
    test, leaking = control.test, [d.spec for d in defenses if d.verdict == LEAKS]
    if test is None:
        texts["no-attack-ran"] = "No attack ran without a defense, so it is not shown that the attacks work in this setting."
    elif "few-strangers" in control.doubts:
        texts["few-strangers"] = (
            f"With {plural(len(slots.stranger_label), 'stranger')} the smallest p-value is {slots.smallest_p:.2g}, so that no "
            "leak can be shown. More private images, or fewer victims of each class, are needed."
        )
    elif control.verdict != LEAKS:
        though = f", though they show one under {listing(leaking)}" if leaking else ""
        texts["control-does-not-leak"] = (
            f"The attacks show no leak without a defense{though}. Where they show none under a defense, that says nothing; a "
            "larger budget, more attacks or more victims may help."
        )
    elif test.control_rate - test.control_null < LEAST_EXCESS:
        texts["control-leaks-little"] = (
            f"Without a defense the attacks identify {test.control_rate:.0%} of the images, which is less than half above "
            "chance. Where they show no leak under a defense, that says little."
        )
    if weak and control.verdict == LEAKS:
        verb = "does" if len(weak) == 1 else "do"
        texts["weak-attacks"] = (
            f"{', '.join(weak)} {verb} not show the leak of undefended updates; their failing under a defense says nothing."
        )
    if test is not None and test.untested:
        images = plural(test.untested, "private image")
        texts["untested-victims"] = f"{images} took no part in the test: no other private image of the class is left."
    if not case.data.has_classes:
        texts["no-classes"] = "The data has no classes, so strangers and distractors come from all images."
    if case.spec.knowledge != "realistic":
        texts["granted-more"] = (
            f"The adversary is granted more than a real server has (level {case.spec.knowledge}), "
            "so leaks may be larger here than in practice."
        )
    return _notices(texts)


def defense_notices(
    case: Case,
    defense: Defense,
    trained: Sequence[StoredCell],
    observed: StoredCell,
    attacked: Sequence[StoredCell],
    row: DefenseRow,
) -> tuple[Notice, ...]:
    """What concerns one defense. `trained` is the training of the attacked model, if any. `row` has no notices yet."""
    texts: dict[NoticeCode, str] = {}
    test, look = row.test, row.look
    if observed.status != "ok":
        texts["no-updates"] = f"its updates could not be computed: {observed.error}"
    elif test is None:
        texts["no-attack-ran"] = "no attack ran on it"
    elif "few-victims" in row.doubts:
        texts["few-victims"] = (
            f"with {plural(case.spec.victims, 'victim')} a leak half as frequent as without a defense is seen with a "
            f"probability of {test.power:.0%} only"
        )
    if defense.random and case.spec.updates == 1:
        texts["single-draw"] = (
            "random, but judged on a single draw: repeated updates of the same images may leak more (--updates)"
        )
    if row.verdict == LEAKS and not (test is not None and test.leaks):
        texts["only-rescaled"] = "its updates are the undefended ones up to their size, so the verdict without a defense holds"
    if row.verdict == LEAKS and look is not None and look.p <= LEVEL and look.seen:
        images = plural(look.seen, "private image")
        texts["seen-directly"] = (
            f"{images} can be seen in what is sent without an attack, most often in '{look.tensor}' ({look.reading})"
        )
    if observed.zero_updates:
        texts["zero-updates"] = f"{observed.zero_updates} updates are all zero: nothing is learnt from them, nor leaked"
    accuracies = [accuracy for cell in trained for accuracy in cell.history.get("acc_test", ())[-1:] if accuracy is not None]
    if accuracies and is_near_chance(accuracies[0], case.data.num_classes):
        texts["learnt-nothing"] = (
            f"the attacked model, trained under it, is right for {accuracies[0]:.0%} of the test images, hardly better than "
            "a guess: what it sends says little of a model that learns"
        )
    if observed.broken_updates:
        texts["broken-updates"] = f"{observed.broken_updates} updates hold values that are not finite"
    failed = [cell.attack or "the direct look" for cell in attacked if cell.status == "failed"]
    if failed and observed.status == "ok":
        texts["attacks-failed"] = f"failed: {', '.join(failed)}; that is no sign of protection"
    if partly := [cell.attack for cell in attacked if cell.status == "ok" and cell.error]:
        texts["images-failed"] = f"some images of {', '.join(partly)} did not stay finite and count as not rebuilt"
    counters = Counters.of(defense)
    if counters.claimed:
        texts["claimed-counter"] = f"claimed to be built against it, which does not suffice: {', '.join(counters.claimed)}"
    if counters.unknown:
        texts["unknown-counter"] = (
            f"said to break it, but no attack that can be read: {', '.join(shorten(text, 80) for text in counters.unknown)}"
        )
    return _notices(texts)


def _notices(texts: dict[NoticeCode, str]) -> tuple[Notice, ...]:
    return tuple(Notice(code=code, text=text) for code, text in texts.items())
