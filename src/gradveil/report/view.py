"""A summary, read once and typed, so that page, terminal and notebook say the same about the same numbers.

`summary.json` may lack fields or carry null; here each has one place, and what was not measured is `None`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

LEAKS, NO_LEAK, UNREFUTED, NOT_JUDGED = "leaks", "no leak shown", "unrefuted", "not judged"
METRICS = ("psnr", "ssim", "mse", "lpips")


def number(value: Any) -> float | None:
    """A number, infinity included (the PSNR of a perfect copy); anything else was not measured."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return None
    return float(value)


def whole(value: Any) -> int | None:
    given = number(value)
    return int(given) if given is not None and math.isfinite(given) else None


def texts(value: Any) -> list[str]:
    """A list of words, also where a single one or nothing was written."""
    if value is None:
        return []
    return [str(v) for v in value] if isinstance(value, (list, tuple)) else [str(value)]


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True)
class Stat:
    """One metric over the scored images."""

    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None

    @classmethod
    def read(cls, value: Any) -> Stat:
        given = mapping(value)
        return cls(*(number(given.get(k)) for k in ("mean", "std", "min", "max")))


@dataclass(frozen=True)
class Rate:
    """A share with its confidence interval, beside what guessing would give."""

    rate: float
    low: float | None = None
    high: float | None = None
    chance: float | None = None
    count: int | None = None
    of: int | None = None

    @classmethod
    def read(cls, value: Any, of: int | None) -> Rate | None:
        given = mapping(value)
        rate = number(given.get("rate"))
        if rate is None:
            return None
        count = round(rate * of) if of else None
        if of and count is not None and abs(rate * of - count) > 0.01:
            count = of = None  # the rate is not one of `of` images: better no count than a wrong one
        low, high, chance = (number(given.get(k)) for k in ("low", "high", "chance"))
        return cls(rate, low, high, chance, count, of)


@dataclass(frozen=True)
class Row:
    """One attack on one defense, scored against one truth."""

    attack: str
    status: str
    adaptive: bool
    knowledge: str
    against: str
    updates: int | None
    scored: int | None
    failed: int | None
    psnr: Stat
    ssim: Stat
    mse: Stat
    lpips: Stat
    asr: float | None
    identified: Rate | None
    label_accuracy: float | None
    seconds: float | None
    iterations: int | None
    error: str | None
    cell: str | None

    @classmethod
    def read(cls, row: Mapping[str, Any], knowledge: str) -> Row:
        scored = whole(row.get("scored"))
        return cls(
            attack=str(row.get("spec", "?")),
            status=str(row.get("status") or "ok"),
            adaptive=bool(row.get("adaptive")),
            knowledge=str(row.get("knowledge") or knowledge),
            against=str(row.get("against") or "original"),
            updates=whole(row.get("updates")),
            scored=scored,
            failed=whole(row.get("failed")),
            psnr=Stat.read(row.get("psnr")),
            ssim=Stat.read(row.get("ssim")),
            mse=Stat.read(row.get("mse")),
            lpips=Stat.read(row.get("lpips")),
            asr=number(row.get("asr")),
            identified=Rate.read(row.get("identified"), scored),
            label_accuracy=number(row.get("label_accuracy")),
            seconds=number(row.get("seconds")),
            iterations=whole(row.get("iterations")),
            error=str(row["error"]) if row.get("error") else None,
            cell=str(row["cell"]) if row.get("cell") else None,
        )

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def strength(self) -> tuple[bool, float, float, float]:
        """How much the attack got, to order attacks by: identified first, since that is the verdict's ground."""
        rate = self.identified.rate if self.identified else -1.0
        lowest = -math.inf
        ssim = self.ssim.mean if self.ssim.mean is not None else lowest
        return self.ok, rate, ssim, self.psnr.mean if self.psnr.mean is not None else lowest


