"""What a privacy officer asks, answered from the summary alone: the first screen and the first printed page of a report.

Every answer is bounded in length, so that all of them fit on one sheet; what is left out is counted, and stands below.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradveil.certification.certificate import percent as rounded_percent
from gradveil.certification.certificate import rounded_up
from gradveil.core.text import duration, listing, plural, shorten
from gradveil.report import words
from gradveil.report.about import About
from gradveil.report.words import digits, percent
from gradveil.storage.environment import Environment
from gradveil.summary import CANNOT_TELL, LEAKS, NO_LEAK, UNREFUTED, DefenseRow, Summary, Verdict, VictimWorst

MOST_NAMED = 3  # defenses in one sentence
MOST_UNTESTED = 7  # items of what was not tested
MOST_PLACED = 3  # defenses of which the worst-placed image is told
MOST_PICTURED = 4  # defenses of which the worst case is shown as pictures
LONGEST_NAME, LONGEST_TEXT = 44, 360  # characters
# The type of the printed sheet, in points: as large as fits. Its height grows with the square of the type's size.
LARGEST_TYPE, SMALLEST_TYPE, SHEET = 8.6, 5.6, 215_000  # points, points, characters times points squared
HEAD = 4  # characters of an answer for which there would be room in place of one in the head, whose type is large
PICTURED = 16_000  # of SHEET, where there are pictures

# What the levels of knowledge mean for the adversary.
LEVELS = {
    "realistic": "It must infer the labels, and none of the defense's secrets is granted.",
    "paper": "It is told the labels, as papers grant it; none of the defense's secrets is granted.",
    "upper-bound": "It is told the labels and every secret of the defense.",
}


@dataclass(frozen=True)
class AnsweredQuestion:
    """One question of the first page with its answer. `key` is its place in the page."""

    key: str
    question: str
    texts: tuple[str, ...]
    command: str | None = None


def first_answers(summary: Summary) -> list[AnsweredQuestion]:
    """The first screen."""
    return [
        AnsweredQuestion("pictures", "What leaks as pictures?", pictures(summary)),
        AnsweredQuestion("recognised", "Who can be recognised?", recognised(summary)),
        AnsweredQuestion("promised", "What is promised?", promised(summary)),
        next_answer(summary),
        AnsweredQuestion("cost", "What does it cost?", cost(summary)),
    ]


def file_answers(summary: Summary) -> list[AnsweredQuestion]:
    """What else a file for a privacy officer needs."""
    return [
        AnsweredQuestion("tested", "What was tested?", (tested(summary),)),
        AnsweredQuestion("adversary", "Against whom?", (adversary(summary),)),
        AnsweredQuestion("sure", "How sure is it?", certainty(summary)),
        AnsweredQuestion("worst", "Who is worst placed?", worst_placed(summary)),
        AnsweredQuestion("residual", "Which risk remains?", residual(summary)),
        AnsweredQuestion("untested", "What was not tested?", (untested(summary),)),
        AnsweredQuestion("again", "When to audit again?", (again(summary),)),
    ]


# -- the first screen --------------------------------------------------------------------------------------------------


def lead(summary: Summary) -> str:
    """All verdicts in one line, and the other risk where they do not tell of a leak and it was shown all the same."""
    seen = [d for d in summary.defenses if d.line_up and d.line_up.shown and d.verdict != LEAKS and not d.control]
    also = f" Whoever has an image can tell that it took part under {_named(seen)}." if seen else ""
    return f"{words.overall(summary)}{also}"


def warning(summary: Summary) -> str | None:
    """What qualifies the answers: the first warning of the audit, and how many more there are."""
    texts = [notice.text for notice in words.caveats(summary)]
    if not texts:
        return None
    more = f" {plural(len(texts) - 1, 'more warning')} below." if len(texts) > 1 else ""
    return f"{shorten(texts[0], LONGEST_TEXT)}{more}"


def pictures(summary: Summary) -> tuple[str, ...]:
    """What the attacks rebuilt, verdict by verdict."""
    control, texts = summary.control, []
    if control is not None:
        if control.verdict == LEAKS:
            texts.append(f"Without a defense updates leak: {_picked(control)}.")
        else:
            texts.append("This audit cannot tell whether images leak without a defense.")
    phrases: dict[Verdict, Callable[[str], str]] = {
        LEAKS: lambda names: f"Private images leak under {names}.",
        NO_LEAK: lambda names: f"No leak was shown under {names}.",
        UNREFUTED: lambda names: f"Unrefuted: {names}. No leak was shown, but attacks that are built to break it are missing.",
        CANNOT_TELL: lambda names: f"This audit cannot tell whether images leak under {names}.",
    }
    for verdict, sentence in phrases.items():
        rows = [d for d in summary.defenses if d.verdict == verdict and not d.control]
        if rows:
            texts.append(sentence(_named(rows, _picked if verdict == LEAKS else None)))
    return tuple(texts) or ("No defense was audited, and there is no undefended control.",)


def recognised(summary: Summary) -> tuple[str, ...]:
    """What the line-ups showed."""
    rows = [d for d in summary.defenses if d.line_up]
    if not rows:
        return ("Not tested: this audit had no line-up, in which someone who has an image asks whether it took part.",)
    shown = [d for d in rows if d.line_up and d.line_up.shown]
    others = [d for d in rows if d not in shown]
    texts = []
    if shown:
        texts.append(f"Whoever has an image can tell that it took part: {_named(shown, _first)}.")
    if others:
        start = "Not shown" if shown else "It was not shown that whoever has an image can tell that it took part"
        texts.append(f"{start}: {_named(others, _first)}.")
    if missing := [d for d in summary.defenses if not d.line_up]:
        texts.append(f"No line-up: {_named(missing)}.")
    return tuple(texts)


def promised(summary: Summary) -> tuple[str, ...]:
    """The certificates, with unit and adjacency."""
    proved = [d for d in summary.defenses if d.line_up and d.line_up.certificate]
    if not proved:
        if not any(d.line_up for d in summary.defenses):
            return ("Nothing was worked out: limits belong to the line-up, which this audit did not have.",)
        return ("Nothing: no audited defense proves a limit. That attacks fail is no promise.",)
    texts = []
    for defense in proved[:MOST_NAMED]:
        risk, limit = defense.line_up, defense.line_up.certificate if defense.line_up else None
        assert risk is not None and limit is not None
        name = shorten(defense.spec, LONGEST_NAME)
        if risk.contradicts:
            upper = rounded_percent(limit.upper)
            texts.append(f"{name} is said to prove {upper} at most, and more was shown: an error, so nothing is promised.")
        else:
            seen = plural(limit.releases, "release")
            epsilon = f"epsilon {rounded_up(limit.epsilon, 3)} at delta {limit.delta:g}"
            unit = f"Unit: one {limit.unit}, {limit.adjacency}, {seen}; {epsilon}."
            texts.append(f"{name}: {limit.sentences()[0]} {unit} Each further release weakens it.")
    more = len(proved) - MOST_NAMED
    rest = [d for d in summary.defenses if d not in proved and not d.control]
    if more > 0:
        texts.append(f"{plural(more, 'more certificate')} below.")
    if rest:
        texts.append(f"Nothing is proved by {_named(rest)}.")
    return tuple(texts)


def next_answer(summary: Summary) -> AnsweredQuestion:
    """What to do first, with its command."""
    steps, best = summary.recommendation.next_steps, summary.recommended
    question = "What to do next?"
    if best is not None:
        more = f" {plural(len(steps), 'more step')} below." if steps else ""
        text = f"Use {best.spec}: the command writes it to a file that clients act by.{more}"
        return AnsweredQuestion("next", question, (text,), "gradveil export RUN")
    if not steps:
        return AnsweredQuestion("next", question, ("Nothing more can be proposed.",))
    more = f" {plural(len(steps) - 1, 'more step')} below." if len(steps) > 1 else ""
    return AnsweredQuestion("next", question, (f"{shorten(steps[0].reason, LONGEST_TEXT)}{more}",), steps[0].command)


def cost(summary: Summary) -> tuple[str, ...]:
    """Of the recommended defense, or of those whose cost was measured."""
    best = summary.recommended
    if best is not None:
        return (f"{best.spec}: {words.cost(summary, best)}",)
    measured = [d for d in summary.defenses if d.loss is not None and not d.control]
    if measured:
        texts = [f"{shorten(d.spec, LONGEST_NAME)}: {_loss(d)}." for d in measured[:MOST_NAMED]]
        more = len(measured) - MOST_NAMED
        return (*texts, f"{plural(more, 'more defense')} below.") if more > 0 else tuple(texts)
    if summary.cost_left_out:
        return (f"Not measured: that takes {duration(summary.cost_left_out)} of one core, and there was no time.",)
    return ("Not measured. With --utility an audit trains under each defense and compares accuracy and time.",)


# -- the file ----------------------------------------------------------------------------------------------------------


def tested(summary: Summary) -> str:
    judged = [d for d in summary.defenses if not d.control]
    also = f"; with {_named(judged)}" if judged else ""
    control = "without a defense" if summary.control else "no control"
    attacks = f"{plural(len(summary.attacks), 'attack')} ({_suite(summary)})"
    return f"{shorten(summary.scope, LONGEST_TEXT)}. {attacks}, {control}{also}."


def adversary(summary: Summary) -> str:
    has, level = shorten("; ".join(summary.granted), LONGEST_TEXT), LEVELS.get(summary.case.knowledge, "")
    return f"Whoever receives the updates, such as the server. It has: {has}. {level}".rstrip()


def certainty(summary: Summary) -> tuple[str, ...]:
    """The positive control, the smallest leak that would have been seen, and the level of the test."""
    control = summary.control
    if control is None:
        return ("It is not shown that the attacks work here: there is no undefended control.",)
    tests = [d.test for d in summary.defenses if d.test and d.verdict != LEAKS] or [d.test for d in [control] if d.test]
    if control.verdict != LEAKS or not tests:  # what attacks that do not work would have seen is no evidence
        return ("The positive control shows nothing: attacks that find no leak without a defense say nothing by finding none.",)
    shares = [test.detectable for test in tests]
    smallest = None if None in shares else max(share for share in shares if share is not None)
    level = max(test.level for test in tests)
    return (
        f"Positive control: the attacks work here. Without a defense {_identified(control)}.",
        words.visible(smallest),
        f"Rates have exact 95% intervals. Where nothing leaks, the verdict is wrong in {percent(level)} of audits.",
    )


def worst_placed(summary: Summary) -> tuple[str, ...]:
    """The private image of which most was got, beside the average of all; each image stands for a person."""
    rows = [(d, image) for d in _important_first(summary) if (image := worst_image(d))]
    texts = []
    for defense, image in rows[:MOST_PLACED]:
        assert defense.worst is not None
        average = f"on average {percent(defense.worst.identified.rate)} picked out, likeness {words.mean(defense.worst.ssim)}"
        one = f"{'picked out' if image.identified else 'not picked out'}, likeness {digits(image.ssim)}"
        name = "Without a defense" if defense.control else shorten(defense.spec, LONGEST_NAME)
        texts.append(f"{name}: {average}; worst placed (victim {image.victim}): {one}.")
    if not texts:
        return ("Not measured: no attack got as far as a picture.",)
    more = f" {plural(len(rows) - MOST_PLACED, 'more defense')} in the table." if len(rows) > MOST_PLACED else ""
    return (*texts, f"Likeness is SSIM: 1 is the same image, about 0 has nothing in common.{more}")


def worst_image(defense: DefenseRow) -> VictimWorst | None:
    images = defense.worst.by_victim if defense.worst else ()
    least = float("-inf")
    return max(
        images,
        key=lambda i: (bool(i.identified), least if i.ssim is None else i.ssim, least if i.psnr is None else i.psnr),
        default=None,
    )


def residual(summary: Summary) -> tuple[str, ...]:
    """What stays, whatever was recommended."""
    best = summary.recommended
    if best is not None and best.worst is not None:
        text = f"Under {best.spec} a leak of up to {percent(best.worst.identified.high)} of the images is not ruled out."
    elif best is not None:
        text = f"Under {best.spec} no rate was measured."
    elif summary.recommendation.candidates:
        text = "Open until the missing evidence is there: no defense is recommended yet."
    else:
        text = "Open: no audited defense can be recommended, so what is told above stands."
    return text, "The finding is bound to what was tested; attacks can show a leak but never that there is none."


def untested(summary: Summary) -> str:
    items = [shorten(item, 130) for item in words.not_tested(summary)] or ["nothing is named"]
    more = len(items) - MOST_UNTESTED
    rest = f"; {more} more below" if more > 0 else ""
    text = "; ".join(items[:MOST_UNTESTED])
    return f"{text[:1].upper()}{text[1:]}{rest}."


def again(summary: Summary) -> str:
    those = "those that were chosen" if summary.suite == words.CHOSEN else f"those of {_suite(summary)}"
    return (
        "When the model, the data, the training, the defense or the number of updates per client changes, and when there are "
        f"stronger attacks than {those} (gradveil {shorten(summary.gradveil, 20)})."
    )


def type_size(about: About, *groups: Sequence[AnsweredQuestion], more: int = 0, pictured: bool = False) -> float:
    """Points of the type in which the answers fit on one sheet, below a head with these names.

    `more`: characters that are no answer; `pictured`: there are pictures among the answers.
    """
    length = more + sum(len(text) for group in groups for answer in group for text in (*answer.texts, answer.command or ""))
    length += HEAD * sum(len(name or "") for name in (*dict(about).values(), about.system))
    return round(max(SMALLEST_TYPE, min(LARGEST_TYPE, math.sqrt((SHEET - PICTURED * pictured) / max(1, length)))), 1)


def title(about: About) -> str:
    of = f" of {about.system}" if about.system else ""
    return f"Do the model updates{of} give away private images?"


def date_text(environment: Environment | None) -> str | None:
    """`18 November 2026`; None where the run did not store it."""
    finished = environment.finished if environment else None
    return f"{finished.day} {finished:%B %Y}" if finished else None


# -- parts of sentences ------------------------------------------------------------------------------------------------


def _suite(summary: Summary) -> str:
    """`suite standard-v2`, or the names of the attacks that were chosen."""
    if summary.suite != words.CHOSEN:
        return f"suite {shorten(summary.suite, LONGEST_NAME)}"
    names = [shorten(name, LONGEST_NAME) for name in summary.attacks[:MOST_NAMED]]
    more = len(summary.attacks) - MOST_NAMED
    return f"{words.CHOSEN_TEXT}: {listing([*names, f'{more} more'] if more > 0 else names)}"


def _important_first(summary: Summary) -> list[DefenseRow]:
    """The recommended defense and the control before all others, then those that leak."""
    best = summary.recommended
    return sorted(summary.defenses, key=lambda d: (d is not best, not d.control, d.verdict != LEAKS))


def _named(rows: Sequence[DefenseRow], told: Callable[[DefenseRow], str] | None = None) -> str:
    """`a (8 of 8 images), b (1 of 8 images) and 3 more`."""
    names = ["without a defense" if d.control else shorten(d.spec, LONGEST_NAME) for d in rows[:MOST_NAMED]]
    parts = [f"{name} ({told(d)})" if told else name for name, d in zip(names, rows, strict=False)]
    return listing([*parts, f"{len(rows) - MOST_NAMED} more"] if len(rows) > MOST_NAMED else parts)


def _picked(defense: DefenseRow) -> str:
    """What shows a leak, in few words: `8 of 8 images picked out`."""
    if defense.test is None or not defense.test.leaks:
        return "the undefended updates up to their size"
    if defense.worst is None or not defense.worst.identified.rate:
        return "more like the private images than like strangers"
    return _identified(defense)


def _identified(defense: DefenseRow) -> str:
    """`8 of 8 images picked out`."""
    worst = defense.worst
    if worst is None:
        return "nothing was measured"
    count = round(worst.identified.rate * worst.scored)
    exact = abs(worst.identified.rate * worst.scored - count) < 0.01
    share = (
        f"{count or 'none'} of {plural(worst.scored, 'image')}" if exact else f"{percent(worst.identified.rate)} of the images"
    )
    return f"{share} picked out from what was rebuilt"


def _loss(defense: DefenseRow) -> str:
    """`12.1% of the accuracy (95% interval 10.0% to 14.2%), rounds take 1.3 times as long`."""
    assert defense.loss is not None
    lost = f"{digits(defense.loss, 1)}% of the accuracy" if defense.loss > 0 else "no accuracy in this measurement"
    between = f" (95% interval {words.loss_interval(defense)})" if words.loss_interval(defense) else ""
    longer = f", a round takes {digits(defense.overhead, 1)} times as long" if defense.overhead is not None else ""
    return f"{lost}{between}{longer}"


def _first(defense: DefenseRow) -> str:
    """`8 of 8 images came first of 200`."""
    risk = defense.line_up
    assert risk is not None
    hits = round(risk.identified.rate * len(risk.ranks))
    return f"{hits or 'none'} of {len(risk.ranks)} came first of {risk.m:,}, guessing {rounded_percent(risk.identified.chance)}"
