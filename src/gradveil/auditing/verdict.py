"""From cells to `summary.json`: the rows, what the worst attack got of every victim, and the verdict.

A verdict rests on identification, which has a known chance, and never says more than the attacks have shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from gradveil import __version__
from gradveil import attacks as attack_methods
from gradveil.auditing.case import Case
from gradveil.auditing.plan import Cell, Plan, suite_name
from gradveil.auditing.spec import CONTROL
from gradveil.defenses.base import Defense
from gradveil.metrics import RECOGNISABLE, identification_rate

LEAKS, NO_LEAK, UNREFUTED = "leaks", "no leak shown", "unrefuted"
METRICS = ("psnr", "ssim", "mse", "lpips")
Json = dict[str, Any]
Outcomes = Mapping[str, Json]


def judge(case: Case, plan: Plan, outcomes: Outcomes) -> Json:
    """The whole summary. `outcomes` are the stored cells of the plan, by key."""
    defenses = [_defense(case, plan, outcomes, text) for text in case.defenses]
    none = next(d for d in defenses if d["spec"] == CONTROL)
    if none["verdict"] != LEAKS:
        # Attacks that fail where nothing is hidden have shown nothing about any defense.
        for defense in defenses:
            defense["verdict"] = UNREFUTED if defense["verdict"] == NO_LEAK else defense["verdict"]
    _add_costs(defenses, none)
    base = outcomes[plan.of("baseline")[0].key]
    return {
        "schema": 1,
        "gradveil": __version__,
        "suite": suite_name(case),
        "command": case.spec.command(),
        "scope": scope(case),
        "case": _case(case),
        "granted": _granted(outcomes.values()),
        "not_tested": _not_tested(case),
        "warnings": _warnings(case, none),
        "defenses": defenses,
        "baseline": {k: v for k, v in base["rows"][0].items() if k != "against"} if base["status"] == "ok" else None,
    }


def _case(case: Case) -> Json:
    data = case.data
    return {
        **case.terms,
        "input_shape": list(data.input_shape),
        "num_classes": data.num_classes,
        "class_names": list(data.class_names),
    }


def scope(case: Case, malicious: Sequence[str] = ()) -> str:
    """Where a verdict holds, in a sentence's worth of words."""
    spec, names = case.spec, case.names
    state = "an untrained model"
    for count, word in ((spec.trained_rounds, "round"), (spec.trained_epochs, "epoch")):
        state = f"a model trained for {_many(count, word)}" if count else state
    sent = "one gradient an update" if spec.local_steps == 1 else f"{spec.local_steps} local steps an update"
    seen = f", {spec.updates} updates of each batch" if spec.updates > 1 else ""
    server = f"; a malicious server in {', '.join(malicious)}" if malicious else ""
    return (
        f"{names['model']} on {names['data']}, {state}, batches of {_many(spec.batch_size, 'image')}, {sent}{seen}, "
        f"{_many(spec.victims, 'victim')}, adversary of level {spec.knowledge}, budget {spec.budget}{server}"
    )