@dataclass(frozen=True)
class DefenseView:
    """One defense: its verdict, what the worst attacks got, and what it costs."""

    index: int  # from 1, as on the chart
    spec: str
    verdict: str
    scope: str | None
    stage: list[str]
    counter: list[str]
    warnings: list[str]
    rows: list[Row]
    psnr: Stat
    ssim: Stat
    asr: float | None
    identified: Rate | None
    accuracy: float | None
    loss: float | None  # PDM: percent of the undefended accuracy that is lost
    overhead: float | None
    cosine: float | None
    noise_ratio: float | None
    by_victim: list[Mapping[str, Any]]

    @classmethod
    def read(cls, index: int, given: Mapping[str, Any], knowledge: str, clean: float | None) -> DefenseView:
        rows = [Row.read(r, knowledge) for r in given.get("attacks") or []]
        worst, utility, gradient = (mapping(given.get(k)) for k in ("worst", "utility", "gradient"))
        scored = whole(worst.get("scored")) or max((r.scored or 0 for r in rows if r.against == "original"), default=0)
        accuracy, loss = number(utility.get("acc_test")), number(utility.get("pdm"))
        if loss is None and accuracy is not None and clean:
            loss = 100 * (clean - accuracy) / clean
        verdict = str(given.get("verdict") or NOT_JUDGED)
        return cls(
            index=index,
            spec=str(given.get("spec", "?")),
            verdict=verdict if verdict in (LEAKS, NO_LEAK, UNREFUTED) else NOT_JUDGED,
            scope=str(given["scope"]) if given.get("scope") else None,
            stage=texts(given.get("stage")),
            counter=texts(given.get("counter")),
            warnings=texts(given.get("warnings")),
            rows=rows,
            psnr=Stat.read(worst.get("psnr")),
            ssim=Stat.read(worst.get("ssim")),
            asr=number(worst.get("asr")),
            identified=Rate.read(worst.get("identified"), scored or None),
            accuracy=accuracy,
            loss=loss,
            overhead=number(utility.get("overhead")),
            cosine=number(gradient.get("cosine")),
            noise_ratio=number(gradient.get("noise_ratio")),
            by_victim=[mapping(v) for v in worst.get("by_victim") or []],
        )

    @property
    def control(self) -> bool:
        return is_control(self.spec)

    @cached_property
    def best(self) -> Row | None:
        """The single attack that got most."""
        rows = [r for r in self.rows if r.ok and r.against == "original"]
        return max(rows, key=lambda r: r.strength) if rows else None


def is_control(spec: str) -> bool:
    return spec.partition(":")[0].strip() == "none"


@dataclass(frozen=True)
class SummaryView:
    """The whole of `summary.json`."""

    version: str
    suite: str
    case: Mapping[str, Any]
    defenses: list[DefenseView]
    baseline: Row | None
    warnings: list[str]
    granted: list[str]
    not_tested: list[str]
    command: str | None
    scope: str | None

    @classmethod
    def read(cls, summary: Mapping[str, Any]) -> SummaryView:
        case = mapping(summary.get("case"))
        given = [mapping(d) for d in summary.get("defenses") or []]
        clean = next(
            (number(mapping(d.get("utility")).get("acc_test")) for d in given if is_control(str(d.get("spec", "")))),
            None,
        )
        level = str(case.get("knowledge") or "realistic")
        baseline = mapping(summary.get("baseline"))
        return cls(
            version=str(summary.get("gradveil") or "unknown version"),
            suite=str(summary.get("suite") or "custom"),
            case=case,
            defenses=[DefenseView.read(i, d, level, clean) for i, d in enumerate(given, 1)],
            baseline=Row.read({"spec": "no update at all", **baseline}, "none") if baseline else None,
            warnings=texts(summary.get("warnings")),
            granted=texts(summary.get("granted")),
            not_tested=texts(summary.get("not_tested")),
            command=str(summary["command"]) if summary.get("command") else None,
            scope=str(summary["scope"]) if summary.get("scope") else None,
        )

    @property
    def level(self) -> str:
        return str(self.case.get("knowledge") or "realistic")

    @cached_property
    def control(self) -> DefenseView | None:
        return next((d for d in self.defenses if d.control), None)

    @cached_property
    def images(self) -> int | None:
        """How many private images the audit attacked."""
        victims, size = whole(self.case.get("victims")), whole(self.case.get("batch_size")) or 1
        return victims * size if victims else None

    def attacks(self) -> list[str]:
        """Every attack that was to run, once, in the order of the summary."""
        return list(dict.fromkeys(r.attack for d in self.defenses for r in d.rows))
