"""From cells to `summary.json`: the rows, what the worst attack got of every victim, and the verdict.

A verdict rests on identification, which has a known chance, and never says more than the attacks have shown.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from gradveil import __version__
from gradveil import attacks as attack_methods
from gradveil.auditing.case import Case
from gradveil.auditing.plan import Cell, Plan, suite_name
from gradveil.core.results import ImagePlace, ImageScores, ScoreRow, Statistic
from gradveil.core.text import plural
from gradveil.defenses.base import Defense
from gradveil.metrics import identification_rate
from gradveil.storage.run_folder import StoredCell
from gradveil.summary import (
    CONTROL,
    LEAKS,
    NO_LEAK,
    UNREFUTED,
    AttackRow,
    CaseFacts,
    DefenseRow,
    Summary,
    UtilityRow,
    Verdict,
    VictimWorst,
    Worst,
)

Cells = Mapping[str, StoredCell]  # by key


def judge(case: Case, plan: Plan, cells: Cells) -> Summary:
    """The whole summary. `cells` are the stored cells of the plan."""
    clean = _history(plan, cells, CONTROL)
    defenses = [_defense(case, plan, cells, text, clean) for text in case.defenses]
    control = next(d for d in defenses if d.control)
    if control.verdict != LEAKS:
        # Attacks that fail where nothing is hidden have shown nothing about any defense.
        weaker = {"verdict": UNREFUTED}
        defenses = [d.model_copy(update=weaker) if d.verdict == NO_LEAK else d for d in defenses]
    baseline = cells[plan.of("baseline")[0].key]
    data = case.data
    facts = {"input_shape": data.input_shape, "num_classes": data.num_classes, "class_names": tuple(data.class_names)}
    granted = dict.fromkeys(item for cell in cells.values() for item in cell.granted)
    return Summary(
        gradveil=__version__,
        suite=suite_name(case),
        command=case.spec.command(),
        scope=scope(case),
        case=CaseFacts.model_validate({**case.terms, **facts}),
        granted=("the model and every update that is sent", *granted),
        not_tested=_not_tested(case),
        warnings=_warnings(case, control),
        defenses=tuple(defenses),
        baseline=baseline.rows[0] if baseline.status == "ok" else None,
    )


def scope(case: Case, malicious: Sequence[str] = ()) -> str:
    """Where a verdict holds, in a sentence's worth of words."""
    spec, names = case.spec, case.names
    state = "an untrained model"
    for count, word in ((spec.trained_rounds, "round"), (spec.trained_epochs, "epoch")):
        state = f"a model trained for {plural(count, word)}" if count else state
    sent = "one gradient per update" if spec.local_steps == 1 else f"{spec.local_steps} local steps per update"
    seen = f", {spec.updates} updates of each batch" if spec.updates > 1 else ""
    server = f"; a malicious server in {', '.join(malicious)}" if malicious else ""
    return (
        f"{names['model']} on {names['data']}, {state}, batches of {plural(spec.batch_size, 'image')}, {sent}{seen}, "
        f"{plural(spec.victims, 'victim')}, adversary of level {spec.knowledge}, budget {spec.budget}{server}"
    )


# -- one defense -----------------------------------------------------------------------------------------------------


def _defense(case: Case, plan: Plan, cells: Cells, text: str, clean: StoredCell | None) -> DefenseRow:
    defense = case.defenses[text]
    attacked = [cells[cell.key] for cell in plan.of("attack", text)]
    ran = [cell for cell in attacked if cell.status == "ok"]
    observed = cells[next(c for c in plan.of("observe", text) if not c.attack).key]
    worst = _worst(ran)
    return DefenseRow(
        spec=text,
        stage=tuple(defense.stages),
        counter=tuple(defense.counters),
        scope=scope(case, [c.attack for c in plan.of("observe", text) if c.attack]),
        verdict=_verdict(defense, worst, ran),
        warnings=_defense_warnings(case, defense, observed, attacked),
        utility=_utility(_history(plan, cells, text), clean),
        gradient=observed.gradient,
        attacks=tuple(row for cell in plan.of("attack", text) for row in _rows(case, defense, cell, cells[cell.key])),
        worst=worst,
    )


def _rows(case: Case, defense: Defense, cell: Cell, stored: StoredCell) -> Iterable[AttackRow]:
    """One row for every truth the attack is scored against; a single empty one where it has none."""
    for row in stored.rows or (ScoreRow(),):
        yield AttackRow(
            **dict(row),
            spec=cell.attack,
            status=stored.status,
            adaptive=case.attack(cell.attack).adaptive or _is_counter(defense, cell.attack),
            knowledge=case.spec.knowledge,
            updates=case.spec.updates,
            seconds=stored.seconds,
            iterations=stored.iterations,
            error=stored.error,
            cell=cell.key,
        )


def _is_counter(defense: Defense, attack: str) -> bool:
    return attack.partition(":")[0] in defense.counters


