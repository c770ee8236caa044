"""Numbers and findings in plain English, the same on the page, in the terminal and in a notebook.

A missing leak is never called more than that: attacks only ever show that something leaks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.core.text import listing, plural, shorten
from gradveil.report.view import LEAKS, NO_LEAK, NOT_JUDGED, UNREFUTED, DefenseView, Rate, SummaryView, whole

NOTHING = "–"  # shown for what was not measured

_GRANTED = {
    "realistic": [
        "the model and every update that is sent",
        "the defense and its settings",
        "no labels: it infers them",
    ],
    "paper": ["the model and every update that is sent", "the defense and its settings", "the labels"],
    "upper-bound": [
        "the model and every update that is sent",
        "the defense and its settings",
        "the labels",
        "every secret of the defense (masks, mixing, sampled noise)",
    ],
}


def digits(value: float | None, places: int = 2) -> str:
    if value is None:
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if places > 2 and value != 0 and abs(value) < 10**-places:
        return f"{value:.1e}"  # an MSE may be tiny; of an SSIM or a PSNR more places say nothing
    text = f"{value:.{places}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−")


def spread(value: float | None, places: int = 2) -> str:
    """A standard deviation, with as many places as its mean and never an exponent."""
    return NOTHING if value is None or math.isinf(value) else f"{value:.{places}f}"


def percent(share: float | None, places: int = 0) -> str:
    """A share as percent; one that is not quite nothing or everything is not rounded to it."""
    if share is None:
        return NOTHING
    value = 100 * share
    if not places and 99 < value < 100:
        value, places = min(value, 99.9), 1
    if not places and 0 < value < 1:
        places = 1 if value >= 0.1 else 2
    return f"{value:.{places}f}%"


def interval(rate: Rate) -> str:
    """`47–100%`, or nothing when no interval was computed."""
    if rate.low is None or rate.high is None:
        return ""
    return f"{percent(rate.low).rstrip('%')}–{percent(rate.high)}"


def rate_text(rate: Rate | None) -> str:
    """`88% (47–100%)`."""
    if rate is None:
        return NOTHING
    between = interval(rate)
    return f"{percent(rate.rate)} ({between})" if between else percent(rate.rate)


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def found(defense: DefenseView) -> str:
    """What the attacks together got, as a clause: `7 of 8 private images could be picked out …`."""
    rate = defense.identified
    if rate is None:
        return "how many private images could be picked out was not measured"
    if rate.count is not None and rate.of:
        who = f"{rate.count if rate.count else 'none'} of {plural(rate.of, 'private image')}"
    else:
        who = f"{percent(rate.rate)} of the private images"
    figures = [percent(rate.rate)]
    if interval(rate):
        figures.append(f"confidence interval {interval(rate)}")
    if rate.chance is not None:
        figures.append(f"chance {percent(rate.chance)}")
    return f"{who} could be picked out among many others from what was rebuilt ({', '.join(figures)})"


def verdict_sentence(defense: DefenseView) -> str:
    """The verdict in one sentence."""
    clause = found(defense)
    if defense.verdict == LEAKS:
        by = f"; the strongest attack was {defense.best.attack}" if defense.best else ""
        return f"{'Without a defense updates leak' if defense.control else 'Updates leak'}: {clause}{by}."
    if defense.verdict == NO_LEAK:
        return f"No leak was shown by the attacks tried: {clause}{_bound(defense)}."
    if defense.verdict == UNREFUTED:
        return (
            f"Unrefuted: {clause}{_bound(defense)}; no attack here is built to break this defense, "
            "so the evidence is weak."
        )
    return f"Not judged: {clause}."


def _bound(defense: DefenseView) -> str:
    rate = defense.identified
    if rate is None or rate.high is None or rate.high <= 0.01:
        return ""
    return f", and with so few images a leak of up to {percent(rate.high)} of them is not ruled out"


def overall(view: SummaryView) -> str:
    """All the verdicts in one line."""
    judged = [d for d in view.defenses if not d.control]
    if not judged:
        return "No defense was audited." if not view.control else f"Undefended updates: {view.control.verdict}."
    phrases = {
        LEAKS: ("leaks", "leak"),
        NO_LEAK: ("showed no leak", "showed no leak"),
        UNREFUTED: ("is unrefuted", "are unrefuted"),
        NOT_JUDGED: ("could not be judged", "could not be judged"),
    }
    counts = {verdict: sum(d.verdict == verdict for d in judged) for verdict in phrases}
    if len(judged) == 1:
        return f"The audited defense {judged[0].spec} {phrases[judged[0].verdict][0]}."
    parts = [f"{count} {phrases[verdict][count > 1]}" for verdict, count in counts.items() if count]
    if len(parts) == 1:
        return f"All {parts[0].replace(' ', ' audited defenses ', 1)}."
    return f"Of {len(judged)} audited defenses, {listing(parts)}."


def training_state(view: SummaryView) -> str:
    for key, word in (("trained_rounds", "round"), ("trained_epochs", "epoch")):
        count = whole(view.case.get(key))
        if count:
            return f"a model trained for {plural(count, word)}"
    return "an untrained model"


def scope(view: SummaryView, defense: DefenseView | None = None) -> str:
    """Where a verdict holds, as the audit wrote it or else from the case."""
    if defense is not None and defense.scope:
        return defense.scope
    if view.scope:
        return view.scope
    case = view.case
    steps = whole(case.get("local_steps")) or 1
    sent = "one gradient an update" if steps == 1 else f"{steps} local steps an update"
    return (
        f"{case.get('model', 'the model')} on {case.get('data', 'the data')}, {training_state(view)}, "
        f"batches of {plural(whole(case.get('batch_size')) or 1, 'image')}, {sent}, "
        f"{plural(whole(case.get('victims')) or 0, 'victim')}, adversary of level {view.level}"
    )


def granted(view: SummaryView) -> list[str]:
    return view.granted or _GRANTED.get(view.level, [f"what the level {view.level} grants"])


def not_tested(view: SummaryView) -> list[str]:
    """What this audit says nothing about; attacks that were to run but did not are always among it."""
    items = list(view.not_tested)
    if not items:
        items = ["other data, models, batch sizes and training states than those of the scope"]
        if view.level != "upper-bound":
            items.append("an adversary that also knows the defense's secrets (level upper-bound)")
        if not (whole(view.case.get("trained_rounds")) or whole(view.case.get("trained_epochs"))):
            items.append("a trained model")
        items.append("attacks that are not in the suite or not yet published")
    missing: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for defense in view.defenses:
        for row in defense.rows:
            if not row.ok and defense.spec not in missing[row.attack, row.status, row.error or ""]:
                missing[row.attack, row.status, row.error or ""].append(defense.spec)
    for (attack, status, reason), specs in missing.items():
        where = f"against {specs[0]}" if len(specs) == 1 else f"against {len(specs)} defenses"
        items.append(f"{attack} {where}: {status}" + (f" ({shorten(reason.rstrip('.'), 160)})" if reason else ""))
    return items


def caveats(view: SummaryView) -> list[str]:
    """The audit's own warnings, and what makes its evidence weak."""
    items = list(view.warnings)
    if view.control is None:
        items.append(
            "There is no undefended control in this audit, so it is not shown that the attacks work in this setting."
        )
    elif view.control.verdict != LEAKS:
        items.append(
            "Even undefended updates showed no leak here. The attacks did not work in this setting, so the audit "
            "says nothing about the defenses; try a larger budget or more attacks."
        )
    return items


