"""Numbers and findings in plain English, the same on the page, in the terminal and in a notebook.

A missing leak is never called more than that: attacks only ever show that something leaks.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

from gradveil.auditing.advice import LEAST_BATCHES, LEAST_IMAGES, MOST_UNSEEN
from gradveil.certification.certificate import percent as rounded_percent
from gradveil.certification.line_up import LineUpRisk
from gradveil.core.results import Rate, ScoreStatistics, Statistic
from gradveil.core.text import duration, listing, plural, shorten
from gradveil.summary import (
    CANNOT_TELL,
    LEAKS,
    NO_LEAK,
    UNREFUTED,
    DefenseRow,
    Doubt,
    LeakTest,
    Notice,
    NoticeCode,
    Rejection,
    RejectionCode,
    Summary,
    Verdict,
    VictimsNeeded,
)

NOTHING = "–"  # shown for what was not measured
CHOSEN, CHOSEN_TEXT = "custom", "chosen for this audit"  # in place of a suite, where the attacks were named one by one
ALL = 100.0  # percent of the accuracy: no more can be lost, although few seeds give wide intervals
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


def explained(subject: Verdict | NoticeCode | Literal["recommendation", "line-up"]) -> str:
    """Where a verdict, a notice or the recommendation is explained."""
    return f"{GUIDE}#{subject.replace(' ', '-')}"


def verdict_sentence(defense: DefenseRow) -> str:
    """The verdict in one sentence."""
    clause = recovered(defense)
    if defense.verdict == LEAKS:
        return f"{'Without a defense updates leak' if defense.control else 'Updates leak'}: {_leak(defense, clause)}."
    if defense.verdict == CANNOT_TELL:
        return f"This audit cannot tell: {clause}; {listing(_doubt(defense, code) for code in defense.doubts)}."
    if defense.verdict == NO_LEAK:
        return f"No leak was shown by the attacks tried: {clause}{_bound(defense)}."
    weak = "attacks that are built to break the defense or a part of it are missing, so the evidence is weak"
    return f"Unrefuted: {clause}{_bound(defense)}; {weak}."


def _leak(defense: DefenseRow, clause: str) -> str:
    """What shows that a defense leaks: the test, or that its updates are the undefended ones."""
    by = f"; the strongest attack was {defense.best.spec}" if defense.best else ""
    if defense.test is None or not defense.test.leaks:
        return f"they are the undefended ones up to their size, and those leak; here {clause}"
    if defense.worst is not None and defense.worst.identified.rate > 0:
        return f"{clause}{by}"
    alike = f"what is sent or rebuilt is more like the private images than like strangers (p = {digits(defense.test.p, 3)})"
    return f"{alike}, although {clause}{by}"


def _doubt(defense: DefenseRow, code: Doubt) -> str:
    """Why an audit cannot tell."""
    if code == "control-does-not-leak" and defense.control:
        return "that is not more than images of strangers would give"
    undefended = percent(defense.test.control_rate) if defense.test else NOTHING
    return {
        "no-attack-ran": "no attack ran",
        "few-strangers": "too few strangers are left to compare with",
        "control-does-not-leak": "the attacks show no leak without a defense either",
        "control-leaks-little": f"without a defense the attacks get too little ({undefended} of the images)",
        "few-victims": "with so few victims a leak could have stayed unseen",
        "attacks-failed": "an attack that works without a defense, or the direct look, failed or did not run here",
    }[code]


def line_up_sentence(defense: DefenseRow) -> str:
    """The second risk: someone who has an image asks whether it was in the batch. Empty where there was no line-up."""
    risk = defense.line_up
    if risk is None:
        return ""
    rate, victims = risk.identified, len(risk.ranks)
    first = f"{round(rate.rate * victims) or 'none'} of {plural(victims, 'image')} came first of {risk.m:,} by the update alone"
    numbers = f"({percent(rate.rate)}, confidence interval {interval(rate)}, guessing {rounded_percent(rate.chance)})"
    if risk.shown:
        text = f"Whoever has an image can tell that it took part: {first} {numbers}"
    else:
        text = f"It was not shown that whoever has an image can tell that it took part: {first} {numbers}"
    limit = risk.certificate
    if limit is None:
        return f"{text}.{'' if defense.control else ' The defense proves no limit.'}"
    if risk.contradicts:
        return f"{text}. The defense is said to prove {rounded_percent(limit.upper)} at most: one of the two is in error."
    return f"{text}. The defense proves {rounded_percent(limit.upper)} at most, for {plural(limit.releases, 'release')}."


def risk_bar(risk: LineUpRisk) -> str:
    """What the bar of a line-up shows: the range that the attack leaves open, and the limit that is proved."""
    rate, limit = risk.identified, "no limit is proved"
    if risk.certificate is not None:
        limit = f"proved limit (line) {rounded_percent(risk.certificate.upper)}"
    return f"From 0 to 100%: identified (dot) {percent(rate.rate)}, interval (bar) {interval(rate)}, {limit}"


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
        if counts[CANNOT_TELL]:
            return f"None of the {len(judged)} audited defenses can be judged by this audit."
        every = "Both" if len(judged) == 2 else f"All {len(judged)}"
        return f"{every} audited defenses {parts[0].partition(' ')[2]}."
    return f"Of {len(judged)} audited defenses, {listing(parts)}."


def not_tested(summary: Summary) -> list[str]:
    """What this audit says nothing about; attacks that were to run but did not, and counters left out, are among it."""
    missing: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for defense in summary.defenses:
        for name in defense.left_out:
            missing[name, "not part of this audit", "built to break it"].append(defense.spec)
        for row in defense.ranked:
            if not row.ok:
                reason = (row.error or "").removeprefix(f"attack '{row.spec.partition(':')[0]}' does not apply: ")
                missing[row.spec, row.status, reason].append(defense.spec)
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


def recommendation(summary: Summary) -> str:
    """Which defense to take, or that there is none, in a few sentences."""
    best, advice = summary.recommended, summary.recommendation
    if best is not None and best.test is not None:
        unseen = percent(best.test.detectable)
        rivals = sum("costs-more" in rejection.reasons for rejection in advice.rejected)
        among = f" It loses least accuracy of the {rivals + 1} that meet all conditions." if rivals else ""
        return (
            f"{best.spec}: no leak was shown under it, not even by attacks that are built to break it; a leak of {unseen} of "
            f"the images would have been seen.{among} {cost(summary, best)}"
        )
    if not advice.rejected:
        return "No defense was audited, so none can be recommended."
    if advice.candidates:
        return f"No defense is recommended yet. No leak was shown under {listing(advice.candidates)}, but evidence is missing."
    return "No audited defense can be recommended."


def rejection(summary: Summary, rejected: Rejection) -> str:
    """Why one defense is not recommended: `prune:ratio=0.9 – it leaks.`"""
    row = next(defense for defense in summary.defenses if defense.spec == rejected.spec)
    return f"{rejected.spec} – {'; '.join(_against(summary, row, code) for code in rejected.reasons)}."


def _against(summary: Summary, row: DefenseRow, code: RejectionCode) -> str:
    test, loss, limit = row.test, digits(row.loss, 1), digits(summary.recommendation.max_loss, 1)
    most_lost = digits(None if row.most_lost is None else min(row.most_lost, ALL), 1)
    images = row.worst.scored - row.test.untested if row.worst and row.test else 0
    unseen = "any share" if test is None or test.detectable is None else f"up to {percent(test.detectable)}"
    return {
        "leaks": "it leaks",
        "cannot-tell": "this audit cannot tell whether it leaks",
        "weak-control": "without a defense the attacks get too little",
        "no-counter": _no_counter(row),
        "few-victims": (
            f"{plural(images, 'tested image')} in {summary.case.victims} batches are too few "
            f"(at least {LEAST_IMAGES} in {LEAST_BATCHES})"
        ),
        "coarse-test": f"a leak of {unseen} of the images could have stayed unseen (at most {percent(MOST_UNSEEN)} may)",
        "cost-not-measured": "its cost in accuracy was not measured",
        "too-costly": f"it loses {loss}% of the accuracy (at most {limit}% may be lost)",
        "uncertain-cost": (
            f"it loses {loss}% of the accuracy, but a loss of {most_lost}% is not excluded (at most {limit}% may be lost)"
        ),
        "near-chance": f"with it the model learns next to nothing (accuracy {percent(row.accuracy, 1)})",
        "nothing-to-lose": "without a defense the model learns next to nothing here, so that its cost cannot be told",
        "costs-more": f"it loses more accuracy ({loss}%)",
        "failed-again": "it, or a stronger setting of it, did not hold on fresh victims",
        "not-confirmed": "it was not audited again on fresh victims",
    }[code]


def _no_counter(defense: DefenseRow) -> str:
    if not defense.counter:
        return "this project has no attack that is built to break it"
    if defense.left_out:
        return f"built to break it, but no part of this audit: {listing(defense.left_out)}"
    if idle := [row.spec for row in defense.ranked if row.adaptive and not row.ok]:
        return f"built to break it, but not run here: {listing(idle)}"
    return "a part of it was not attacked by anything that this project accepts as its counter"


def cost(summary: Summary, defense: DefenseRow) -> str:
    """What a defense costs, as a sentence."""
    if defense.loss is None:
        hours = summary.cost_left_out
        return f"Its cost in accuracy was not measured{f': that takes {duration(hours)} of one core' if hours else ''}."
    clean = summary.control.accuracy if summary.control else None
    cost = f"{digits(defense.loss, 1)}% of the accuracy"
    text = f"It costs {cost if defense.loss > 0 else 'no accuracy in this measurement'}"
    if defense.accuracy is not None:
        against = f" instead of {percent(clean, 1)} undefended" if clean is not None else ""
        spread = f"; 95% interval of the loss: {loss_interval(defense)}" if loss_interval(defense) else ""
        text += f" ({percent(defense.accuracy, 1)}{against}{spread})"
    if defense.overhead is not None:
        text += f" and a round takes {digits(defense.overhead, 1)} times as long"
    if defense.utility is not None and not defense.utility.audited_model:
        text += f". That is the cost of another model, {defense.utility.model}"
    return f"{text}."


def loss_interval(defense: DefenseRow) -> str:
    """`1.0% to 4.2%`; empty where only one seed was trained."""
    measured = defense.utility
    if measured is None or measured.low is None or measured.high is None:
        return ""
    return f"{digits(measured.low, 1)}% to {digits(min(measured.high, ALL), 1)}%"


def learning_rate(defense: DefenseRow) -> str:
    """The one of the clients, and the factor that was chosen for the server."""
    measured = defense.utility
    if measured is None:
        return NOTHING
    ends = {min(measured.tried): " (the smallest tried)", max(measured.tried): " (the largest tried)"}
    end = ends.get(measured.server_lr, "") if len(measured.tried) > 1 else ""
    return f"{measured.lr:g} × {measured.server_lr:g}{end}"


def training_scope(summary: Summary) -> str | None:
    """How the cost was measured, in sentences; None where it was not."""
    measured = next((row.utility for row in summary.defenses if row.utility), None)
    if measured is None:
        return None
    which = "the audited model" if measured.audited_model else "another model than the audited one"
    seeds = "one training" if measured.seeds == 1 else f"{measured.seeds} trainings, with the same seeds"
    how = "" if measured.audited_updates else " A client does not train as audited, so a defense may act otherwise on it."
    absent = "All clients are defended, so there is no training without them to compare with."
    if measured.acc_absent is not None:
        absent = f"Without the clients that would be defended, it reaches {percent(measured.acc_absent, 1)} undefended."
    rates = "All have the same learning rate"
    if len(measured.tried) > 1:
        rates = (
            "For each defense a factor on the server's learning rate was chosen on images of the clients that were held back: "
        )
        rates += "; ".join(f"{d.spec} {learning_rate(d)}" for d in summary.defenses if d.utility)
    return (
        f"The cost was measured by training {measured.model}, {which}: {measured.scope}; per defense {seeds}.{how} "
        f"Accuracies are means of the last rounds. {rates}. {absent}"
    )


def assessment(summary: Summary) -> str:
    """A paragraph to paste into a data-protection impact assessment."""
    sentences = [
        "Model updates sent during joint training can reveal the images they were computed from. "
        f"This risk was measured with Gradveil {summary.gradveil} and {plural(len(summary.attacks), 'attack')} "
        f"({CHOSEN_TEXT if summary.suite == CHOSEN else f'suite {summary.suite}'}) in this setting: {summary.scope}.",
        f"The adversary is whoever receives the updates, and was granted: {'; '.join(summary.granted)}.",
    ]
    if summary.control is not None:
        sentences.append(f"Without a defense, {recovered(summary.control)}.")
    if best := summary.recommended:
        sentences.append(f"With the defense {best.spec}, {recovered(best)}{_bound(best)}.")
        sentences.append(f"Verdict: {best.verdict}. {cost(summary, best)}")
    else:
        sentences.append(" ".join([recommendation(summary), *(rejection(summary, r) for r in summary.recommendation.rejected)]))
    sentences += [
        "Residual risk: the finding is bound to this scope, and attacks can show a leak but never that there is none.",
        f"Not tested: {'; '.join(not_tested(summary))}.",
        "The measurement should be repeated when the model, the data, the training or the defense changes.",
    ]
    return " ".join(sentences)