def _worst(ran: Sequence[StoredCell]) -> Worst | None:
    """For every image the attack that got most of it. With several attacks each image had as many chances."""
    if not ran:
        return None
    by_place: dict[ImagePlace, list[tuple[ImageScores, str]]] = {}
    for cell in ran:
        for image in cell.victims:
            by_place.setdefault(image.place, []).append((image, cell.attack))
    best = [max(tried, key=lambda pair: pair[0].strength) for _, tried in sorted(by_place.items())]
    images = [image for image, _ in best]
    chance = max(rate.chance for cell in ran if (rate := cell.rows[0].identified))
    identified = torch.tensor([bool(image.identified) for image in images])
    return Worst(
        psnr=Statistic.of([image.psnr for image in images]),
        ssim=Statistic.of([image.ssim for image in images]),
        mse=Statistic.of([image.mse for image in images]),
        lpips=Statistic.of([image.lpips for image in images]),
        others={n: s for n in images[0].others if (s := Statistic.of([image.others.get(n) for image in images]))},
        asr=sum(image.recognisable for image in images) / len(images),
        identified=identification_rate(identified, chance, attacks=len(ran)),
        scored=len(images),
        failed=sum(image.failed for image in images),
        attacks=len(ran),
        recognised=sum(bool(image.identified) and image.recognisable for image in images),
        by_victim=tuple(
            VictimWorst(**image.model_dump(include=set(VictimWorst.model_fields)), attack=attack) for image, attack in best
        ),
    )


def _verdict(defense: Defense, worst: Worst | None, ran: Sequence[StoredCell]) -> Verdict | None:
    """None where no attack ran at all: then nothing is known."""
    if worst is None:
        return None
    if worst.identified.low > worst.identified.chance or worst.recognised:
        return LEAKS
    if defense.spec == CONTROL or any(_is_counter(defense, cell.attack) for cell in ran):
        return NO_LEAK
    return UNREFUTED


# -- costs -----------------------------------------------------------------------------------------------------------


def _history(plan: Plan, cells: Cells, text: str) -> StoredCell | None:
    """The federated training under a defense, if it was asked for and worked."""
    trained = [cells[c.key] for c in plan.of("utility", text)]
    return trained[0] if trained and trained[0].status == "ok" else None


def _utility(trained: StoredCell | None, clean: StoredCell | None) -> UtilityRow | None:
    """Accuracies after the last round, and what they and a round's time are against the undefended training."""
    if trained is None:
        return None
    kept = _ratio(_last(trained, "acc_test"), _last(clean, "acc_test"))
    return UtilityRow(
        acc_test=_last(trained, "acc_test"),
        acc_train=_last(trained, "acc_train"),
        acc_sensitive=_last(trained, "acc_sensitive"),
        seconds_per_round=_round_seconds(trained),
        pdm=None if kept is None else 100 * (1 - kept),
        overhead=_ratio(_round_seconds(trained), _round_seconds(clean)),
    )


def _last(trained: StoredCell | None, curve: str) -> float | None:
    return (trained.history[curve] or (None,))[-1] if trained else None


def _round_seconds(trained: StoredCell | None) -> float | None:
    seconds = [s for s in trained.history["seconds_per_round"] if s is not None] if trained else []
    return sum(seconds) / len(seconds) if seconds else None


def _ratio(value: float | None, of: float | None) -> float | None:
    return value / of if value is not None and of else None


# -- what to know about it -------------------------------------------------------------------------------------------


def _not_tested(case: Case) -> tuple[str, ...]:
    spec = case.spec
    items = ["other data, models, batch sizes and local training than those of the scope"]
    if not (spec.trained_rounds or spec.trained_epochs):
        items.append("a trained model")
    if spec.knowledge != "upper-bound":
        items.append("an adversary that also knows the defense's secrets (level upper-bound)")
    if spec.updates == 1:
        items.append("an adversary that sees several updates of the same images")
    items.append("attacks that are not in this audit, or not yet published")
    return tuple(items)


def _warnings(case: Case, control: DefenseRow) -> tuple[str, ...]:
    items = []
    ok = [row for row in control.attacks if row.ok and row.against == "original"]
    weak = [row.spec for row in ok if row.identified and row.identified.low <= row.identified.chance]
    if ok and control.verdict != LEAKS:
        items.append("Without a defense no attack succeeded, so this audit is too weak to say anything about a defense.")
    elif weak:
        names = ", ".join(weak)
        items.append(f"Without a defense {names} did not succeed either, so its failing under a defense says nothing.")
    if case.spec.knowledge != "realistic":
        items.append(
            f"The adversary is granted more than a real server has (level {case.spec.knowledge}), "
            "so leaks may be larger here than in practice."
        )
    return tuple(items)


def _defense_warnings(case: Case, defense: Defense, observed: StoredCell, attacked: Sequence[StoredCell]) -> tuple[str, ...]:
    items = []
    if observed.status != "ok":
        items.append(f"its updates could not be computed: {observed.error}")
    if defense.random and case.spec.updates == 1:
        items.append("random, but judged on a single draw: repeated updates of the same images may leak more (--updates)")
    if observed.zero_updates:
        items.append(f"{observed.zero_updates} updates are all zero: nothing is learnt from them, nor leaked")
    if observed.broken_updates:
        items.append(f"{observed.broken_updates} updates hold values that are not finite")
    failed = [cell.attack for cell in attacked if cell.status == "failed"]
    if failed and observed.status == "ok":
        items.append(f"failed: {', '.join(failed)}; that is no sign of protection")
    if partly := [cell.attack for cell in attacked if cell.status == "ok" and cell.error]:
        items.append(f"some images of {', '.join(partly)} did not stay finite and count as not rebuilt")
    if unknown := [c for c in defense.counters if c not in attack_methods.registry]:
        items.append(f"{', '.join(unknown)}, said to break it, is no attack of this version")
    return tuple(items)