def _many(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


# -- one defense -----------------------------------------------------------------------------------------------------


def _defense(case: Case, plan: Plan, outcomes: Outcomes, text: str) -> Json:
    defense = case.defenses[text]
    cells = plan.of("attack", text)
    rows = [row for cell in cells for row in _rows(case, defense, cell, outcomes[cell.key])]
    ran = [outcomes[c.key] for c in cells if outcomes[c.key]["status"] == "ok"]
    observed = outcomes[next(c for c in plan.of("observe", text) if not c.attack).key]
    malicious = [c.attack for c in plan.of("observe", text) if c.attack]
    worst = _worst(ran)
    return {
        "spec": text,
        "stage": defense.stages,
        "counter": list(defense.counters),
        "scope": scope(case, malicious),
        "verdict": _verdict(defense, worst, ran),
        "warnings": _defense_warnings(case, defense, observed, [outcomes[c.key] for c in cells]),
        "utility": _utility(plan, outcomes, text),
        "gradient": observed.get("gradient"),
        "attacks": rows,
        "worst": worst,
    }


def _rows(case: Case, defense: Defense, cell: Cell, content: Json) -> Iterable[Json]:
    """One row for every truth the attack is scored against; a single empty one where it has none."""
    for row in content.get("rows") or [{"against": "original"}]:
        yield {
            "spec": cell.attack,
            "status": content["status"],
            "adaptive": case.attack(cell.attack).adaptive or _is_counter(defense, cell.attack),
            "knowledge": case.spec.knowledge,
            "updates": case.spec.updates,
            "scored": 0,
            "failed": 0,
            **dict.fromkeys((*METRICS, "asr", "identified", "label_accuracy")),
            **row,
            "seconds": content.get("seconds"),
            "iterations": content.get("iterations"),
            "cell": cell.key,
            "error": content["error"],
        }


def _is_counter(defense: Defense, attack: str) -> bool:
    return attack.partition(":")[0] in defense.counters


def _worst(ran: Sequence[Json]) -> Json | None:
    """For every image the attack that got most of it. With several attacks each image had as many chances."""
    if not ran:
        return None
    by_place: dict[tuple[int, int], list[Json]] = {}
    for content in ran:
        for image in content["victims"]:
            by_place.setdefault((image["victim"], image["image"]), []).append({**image, "attack": content["attack"]})
    best = [max(found, key=_got) for _, found in sorted(by_place.items())]
    chance = max(content["rows"][0]["identified"]["chance"] for content in ran)
    identified = torch.tensor([bool(image["identified"]) for image in best])
    shown = ("victim", "image", "attack", "psnr", "ssim", "identified")
    return {
        **{metric: _spread([image[metric] for image in best]) for metric in METRICS},
        "asr": sum(_recognisable(image) for image in best) / len(best),
        "identified": identification_rate(identified, chance, attacks=len(ran)),
        "scored": len(best),
        "attacks": len(ran),
        "by_victim": [{name: image[name] for name in shown} for image in best],
        "recognised": sum(bool(image["identified"]) and _recognisable(image) for image in best),
    }


def _got(image: Json) -> tuple[bool, float, float]:
    return bool(image["identified"]), image["ssim"], image["psnr"]


def _recognisable(image: Json) -> bool:
    return bool(image["ssim"] >= RECOGNISABLE and not image["failed"])


def _spread(values: Sequence[float | None]) -> Json | None:
    if any(v is None for v in values):
        return None
    numbers = torch.tensor([v for v in values if v is not None], dtype=torch.float64)
    std, mean = torch.std_mean(numbers, correction=0)
    return {"mean": mean.item(), "std": std.item(), "min": numbers.min().item(), "max": numbers.max().item()}


def _verdict(defense: Defense, worst: Json | None, ran: Sequence[Json]) -> str | None:
    """None where no attack ran at all: then nothing is known."""
    if worst is None:
        return None
    rate = worst["identified"]
    if rate["low"] > rate["chance"] or worst["recognised"]:
        return LEAKS
    if defense.spec == CONTROL or any(_is_counter(defense, content["attack"]) for content in ran):
        return NO_LEAK
    return UNREFUTED


# -- costs -----------------------------------------------------------------------------------------------------------


def _utility(plan: Plan, outcomes: Outcomes, text: str) -> Json | None:
    found = [outcomes[c.key] for c in plan.of("utility", text)]
    if not found or found[0]["status"] != "ok":
        return None
    history = found[0]["history"]
    last = {name: (history[name] or [None])[-1] for name in ("acc_test", "acc_train", "acc_sensitive")}
    seconds = history["seconds_per_round"]
    return {**last, "seconds_per_round": sum(seconds) / len(seconds) if seconds else None}


def _add_costs(defenses: Iterable[Json], none: Json) -> None:
    """PDM: percent of the undefended accuracy that is lost. Overhead: time of a round against the undefended."""
    clean = none["utility"] or {}
    for defense in defenses:
        utility = defense["utility"]
        if utility:
            pdm = _ratio(utility["acc_test"], clean.get("acc_test"))
            utility["pdm"] = None if pdm is None else 100 * (1 - pdm)
            utility["overhead"] = _ratio(utility["seconds_per_round"], clean.get("seconds_per_round"))


def _ratio(value: float | None, of: float | None) -> float | None:
    return value / of if value is not None and of else None


# -- what to know about it -------------------------------------------------------------------------------------------


def _granted(outcomes: Iterable[Json]) -> list[str]:
    first = ["the model and every update that is sent"]
    return list(dict.fromkeys(first + [item for o in outcomes for item in o.get("granted") or []]))


def _not_tested(case: Case) -> list[str]:
    spec = case.spec
    items = ["other data, models, batch sizes and local training than those of the scope"]
    if not (spec.trained_rounds or spec.trained_epochs):
        items.append("a trained model")
    if spec.knowledge != "upper-bound":
        items.append("an adversary that also knows the defense's secrets (level upper-bound)")
    if spec.updates == 1:
        items.append("an adversary that sees several updates of the same images")
    items.append("attacks that are not in this audit, or not yet published")
    return items


def _warnings(case: Case, none: Json) -> list[str]:
    items = []
    ok = [row for row in none["attacks"] if row["status"] == "ok" and row["against"] == "original"]
    weak = [row["spec"] for row in ok if row["identified"]["low"] <= row["identified"]["chance"]]
    if ok and none["verdict"] != LEAKS:
        items.append(
            "Without a defense no attack succeeded, so this audit is too weak to say anything about a defense."
        )
    elif weak:
        items.append(
            f"Without a defense {', '.join(weak)} did not succeed either, so its failing under a defense says nothing."
        )
    if case.spec.knowledge != "realistic":
        items.append(
            f"The adversary is granted more than a real server has (level {case.spec.knowledge}), "
            "so leaks may be larger here than in practice."
        )
    return items


def _defense_warnings(case: Case, defense: Defense, observed: Json, attacked: Sequence[Json]) -> list[str]:
    items = []
    if observed["status"] != "ok":
        items.append(f"its updates could not be computed: {observed['error']}")
    if defense.random and case.spec.updates == 1:
        items.append(
            "random, but judged on a single draw: repeated updates of the same images may leak more (--updates)"
        )
    if observed.get("zero_updates"):
        items.append(f"{observed['zero_updates']} updates are all zero: nothing is learnt from them, nor leaked")
    if observed.get("broken_updates"):
        items.append(f"{observed['broken_updates']} updates hold values that are not finite")
    failed = [o["attack"] for o in attacked if o["status"] == "failed"]
    if failed and observed["status"] == "ok":
        items.append(f"failed: {', '.join(failed)}; that is no sign of protection")
    partly = [o["attack"] for o in attacked if o["status"] == "ok" and o["error"]]
    if partly:
        items.append(f"some images of {', '.join(partly)} did not stay finite and count as not rebuilt")
    unknown = [c for c in defense.counters if c not in attack_methods.registry]
    if unknown:
        items.append(f"{', '.join(unknown)}, said to break it, is no attack of this version")
    return items
