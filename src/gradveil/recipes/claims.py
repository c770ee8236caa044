"""The claims of a paper as statements that its table, or ours, can confirm.

A claim has one kind: `order` (values that rise from left to right, or fall by no more than `slack`), `lowest` or `highest`
(one cell against the others of its row or column, or against those that `of` names), `at_least` or `at_most` (a number,
then cells). A cell is written `row | column`. A difference within two standard errors cannot be told; means over the same
victims are compared victim by victim, accuracies seed by seed. A claim is tested only where `only_if` holds, for example
where an attack succeeds without a defense.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Literal

from pydantic import BaseModel, model_validator

ClaimVerdict = Literal["holds", "does not hold", "cannot be told"]
Position = tuple[str, str]  # row and column of a cell
WITHIN = 2.0  # standard errors
SAME = 1e-6  # smaller differences are rounding
RULES = 2  # version of how numbers are taken and compared; 1: accuracies of one training with an assumed spread


@dataclass(frozen=True)
class Value:
    """A number with its standard deviation over `n` images or trainings, and the single numbers where they are stored.

    Numbers that belong together, of the same victims or of trainings of the same seeds, stand at the same place of `each`.
    """

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
        """The standard error of the mean."""
        return self.std / math.sqrt(max(self.n, 1))

    def above(self, other: Value) -> tuple[float, float]:
        """The difference to another value, and its standard error."""
        if len(self.each) == len(other.each) > 1:
            pairs = Value.of(a - b for a, b in zip(self.each, other.each, strict=True))
            return pairs.mean, pairs.error
        return self.mean - other.mean, math.hypot(self.error, other.error)


def of_trainings(shares: Sequence[float]) -> Value:
    """Accuracies in percent, one per seed. One training tells nothing about the spread between seeds."""
    value = Value.of(100 * share for share in shares)
    return value if value.n > 1 else Value(value.mean, math.inf)


Table = Mapping[Position, Value]


class JudgedClaim(BaseModel, extra="forbid", frozen=True):
    """A claim with its verdict and the figures that decided."""

    claim: str
    verdict: ClaimVerdict
    figures: str


class Claim(BaseModel, extra="forbid", frozen=True):
    """One statement about the cells of a table."""

    text: str = ""  # a condition needs none
    order: tuple[str, ...] = ()
    slack: float = 0.0
    lowest: str = ""
    highest: str = ""
    of: Literal["row", "column"] | tuple[str, ...] = "column"
    at_least: tuple[float | str, ...] = ()
    at_most: tuple[float | str, ...] = ()
    only_if: Claim | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Claim:
        if sum(map(bool, (self.order, self.lowest, self.highest, self.at_least, self.at_most))) != 1:
            raise ValueError(f"claim '{self.text}' must have exactly one of order, lowest, highest, at_least, at_most")
        return self

    def positions(self, rows: Iterable[str], columns: Iterable[str]) -> list[Position]:
        """All cells that the claim depends on."""
        condition = self.only_if.positions(rows, columns) if self.only_if else []
        if self.lowest or self.highest:
            extreme = position(self.lowest or self.highest)
            return [extreme, *self._others(extreme, rows, columns), *condition]
        return [*self._listed(), *condition]

    def _listed(self) -> list[Position]:
        return [position(str(text)) for text in (*self.order, *self.at_least[1:], *self.at_most[1:])]

    def _others(self, extreme: Position, rows: Iterable[str], columns: Iterable[str]) -> list[Position]:
        if self.of == "column":
            return [(row, extreme[1]) for row in rows if row != extreme[0]]
        if self.of == "row":
            return [(extreme[0], column) for column in columns if column != extreme[1]]
        return [position(text) for text in self.of]

    def judge(self, table: Table, rows: Iterable[str], columns: Iterable[str]) -> JudgedClaim:
        """The verdict from a table. `lowest` and `highest` ignore cells that were not run."""
        rows, columns = list(rows), list(columns)
        if self.only_if:
            condition = self.only_if.judge(table, rows, columns)
            if condition.verdict != "holds":
                return self._judged("cannot be told", f"asked only if {condition.figures}")
        if self.lowest or self.highest:
            return self._judge_extreme(table, rows, columns)
        listed = self._listed()
        if missing := [" | ".join(p) for p in listed if p not in table]:
            return self._judged("cannot be told", f"not run: {', '.join(missing)}")
        values = [table[p] for p in listed]
        figures = ", ".join(_figure(p, v) for p, v in zip(listed, values, strict=True))
        if self.order:
            gaps = [b.above(a) for a, b in pairwise(values)]
            slack = f", or lower by at most {_number(self.slack)}" if self.slack else ""
            signs = [_sign(gap + self.slack, error) for gap, error in gaps]
            return self._judged(_all(signs), f"{figures}; asked to rise{slack}")
        limit, direction, sign = (self.at_least[0], 1, "≥") if self.at_least else (self.at_most[0], -1, "≤")
        limit = float(limit)
        signs = [_reaches(direction * (v.mean - limit), v.error) for v in values]
        return self._judged(_all(signs), f"{figures}; asked {sign} {_number(limit)}")

    def _judge_extreme(self, table: Table, rows: list[str], columns: list[str]) -> JudgedClaim:
        extreme, direction = position(self.lowest or self.highest), -1 if self.lowest else 1
        others = [p for p in self._others(extreme, rows, columns) if p in table]
        if extreme not in table or not others:
            return self._judged("cannot be told", f"not run: {' | '.join(extreme)}")
        gaps = [table[extreme].above(table[other]) for other in others]
        nearest = min(others, key=lambda p: direction * (table[extreme].mean - table[p].mean))
        figures = f"{_figure(extreme, table[extreme])}; nearest {_figure(nearest, table[nearest])}"
        return self._judged(_all([_sign(direction * gap, error) for gap, error in gaps]), figures)

    def _judged(self, verdict: ClaimVerdict, figures: str) -> JudgedClaim:
        return JudgedClaim(claim=self.text, verdict=verdict, figures=figures)


def position(text: str) -> Position:
    row, _, column = (part.strip() for part in text.partition("|"))
    return row, column


def _sign(gap: float, error: float) -> int:
    """1: as claimed, −1: the opposite, 0: within the error."""
    return 0 if abs(gap) <= max(WITHIN * error, SAME) else (1 if gap > 0 else -1)


def _reaches(gap: float, error: float) -> int:
    """1: the mean reaches the limit, 0: the mean misses it by less than the error, −1: by more."""
    if math.isinf(error):
        return 0
    return 1 if gap >= 0 else (0 if gap + WITHIN * error >= 0 else -1)


def _all(signs: list[int]) -> ClaimVerdict:
    return "does not hold" if -1 in signs else ("cannot be told" if 0 in signs else "holds")


def _figure(where: Position, value: Value) -> str:
    spread = " (one training)" if math.isinf(value.error) else f" ± {_number(value.error)}" if value.error else ""
    return f"{' | '.join(where)} {_number(value.mean)}{spread}"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
