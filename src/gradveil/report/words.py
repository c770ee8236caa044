"""Numbers and findings in plain English, the same on the page, in the terminal and in a notebook.

A missing leak is never called more than that: attacks only ever show that something leaks.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.core.results import Rate, ScoreStatistics, Statistic
from gradveil.core.text import listing, plural, shorten
from gradveil.metrics.leak_test import LEAST_EXCESS, POWER
from gradveil.summary import (
    CANNOT_TELL,
    LEAKS,
    NO_LEAK,
    UNREFUTED,
    DefenseRow,
    LeakTest,
    Notice,
    NoticeCode,
    Summary,
    Verdict,
    VictimsNeeded,
)

NOTHING = "–"  # shown for what was not measured
GUIDE = "https://github.com/gradveil/gradveil/blob/main/docs/verdicts.md"


def digits(value: float | None, places: int = 2) -> str:
    if value is None:
        return NOTHING
    if places > 2 and value != 0 and abs(value) < 10**-places:
        return f"{value:.1e}"  # an MSE may be tiny; of an SSIM or a PSNR more places say nothing
    text = f"{value:.{places}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−")


def mean(statistic: Statistic | None, places: int = 2) -> str:
    return digits(statistic.mean if statistic else None, places)


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
    """`47–100%`."""
    return f"{percent(rate.low).rstrip('%')}–{percent(rate.high)}"


def rate_text(rate: Rate | None) -> str:
    """`88% (47–100%)`."""
    return f"{percent(rate.rate)} ({interval(rate)})" if rate else NOTHING


def figures(scores: ScoreStatistics | None) -> list[str]:
    """PSNR, SSIM, ASR and the rate identified, for a row of a table."""
    scores = scores or ScoreStatistics()
    return [mean(scores.psnr, 1), mean(scores.ssim), percent(scores.asr), rate_text(scores.identified)]


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def recovered(defense: DefenseRow) -> str:
    """What the attacks together got, as a clause: `7 of 8 private images could be picked out …`."""
    worst = defense.worst
    if worst is None:
        return "how many private images could be picked out was not measured"
    rate, count = worst.identified, round(worst.identified.rate * worst.scored)
    if abs(rate.rate * worst.scored - count) < 0.01:
        who = f"{count or 'none'} of {plural(worst.scored, 'private image')}"
    else:  # the rate is not one of these images: better no count than a wrong one
        who = f"{percent(rate.rate)} of the private images"
    return (
        f"{who} could be picked out among many others from what was rebuilt "
        f"({percent(rate.rate)}, confidence interval {interval(rate)}, chance {percent(rate.chance)})"
    )


def explained(subject: Verdict | NoticeCode) -> str:
    """Where a verdict or a notice is explained."""
    return f"{GUIDE}#{subject.replace(' ', '-')}"


def verdict_sentence(defense: DefenseRow) -> str:
    """The verdict in one sentence."""
    clause = recovered(defense)
    if defense.verdict == LEAKS:
        by = f"; the strongest attack was {defense.best.spec}" if defense.best else ""
        return f"{'Without a defense updates leak' if defense.control else 'Updates leak'}: {clause}{by}."
    if defense.verdict == CANNOT_TELL:
        return f"This audit cannot tell: {clause}; {_doubt(defense)}."
    if defense.verdict == NO_LEAK:
        return f"No leak was shown by the attacks tried: {clause}{_bound(defense)}."
    weak = "for the defense or a part of it no attack ran that is built to break it, so the evidence is weak"
    return f"Unrefuted: {clause}{_bound(defense)}; {weak}."


def _doubt(defense: DefenseRow) -> str:
    """Why an audit cannot tell."""
    test = defense.test
    if test is None:
        return "no attack ran"
    if test.smallest_p > test.level:
        return "too few strangers are left to compare with"
    if defense.control:
        return "that is not more than images of strangers would give"
    if test.control_rate - test.control_null < LEAST_EXCESS:
        return f"without a defense the attacks get too little ({percent(test.control_rate)} of the images)"
    if test.power < POWER:
        return "with so few victims a leak could have stayed unseen"
    if failed := [row.spec for row in defense.ranked if row.status == "failed"]:
        return f"{listing(failed)} failed here"
    return "the attacks show no leak without a defense either"


def evidence_line(test: LeakTest) -> str:
    """The test behind a verdict, in one line."""
    untested = f"; {plural(test.untested, 'image')} untested" if test.untested else ""
    smallest = "none" if test.detectable is None else f"{percent(test.detectable)} of the images"
    return (
        f"p = {digits(test.p, 3)} against {plural(test.strangers, 'stranger')}{untested}; "
        f"statistic {digits(test.statistic, 1)}, {digits(test.null_mean, 1)} expected without a leak; "
        f"undefended {percent(test.control_rate)} identified; smallest visible leak: {smallest}"
    )


def visible(share: float | None) -> str:
    """The smallest leak that is seen."""
    if share is None:
        return "Not even a leak of all images would be seen with a probability of 80%."
    return f"A leak of {percent(share)} of the images or more is seen with a probability of at least 80%."


def needed_sentence(needed: Sequence[VictimsNeeded]) -> str:
    """How many victims an audit of this kind needs."""
    counts = listing(f"{n.victims or 'more than the data has'} for {percent(n.share)}" for n in needed)
    return f"Victims needed to see a leak of a share of the images with a probability of 80%: {counts}."


def _bound(defense: DefenseRow) -> str:
    """What may have stayed unseen."""
    if defense.worst is None or defense.worst.identified.high <= 0.01:
        return ""
    high = percent(defense.worst.identified.high)
    return f", and with so few images a leak of up to {high} of them is not ruled out"


def overall(summary: Summary) -> str:
    """All the verdicts in one line."""
    judged = [d for d in summary.defenses if not d.control]
    if not judged:
        return f"Undefended updates: {summary.control.verdict}." if summary.control else "No defense was audited."
    phrases: dict[Verdict, tuple[str, str]] = {
        LEAKS: ("leaks", "leak"),
        NO_LEAK: ("showed no leak", "showed no leak"),
        UNREFUTED: ("is unrefuted", "are unrefuted"),
        CANNOT_TELL: ("cannot be judged by this audit", "cannot be judged by this audit"),
    }
    if len(judged) == 1:
        return f"The audited defense {judged[0].spec} {phrases[judged[0].verdict][0]}."
    counts = Counter(d.verdict for d in judged)
    parts = [f"{counts[verdict]} {forms[counts[verdict] > 1]}" for verdict, forms in phrases.items() if counts[verdict]]
    if len(parts) == 1:
        return f"All {parts[0].replace(' ', ' audited defenses ', 1)}."
    return f"Of {len(judged)} audited defenses, {listing(parts)}."


def not_tested(summary: Summary) -> list[str]:
    """What this audit says nothing about; attacks that were to run but did not are always among it."""
    missing: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for defense in summary.defenses:
        for row in defense.ranked:
            if not row.ok:
                missing[row.spec, row.status, row.error or ""].append(defense.spec)
    items = list(summary.not_tested)
    for (attack, status, reason), specs in missing.items():
        where = f"against {specs[0]}" if len(specs) == 1 else f"against {len(specs)} defenses"
        items.append(f"{attack} {where}: {status}" + (f" ({shorten(reason.rstrip('.'), 160)})" if reason else ""))
    return items


def caveats(summary: Summary) -> list[Notice]:
    """The audit's own warnings, and that there is no control where there is none."""
    if summary.control is not None:
        return list(summary.warnings)
    text = "There is no undefended control here, so it is not shown that the attacks work in this setting."
    return [*summary.warnings, Notice(code="no-control", text=text)]