@dataclass(frozen=True)
class Recommendation:
    """The defense to take, if the evidence allows for one, and why."""

    defense: DefenseView | None
    text: str


def recommend(view: SummaryView) -> Recommendation:
    """Among the defenses that do not leak, the one that costs least accuracy."""
    audited = [d for d in view.defenses if not d.control]
    if not audited:
        return Recommendation(None, "No defense was audited, so none can be recommended.")
    if view.control is not None and view.control.verdict != LEAKS:
        return Recommendation(
            None,
            "No recommendation: the attacks showed no leak even without a defense, so they cannot tell defenses apart.",
        )
    held = [d for d in audited if d.verdict in (NO_LEAK, UNREFUTED)]
    if not held:
        if all(d.verdict == LEAKS for d in audited):
            which = "The audited defense leaks" if len(audited) == 1 else f"All {len(audited)} audited defenses leak"
            return Recommendation(None, f"{which}. None can be recommended on this evidence.")
        return Recommendation(None, "No recommendation: every audited defense either leaks or could not be judged.")
    costed = [d for d in held if d.loss is not None]
    if costed:
        best = min(costed, key=lambda d: (d.loss, d.verdict != NO_LEAK, d.overhead or math.inf))
        why = _among(held, "the least accuracy loss")
        unpriced = [d.spec for d in held if d.loss is None]
        rest = f" Its rivals without a measured cost: {listing(unpriced)}." if unpriced else ""
        return Recommendation(best, f"{best.spec} {why}. {cost(view, best)}{rest}{_weak(best)}")
    signed = [d for d in held if d.cosine is not None]
    if signed:
        best = max(signed, key=lambda d: (d.cosine, d.verdict == NO_LEAK))
        why = _among(held, f"the smallest change to the update (gradient cosine {digits(best.cosine)})")
        return Recommendation(best, f"{best.spec} {why}. Its cost in accuracy was not measured.{_weak(best)}")
    names = listing(d.spec for d in held)
    return Recommendation(None, f"No leak was shown under {names}, but what they cost was not measured.")


