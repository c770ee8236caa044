"""A paper's claims as statements that its own table, or ours, can bear out.

A statement is of one kind: `order` (values that rise from left to right, or fall by no more than `slack`), `lowest` or
`highest` (one cell against the others of its row or column, or against those named in `of`), `at_least` or `at_most` (a
number, then cells). A cell is written `row | column`. What lies within two standard errors cannot be told; means over
the same victims are compared victim by victim. `only_if` is what must hold for the claim to be tested at all, such as
an attack that succeeds where nothing defends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

ClaimVerdict = Literal["holds", "does not hold", "cannot be told"]
Place = tuple[str, str]
WITHIN = 2.0  # standard errors
SAME = 1e-6  # values that differ by less differ by rounding


@dataclass(frozen=True)
class Value:
    """A number with its spread over `n` images, and where they are known the images' own numbers."""

    mean: float
    std: float = 0.0
    n: int = 1
    each: tuple[float, ...] = ()

    @staticmethod
    def of(each: Iterable[float]) -> Value:
        values = tuple(each)
        return Value(fmean(values), stdev(values) if len(values) > 1 else 0.0, len(values), values)

    @property
    def error(self) -> float:
        return self.std / math.sqrt(max(self.n, 1))

    def above(self, other: Value) -> tuple[float, float]:
        """By how much, and the standard error of that."""
        if len(self.each) == len(other.each) > 1:
            pairs = Value.of(a - b for a, b in zip(self.each, other.each, strict=True))
            return pairs.mean, pairs.error
        return self.mean - other.mean, math.hypot(self.error, other.error)


Table = Mapping[Place, Value]


@dataclass(frozen=True)
class Finding:
    """What became of a claim."""

    claim: str
    verdict: ClaimVerdict
    figures: str

    def plain(self) -> dict[str, str]:
        return {"claim": self.claim, "verdict": self.verdict, "figures": self.figures}


class Claim(BaseModel):
    """One statement over a table's cells."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str
    order: tuple[str, ...] = ()
    slack: float = 0.0
    lowest: str = ""
    highest: str = ""
    of: Literal["row", "column"] | tuple[str, ...] = "column"
    at_least: tuple[Any, ...] = ()
    at_most: tuple[Any, ...] = ()
    only_if: Claim | None = None

    @model_validator(mode="before")
    @classmethod
    def _inner_text(cls, value: Any) -> Any:
        """A condition needs no words of its own."""
        inner = value.get("only_if") if isinstance(value, dict) else None
        return {**value, "only_if": {"text": "", **inner}} if isinstance(inner, dict) else value

    @model_validator(mode="after")
    def _one_kind(self) -> Claim:
        given = [kind for kind in ("order", "lowest", "highest", "at_least", "at_most") if getattr(self, kind)]
        if len(given) != 1:
            raise ValueError(f"claim '{self.text}' must have exactly one of order, lowest, highest, at_least, at_most")
        return self

    def places(self, rows: Iterable[str], columns: Iterable[str]) -> list[Place]:
        """All cells that it rests on."""
        inner = self.only_if.places(rows, columns) if self.only_if else []
        if self.lowest or self.highest:
            best = place(self.lowest or self.highest)
            return [best, *self._others(best, rows, columns), *inner]
        return [place(text) for text in (*self.order, *self.at_least[1:], *self.at_most[1:])] + inner

    def _others(self, best: Place, rows: Iterable[str], columns: Iterable[str]) -> list[Place]:
        if self.of == "column":
            return [(row, best[1]) for row in rows if row != best[0]]
        if self.of == "row":
            return [(best[0], column) for column in columns if column != best[1]]
        return [place(text) for text in self.of]

    def judge(self, table: Table, rows: Iterable[str], columns: Iterable[str]) -> Finding:
        """Against a table. Cells of a row or column that were not run are left out of a comparison with all."""
        rows, columns = list(rows), list(columns)
        if self.only_if:
            before = self.only_if.judge(table, rows, columns)
            if before.verdict != "holds":
                return Finding(self.text, "cannot be told", f"asked only if {before.figures}")
        if self.lowest or self.highest:
            return self._extreme(table, rows, columns)
        named = [place(text) for text in (*self.order, *self.at_least[1:], *self.at_most[1:])]
        missing = [" | ".join(p) for p in named if p not in table]
        if missing:
            return Finding(self.text, "cannot be told", f"not run: {', '.join(missing)}")
        values = [table[p] for p in named]
        if self.order:
            gaps = [b.above(a) for a, b in pairwise(values)]
            steps = [_sign(gap + self.slack, error) for gap, error in gaps]
            figures = ", ".join(_shown(p, v) for p, v in zip(named, values, strict=True))
            slack = f", or lower by at most {_number(self.slack)}" if self.slack else ""
            return Finding(self.text, _all(steps), f"{figures}; asked to rise{slack}")
        limit, way = (float(self.at_least[0]), 1) if self.at_least else (float(self.at_most[0]), -1)
        steps = [_reaches(way * (v.mean - limit), v.error) for v in values]
        sign = "≥" if way > 0 else "≤"
        figures = ", ".join(_shown(p, v) for p, v in zip(named, values, strict=True))
        return Finding(self.text, _all(steps), f"{figures}; asked {sign} {_number(limit)}")

    def _extreme(self, table: Table, rows: list[str], columns: list[str]) -> Finding:
        best = place(self.lowest or self.highest)
        others = [p for p in self._others(best, rows, columns) if p in table]
        if best not in table or not others:
            return Finding(self.text, "cannot be told", f"not run: {' | '.join(best)}")
        way = -1 if self.lowest else 1
        steps = []
        for other in others:
            gap, error = table[best].above(table[other])
            steps.append(_sign(way * gap, error))
        near = min(others, key=lambda p: way * (table[best].mean - table[p].mean))
        figures = f"{_shown(best, table[best])}; nearest {_shown(near, table[near])}"
        return Finding(self.text, _all(steps), figures)


def place(text: str) -> Place:
    row, _, column = (part.strip() for part in text.partition("|"))
    return row, column


def _sign(gap: float, error: float) -> int:
    """1: as claimed, −1: the other way, 0: within the error."""
    return 0 if abs(gap) <= max(WITHIN * error, SAME) else (1 if gap > 0 else -1)


def _reaches(gap: float, error: float) -> int:
    """A limit is met by the mean; short of it by less than the error, it cannot be told."""
    return 1 if gap >= 0 else (0 if gap + WITHIN * error >= 0 else -1)


def _all(steps: Iterable[int]) -> ClaimVerdict:
    found = set(steps)
    return "does not hold" if -1 in found else ("cannot be told" if 0 in found else "holds")


def _shown(where: Place, value: Value) -> str:
    spread = f" ± {_number(value.error)}" if value.error else ""
    return f"{' | '.join(where)} {_number(value.mean)}{spread}"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
