"""Whether an audit that was run again agrees with its card."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from scipy.special import stdtrit

from gradveil.certification.line_up import LineUpRisk
from gradveil.core.results import Rate, Statistic
from gradveil.report import words
from gradveil.report.cards import Card
from gradveil.report.intervals import CLEAR

EXACT = 60.0  # dB: from here on an image is rebuilt exactly, and PSNR tells rounding errors apart
LEAST = 0.1  # dB that two means may differ by in any case: what tables show


@dataclass(frozen=True)
class Agreement:
    """One value of a card, and the same of the audit that was run again."""

    value: str
    card: str
    again: str
    agrees: bool | None  # None: shown, but not compared


def agreements(card: Card, again: Card) -> list[Agreement]:
    """Value by value. With other numbers of victims, verdicts are not compared: fewer victims show less."""
    return list(_agreements(card, again))


def _agreements(card: Card, again: Card) -> Iterator[Agreement]:
    ours, theirs = card.measured, again.measured
    for name in ("data_sha256", "model_sha256"):
        digest, other = str(getattr(card.evidence, name)), str(getattr(again.evidence, name))
        yield Agreement(f"{name.partition('_')[0]}'s content", digest[:12], other[:12], digest == other)
    whole = card.evidence.victims == again.evidence.victims
    yield Agreement("verdict", ours.verdict, theirs.verdict, ours.verdict == theirs.verdict if whole else None)
    yield _rates("identified", ours.identified, theirs.identified)
    victims = card.evidence.victims, again.evidence.victims
    near = _near(ours.psnr, theirs.psnr, victims)
    yield Agreement("PSNR, dB", _text(ours.psnr, victims[0]), _text(theirs.psnr, victims[1]), near)
    yield _rates("line-up, picked", _picked(ours.line_up), _picked(theirs.line_up))
    limits = [risk.certificate.upper if risk and risk.certificate else None for risk in (ours.line_up, theirs.line_up)]
    if limits != [None, None]:
        before, after = limits
        same = before is not None and after is not None and math.isclose(before, after, rel_tol=1e-6)
        yield Agreement("line-up, limit", words.percent(before, 1), words.percent(after, 1), same)
    yield Agreement("update's cosine", words.digits(ours.cost.cosine), words.digits(theirs.cost.cosine), None)


def _picked(risk: LineUpRisk | None) -> Rate | None:
    return risk.identified if risk else None


def _rates(value: str, card: Rate | None, again: Rate | None) -> Agreement:
    """Agrees where the rate on the card lies in the interval of the rate that was measured again."""
    same = card is again if card is None or again is None else again.low <= card.rate <= again.high
    return Agreement(value, words.rate_text(card), words.rate_text(again), same)


def _near(card: Statistic | None, again: Statistic | None, victims: tuple[int, int]) -> bool:
    """Whether the 95% intervals of both means overlap, or both are exact."""
    if card is None or again is None:
        return card is again
    if min(card.mean, again.mean) >= EXACT:
        return True
    return abs(card.mean - again.mean) <= max(LEAST, _half(card, victims[0]) + _half(again, victims[1]))


def _half(statistic: Statistic, victims: int) -> float:
    """Half of Student's interval of the mean."""
    if victims < 2:
        return math.inf
    return float(stdtrit(victims - 1, 1 - CLEAR / 2)) * statistic.std / math.sqrt(victims - 1)


def _text(statistic: Statistic | None, victims: int) -> str:
    if statistic is None or math.isinf(half := _half(statistic, victims)):
        return words.mean(statistic, 1)
    return f"{words.mean(statistic, 1)} ± {words.digits(half, 1)}"