@dataclass(frozen=True)
class Recommendation:
    """The defense to take, if the evidence allows for one, and why."""

    defense: DefenseRow | None
    text: str


def recommend(summary: Summary) -> Recommendation:
    """Among the defenses that do not leak, the one that costs least accuracy."""
    audited = [d for d in summary.defenses if not d.control]
    if not audited:
        return Recommendation(None, "No defense was audited, so none can be recommended.")
    held = [d for d in audited if d.verdict in (NO_LEAK, UNREFUTED)]
    if not held:
        if all(d.verdict == LEAKS for d in audited):
            which = "The audited defense leaks" if len(audited) == 1 else f"All {len(audited)} audited defenses leak"
            return Recommendation(None, f"{which}. None can be recommended on this evidence.")
        which = "leaks, or this audit cannot tell" if any(d.verdict == LEAKS for d in audited) else "is beyond what it can tell"
        return Recommendation(None, f"No recommendation: of each audited defense this audit says that it {which}.")
    if costed := [d for d in held if d.loss is not None]:
        best = min(costed, key=lambda d: (d.loss, d.verdict != NO_LEAK, d.overhead or math.inf))
        why = _among(held, "the least accuracy loss")
        unpriced = [d.spec for d in held if d.loss is None]
        rest = f" Its rivals without a measured cost: {listing(unpriced)}." if unpriced else ""
        return Recommendation(best, f"{best.spec} {why}. {cost(summary, best)}{rest}{_weak(best)}")
    if compared := [d for d in held if d.cosine is not None]:
        best = max(compared, key=lambda d: (d.cosine, d.verdict == NO_LEAK))
        why = _among(held, f"the smallest change to the update (gradient cosine {digits(best.cosine)})")
        return Recommendation(best, f"{best.spec} {why}. Its cost in accuracy was not measured.{_weak(best)}")
    names = listing(d.spec for d in held)
    return Recommendation(None, f"No leak was shown under {names}, but what they cost was not measured.")