def _among(held: Sequence[DefenseView], merit: str) -> str:
    if len(held) == 1:
        return "is the only audited defense under which no leak was shown"
    return f"has {merit} of the {len(held)} defenses under which no leak was shown"


def _weak(defense: DefenseView) -> str:
    if defense.verdict != UNREFUTED:
        return ""
    if defense.counter:
        return f" It is unrefuted only: {listing(defense.counter)}, built to break it, took no part in this audit."
    return " It is unrefuted only: no attack that knows it has been built yet."


def cost(view: SummaryView, defense: DefenseView) -> str:
    """What a defense costs, as a sentence."""
    if defense.loss is None:
        return "Its cost in accuracy was not measured."
    clean = view.control.accuracy if view.control else None
    if defense.loss > 0:
        parts = [f"It costs {digits(defense.loss, 1)}% of the accuracy"]
    else:
        parts = ["It costs no accuracy in this measurement"]
    if defense.accuracy is not None:
        against = f" instead of {percent(clean, 1)} undefended" if clean is not None else ""
        parts.append(f" ({percent(defense.accuracy, 1)}{against})")
    if defense.overhead is not None:
        parts.append(f" and a round takes {digits(defense.overhead, 1)} times as long")
    return "".join(parts) + "."


def assessment(view: SummaryView) -> str:
    """A paragraph to paste into a data-protection impact assessment."""
    choice = recommend(view)
    sentences = [
        "Model updates sent during joint training can reveal the images they were computed from. "
        f"This risk was measured with Gradveil {view.version} (attack suite {view.suite}, "
        f"{plural(len(view.attacks()), 'attack')}) in this setting: {scope(view)}.",
        f"The adversary is whoever receives the updates, and was granted: {'; '.join(granted(view))}.",
    ]
    if view.control is not None:
        sentences.append(f"Without a defense, {found(view.control)}.")
    if choice.defense is not None:
        sentences.append(f"With the defense {choice.defense.spec}, {found(choice.defense)}{_bound(choice.defense)}.")
        sentences.append(f"Verdict: {choice.defense.verdict}. {cost(view, choice.defense)}{_weak(choice.defense)}")
    else:
        sentences.append(choice.text)
    sentences.append(
        "Residual risk: the finding is bound to this scope, and attacks can show a leak but never that there is none. "
        f"Not tested: {'; '.join(not_tested(view))}."
    )
    sentences.append(
        "The measurement should be repeated when the model, the data, the training or the defense changes."
    )
    return " ".join(sentences)
