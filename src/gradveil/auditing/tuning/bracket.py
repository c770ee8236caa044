"""From the strengths of a defense that were tried to the next one: a bracket, then its middle, until its ends are near."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gradveil import defenses as defense_methods
from gradveil.auditing.strength import NEAR, StrengthScale
from gradveil.core.results import GradientChange

Standing = Literal["leaks", "holds", "unknown"]
STEP = 1.0  # to the next strength while only one end is known: a factor of ten


@dataclass
class Bracket:
    """One defense. `least` is the level from which on it keeps a promise; weaker ones are not tried."""

    scale: StrengthScale
    most: int  # strengths that may be tried
    least: float | None = None
    tried: dict[str, tuple[float, Standing]] = field(default_factory=dict)  # by the text of the defense
    changes: dict[str, GradientChange | None] = field(default_factory=dict)  # of the update, by the same texts
    failed: list[str] = field(default_factory=list)  # on fresh victims

    def record(self, text: str, standing: Standing, change: GradientChange | None = None) -> None:
        scale = StrengthScale.of(defense_methods.parse(text))
        assert scale is not None
        self.tried[text], self.changes[text] = (scale.level, standing), change

    def fail(self, text: str) -> None:
        """It held, and did not on fresh victims: then it counts as leaking, and one more strength may be tried."""
        self.failed.append(text)
        self.tried[text] = self.level(text), "leaks"
        self.most += 1

    def is_below_failed(self, text: str) -> bool:
        """Whether it or a stronger setting failed on fresh victims."""
        return any(self.level(text) <= self.level(failed) for failed in self.failed)

    @property
    def at_its_end(self) -> bool:
        """Whether the two strongest settings leak and send the same, so that no stronger one would send anything else."""
        strongest = sorted(self.tried, key=self.level)[-2:]
        same = len({self.changes[text] for text in strongest}) == 1 and self.changes[strongest[0]] is not None
        return len(strongest) == 2 and same and all(self.tried[text][1] == "leaks" for text in strongest)

    @property
    def leaking(self) -> str | None:
        """The strongest setting that leaks."""
        return max((text for text in self.tried if self.tried[text][1] == "leaks"), key=self.level, default=None)

    @property
    def holding(self) -> list[str]:
        """The settings that hold, the weakest first: those that are stronger than all that leak."""
        weak = self.level(self.leaking) if self.leaking else -float("inf")
        texts = [text for text, (level, standing) in self.tried.items() if standing == "holds" and level > weak]
        return sorted(texts, key=self.level)

    @property
    def unknown(self) -> str | None:
        """The setting of which nothing can be told."""
        return next((text for text, (_, standing) in self.tried.items() if standing == "unknown"), None)

    def level(self, text: str) -> float:
        return self.tried[text][0]

    def next(self) -> str | None:
        """The setting to try next; None where the search is over."""
        if len(self.tried) >= self.most or self.unknown or self.at_its_end:
            return None
        level = self._next_level()
        if level is None:
            return None
        text = self.scale.at(level, at_least=level == self.least)
        return None if text in self.tried else text

    def _next_level(self) -> float | None:
        if not self.tried:
            return self.scale.level if self.least is None else self.least
        weak = self.level(self.leaking) if self.leaking else self.scale.least
        strong = self.level(self.holding[0]) if self.holding else None
        weakest, strongest = self.scale.ends
        if strong is None:
            return None if weak is None or weak + STEP > strongest else weak + STEP
        if self.least is not None and weak is None:
            return None  # the weakest that keeps the promise holds
        if weak is None:
            return None if strong - STEP < weakest else strong - STEP
        return (weak + strong) / 2 if strong - weak > NEAR else None