def _among(held: Sequence[DefenseRow], merit: str) -> str:
    if len(held) == 1:
        return "is the only audited defense under which no leak was shown"
    return f"has {merit} of the {len(held)} defenses under which no leak was shown"


def _weak(defense: DefenseRow) -> str:
    if defense.verdict != UNREFUTED:
        return ""
    if not defense.counter:
        return " It is unrefuted only: this project has no attack that is built to break it."
    if any(row.adaptive and row.ok for row in defense.attacks):
        return " It is unrefuted only: a part of it was not attacked by anything that this project accepts as its counter."
    return f" It is unrefuted only: {listing(defense.counter)}, built to break it, took no part in this audit."


def cost(summary: Summary, defense: DefenseRow) -> str:
    """What a defense costs, as a sentence."""
    if defense.loss is None:
        return "Its cost in accuracy was not measured."
    clean = summary.control.accuracy if summary.control else None
    cost = f"{digits(defense.loss, 1)}% of the accuracy"
    text = f"It costs {cost if defense.loss > 0 else 'no accuracy in this measurement'}"
    if defense.accuracy is not None:
        against = f" instead of {percent(clean, 1)} undefended" if clean is not None else ""
        text += f" ({percent(defense.accuracy, 1)}{against})"
    if defense.overhead is not None:
        text += f" and a round takes {digits(defense.overhead, 1)} times as long"
    return f"{text}."


def assessment(summary: Summary) -> str:
    """A paragraph to paste into a data-protection impact assessment."""
    choice = recommend(summary)
    sentences = [
        "Model updates sent during joint training can reveal the images they were computed from. "
        f"This risk was measured with Gradveil {summary.gradveil} (attack suite {summary.suite}, "
        f"{plural(len(summary.attacks), 'attack')}) in this setting: {summary.scope}.",
        f"The adversary is whoever receives the updates, and was granted: {'; '.join(summary.granted)}.",
    ]
    if summary.control is not None:
        sentences.append(f"Without a defense, {recovered(summary.control)}.")
    if best := choice.defense:
        sentences.append(f"With the defense {best.spec}, {recovered(best)}{_bound(best)}.")
        sentences.append(f"Verdict: {best.verdict}. {cost(summary, best)}{_weak(best)}")
    else:
        sentences.append(choice.text)
    sentences += [
        "Residual risk: the finding is bound to this scope, and attacks can show a leak but never that there is none.",
        f"Not tested: {'; '.join(not_tested(summary))}.",
        "The measurement should be repeated when the model, the data, the training or the defense changes.",
    ]
    return " ".join(sentences)
