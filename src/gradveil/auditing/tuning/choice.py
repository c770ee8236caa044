"""Which setting to take: rules on the rows of two audits, the search and that of fresh victims. All its words are here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gradveil.auditing.advice import LEAST_IMAGES, Evidence, cost_reasons, reasons_against
from gradveil.auditing.tuning.bracket import Bracket, Standing
from gradveil.auditing.tuning.results import Basis, Finding, TriedSetting
from gradveil.certification.certificate import percent
from gradveil.core.text import listing, plural
from gradveil.summary import CANNOT_TELL, LEAKS, DefenseRow, Doubt, RejectionCode

MOST_FRESH = 3  # settings that are audited on fresh victims: who tries many finds one that holds there by chance too
OF_THE_COST: frozenset[RejectionCode] = frozenset(
    ("cost-not-measured", "too-costly", "uncertain-cost", "near-chance", "nothing-to-lose")
)
# The attacks get too little without a defense, so that no test of pictures can tell, however much is done under one.
WEAK_CONTROL: frozenset[Doubt] = frozenset(("control-does-not-leak", "control-leaks-little"))


def standing_of(row: DefenseRow, control: DefenseRow, risk: float | None) -> tuple[Standing, Basis]:
    """Whether a setting holds, and what that rests on.

    Only where the attacks get too little without a defense, the line-up decides: it must succeed without a defense, and not
    under this one. With a promised risk, what is proved holds unless the line-up contradicts it; the control proves nothing.
    """
    if row.verdict != CANNOT_TELL:
        return ("leaks" if row.verdict == LEAKS else "holds"), "picture"
    if WEAK_CONTROL.isdisjoint(row.doubts):
        return "unknown", "nothing"
    line_up = row.line_up
    if risk is not None and not row.control:
        if line_up is None:
            return "holds", "certificate"
        # The risk is that of the wanted candidates and releases; the line-up that was played may have others.
        limit = line_up.certificate.upper if line_up.certificate else risk
        return ("leaks", "line-up") if line_up.identified.low > limit else ("holds", "certificate")
    if line_up is None or control.line_up is None or not control.line_up.shown:
        return "unknown", "nothing"
    return ("leaks" if line_up.shown else "holds"), "line-up"


def against(evidence: Evidence, row: DefenseRow, standing: Standing, basis: Basis) -> tuple[RejectionCode, ...]:
    """All that speaks against a setting: the rules of every audit, and in place of the test what else a standing rests on."""
    if basis == "picture" or standing == "unknown":
        return reasons_against(evidence, row)
    if standing == "leaks":
        return ("leaks",)
    seen = len(row.line_up.ranks) if row.line_up else 0
    few: tuple[RejectionCode, ...] = ("few-victims",) if basis == "line-up" and seen < LEAST_IMAGES else ()
    return (*few, *cost_reasons(evidence, row))


def to_price(brackets: Iterable[Bracket]) -> list[str]:
    """The settings whose cost is measured: of each defense the weakest that holds, and the next stronger one tried."""
    return [text for bracket in brackets for text in (*bracket.failed, *bracket.holding[:2])]


def frontier(control: Finding, settings: Sequence[TriedSetting]) -> tuple[str, ...]:
    """What nothing tried beats in both: the control and settings by their loss, each with fewer images than those before."""
    priced = [(s.loss, s.identified.rate, s.spec) for s in settings if s.loss is not None and s.identified]
    points = sorted([(0.0, control.identified.rate, "none"), *priced] if control.identified else priced)
    kept: list[tuple[float, float, str]] = []
    for point in points:
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return tuple(spec for *_, spec in kept)


# -- in words ----------------------------------------------------------------------------------------------------------


_DOUBTS: dict[Doubt, str] = {
    "no-attack-ran": "no attack ran",
    "few-strangers": "too few private images are left to compare with",
    "control-does-not-leak": "the attacks show no leak without a defense either",
    "control-leaks-little": "without a defense the attacks get too little",
    "few-victims": "with so few victims a leak could have stayed unseen",
    "attacks-failed": "an attack failed or did not run",
}


def family_text(bracket: Bracket, settings: Mapping[str, TriedSetting]) -> str:
    """What the search came to for one defense, as a sentence."""
    holding, leaking, unknown = bracket.holding, bracket.leaking, bracket.unknown
    if holding:
        below = f"{leaking} leaks" if leaking else "none weaker was tried"
        if leaking and settings[leaking].standing == "holds":
            below = f"{leaking} did not hold on fresh victims"
        if bracket.least is not None and not leaking:
            below = "a weaker one would break the promise"
        weakest = settings[holding[0]]
        by = "" if weakest.basis == "picture" else f", by the {weakest.basis}"
        return f"{weakest.spec} is the weakest tried that holds ({weakest.verdict}{by}); {below}."
    if unknown:
        return f"Whether {unknown} leaks cannot be told: {listing(_DOUBTS[doubt] for doubt in settings[unknown].doubts)}."
    if leaking:
        end = ", and a stronger one sends the same" if bracket.at_its_end else ""
        return f"No strength that was tried holds, up to {leaking}{end}."
    return "It was not audited: there was no time."


@dataclass(frozen=True)
class Wanted:
    """What was wanted, as words."""

    max_loss: float
    risk: float | None

    def __str__(self) -> str:
        risk = f" and promises a line-up risk of at most {percent(self.risk)}" if self.risk is not None else ""
        return f"loses at most {self.max_loss:g}% of the accuracy{risk}"


def loss_text(setting: TriedSetting) -> str:
    """`1.2% of the accuracy, 95% interval 0.4% to 2.0%`."""
    between = [setting.low, setting.high]
    interval = (
        f", 95% interval {' to '.join(f'{end:.1f}%' for end in between if end is not None)}" if None not in between else ""
    )
    loss = f"{setting.loss:.1f}%" if setting.loss is not None and setting.loss > 0 else "nothing"
    return f"{loss} of the accuracy{interval}".replace("-", "−")


def recommendation_text(setting: TriedSetting, victims: int, limits: Wanted) -> str:
    """Why this setting is to be taken."""
    assert setting.fresh is not None
    promise = f", and proves a line-up risk of at most {percent(setting.promised)}" if limits.risk and setting.promised else ""
    return (
        f"{setting.spec} is the cheapest setting tried that survives and {limits}. {_held(setting, setting.fresh, victims)} "
        f"It loses {loss_text(setting)}{promise}."
    )


def line_up_note(setting: TriedSetting) -> str | None:
    """What a setting does not stop, although no picture leaks under it. None where its line-ups are explained by guessing."""
    findings = [finding for finding in (setting.fresh, setting) if finding and finding.line_up]
    shown = [f for f in findings if f.basis == "picture" and f.line_up and f.line_up.low > f.line_up.chance]
    if not shown or shown[0].line_up is None:
        return None
    rate, candidates = shown[0].line_up, shown[0].candidates or 0
    return (
        f"No picture leaks under {setting.spec}, but who has an image can still tell that it took part: {rate.rate:.0%} of the "
        f"victims came first of {candidates:,} candidates (guessing: {rate.chance:.1%}). `--risk` asks for a promise "
        "against that."
    )


def _held(searched: Finding, fresh: Finding, victims: int) -> str:
    """On what a setting held, in sentences."""
    if searched.basis == fresh.basis == "picture":
        again = f"nor on {victims} fresh victims, not even by attacks that are built to break it"
        return f"No leak was shown in the search, {again}."
    return f"In the search {_rests_on(searched)}. On {victims} fresh victims {_rests_on(fresh)}."


def _rests_on(finding: Finding) -> str:
    if finding.basis == "picture":
        return "no leak was shown, not even by attacks that are built to break it"
    if finding.basis == "line-up":
        rate = finding.line_up.rate if finding.line_up else 0.0
        first = f"{rate:.0%} of the images came first of {finding.candidates:,}, which guessing explains"
        return f"the picture cannot tell, so this rests on the line-up alone: {first}"
    beside = " alone" if finding.line_up is None else ", which the line-up does not contradict"
    return f"the picture cannot tell, so this rests on the proof{beside}"


_FAULTS: dict[RejectionCode, str] = {
    "leaks": "it leaks",
    "cannot-tell": "whether it leaks cannot be told",
    "weak-control": "without a defense the attacks get too little",
    "no-counter": "it is only unrefuted: no attack ran that is built to break it",
    "few-victims": "too few victims were attacked",
    "coarse-test": "a leak of a quarter of the images could have stayed unseen",
    "cost-not-measured": "its cost in accuracy was not measured",
    "too-costly": "it loses too much accuracy",
    "uncertain-cost": "it may lose too much accuracy",
    "near-chance": "with it the model learns next to nothing",
    "nothing-to-lose": "without a defense the model learns next to nothing here, so that its cost cannot be told",
    "costs-more": "it costs more",
    "failed-again": "it or a stronger setting did not hold on fresh victims",
    "not-confirmed": "it was not audited again on fresh victims",
}


def none_text(settings: Sequence[TriedSetting], limits: Wanted) -> str:
    """The plain sentence where nothing can be recommended, with what stands in the way of the nearest setting."""
    if not settings:
        return "No setting was tried; the text of each defense says why."
    held = [setting for setting in settings if setting.standing == "holds"]
    if not held:
        leaking = sum(setting.standing == "leaks" for setting in settings)
        if not leaking:
            return "Of no setting can it be told whether it leaks."
        if leaking == len(settings):
            return "Every setting that was tried leaks."
        return f"No setting that was tried holds: {leaking} of {len(settings)} leak, and of the others it cannot be told."
    near = min(held, key=lambda s: ("failed-again" in s.reasons, s.loss is None, s.loss or 0.0))
    price = f" (it loses {loss_text(near)})" if near.loss is not None and "nothing-to-lose" not in near.reasons else ""
    faults = listing(_FAULTS[code] for code in near.reasons)
    if "not-confirmed" in near.reasons:
        failed = sum(bool(s.fresh) for s in settings)
        faults += f": {plural(failed, 'other setting')} had not held there" if failed >= MOST_FRESH else ": there was no time"
    return f"No setting that was tried survives and {limits}. The nearest is {near.spec}{price}, but {faults}."
