"""What a comparison says: two sides beside each other, number by number, and whether a difference is more than chance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradveil.core.errors import UserError
from gradveil.core.text import listing, plural
from gradveil.report import words
from gradveil.report.page import page
from gradveil.storage.files import check_replaceable, write_text

if TYPE_CHECKING:
    import pandas as pd

WORST = "worst of all"  # the row of a defense that takes the strongest attack on every image
BESIDE = "no attack"  # the row of what is measured beside the attacks
METRICS = {"psnr": "PSNR, dB", "ssim": "SSIM", "identified": "identified"}
LINE_UP, LIMIT, COSINE, ACCURACY = "line_up", "limit", "cosine", "accuracy"
NAMES = METRICS | {LINE_UP: "line-up, picked", LIMIT: "line-up, limit", COSINE: "update's cosine", ACCURACY: "test accuracy"}
_SHARES = ("identified", LINE_UP, LIMIT, ACCURACY)
_WITHOUT_INTERVAL = (LIMIT, COSINE, ACCURACY)


@dataclass(frozen=True)
class Change:
    """One number of both sides. `low` to `high` is where the true difference lies, at the level of 95%."""

    metric: str
    before: float | None
    after: float | None
    low: float | None = None
    high: float | None = None
    victims: int = 0

    @property
    def difference(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    @property
    def reading(self) -> str:
        if self.difference is None:
            return "not measured in both"
        if self.metric in _WITHOUT_INTERVAL:
            return "no interval"
        if self.low is None or self.high is None:
            return "too few victims to tell"
        if self.low == self.high == 0:
            return "the same"
        if not self.clear:
            return "within noise"
        more = "more" if self.low > 0 else "less"
        return f"picked {more} often" if self.metric == LINE_UP else f"leaks {more}"

    @property
    def texts(self) -> tuple[str, str, str]:
        """Before, after and the difference with its interval, as they are shown."""
        share, places = self.metric in _SHARES, 2 if self.metric in ("ssim", COSINE) else 1
        before, after = (words.percent(v, 1) if share else words.digits(v, places) for v in (self.before, self.after))
        if self.difference is None:
            return before, after, words.NOTHING
        numbers = [v for v in (self.difference, self.low, self.high) if v is not None]
        first, *between = (_signed(100 * v if share else v, places) for v in numbers)
        shown = self.low != self.high and len(between) == 2
        return before, after, f"{first} ({' to '.join(between)})" if shown else first


def _signed(value: float, places: int) -> str:
    text = words.digits(value, places)
    return f"+{text}" if value > 0 and any(c in text for c in "123456789") else text


@dataclass(frozen=True)
class AttackChange:
    """One attack on both sides, the worst of all attacks, or what no attack measures."""

    attack: str
    changes: list[Change]

    @property
    def clear(self) -> bool:
        return any(c.clear for c in self.changes)


@dataclass(frozen=True)
class DefenseChange:
    """One defense of each side: mostly the same."""

    specs: tuple[str, str]
    verdicts: tuple[str, str]
    rows: list[AttackChange]
    notes: list[str]

    @property
    def spec(self) -> str:
        return self.specs[0] if self.specs[0] == self.specs[1] else " → ".join(self.specs)

    @property
    def verdict(self) -> str:
        return self.verdicts[0] if self.verdicts[0] == self.verdicts[1] else " → ".join(self.verdicts)

    @property
    def worst(self) -> list[Change]:
        return next((row.changes for row in self.rows if row.attack == WORST), [])


@dataclass(frozen=True, repr=False)
class Comparison:
    """What changed from the first side to the second; a side is a run, or one defense of a run."""

    a: Path
    b: Path
    scopes: tuple[str, str]
    paired: bool
    victims: tuple[int, int]
    defenses: list[DefenseChange]
    notes: list[str]

    @property
    def title(self) -> str:
        settings = len(self.defenses) == 1 and len(set(self.defenses[0].specs)) == 2
        return "What changed between two defenses" if settings else "What changed between two audits"

    @property
    def method(self) -> str:
        if self.paired:
            return f"the same {plural(min(self.victims), 'victim')} on both sides, compared each with itself"
        return f"other victims on each side ({self.victims[0]} and {self.victims[1]}), compared as two groups"

    @property
    def headline(self) -> str:
        if not self.defenses:
            return "The runs have no defense in common."
        moved = [d.spec for d in self.defenses if len(set(d.verdicts)) == 2]
        clear = [d.spec for d in self.defenses if any(c.clear for c in d.worst)]
        first = f"The verdict changed for {listing(moved)}" if moved else "No verdict changed"
        where = f"; what the worst attack got changed clearly under {listing(clear)}"
        if len(self.defenses) == 1:
            verdicts = self.defenses[0].verdicts
            first = f"The verdict changed from “{verdicts[0]}” to “{verdicts[1]}”" if moved else f"Both are “{verdicts[0]}”"
            units = {"psnr": " dB", "identified": " points"}
            clearly = [c for c in self.defenses[0].worst if c.clear]
            got = listing(f"{NAMES[c.metric].partition(',')[0]} {c.texts[2]}{units.get(c.metric, '')}" for c in clearly)
            where = f"; what the worst attack got changed clearly: {got}"
        return f"{first}{where if clear else ', and what the worst attack got changed nowhere clearly'}."

    def to_frame(self) -> pd.DataFrame:
        """One row per defense, attack and metric: both values, their difference and its interval, and a reading."""
        import pandas as pd

        rows = [
            {
                "first": d.specs[0], "second": d.specs[1], "attack": row.attack, "metric": c.metric, "before": c.before,
                "after": c.after, "change": c.difference, "low": c.low, "high": c.high, "victims": c.victims,
                "reading": c.reading,
            }
            for d in self.defenses for row in d.rows for c in row.changes
        ]  # fmt: skip
        numbers = dict.fromkeys(("before", "after", "change", "low", "high"), float)
        columns = ["first", "second", "attack", "metric", *numbers, "victims", "reading"]
        return pd.DataFrame(rows, columns=columns).astype(numbers)

    def save(self, file: str | Path) -> Path:
        """Write one self-contained page without a script."""
        file = Path(file)
        if file.is_dir():
            raise UserError(f"{file} is a folder; --out names the page's file, such as compare.html.")
        check_replaceable(file, '<meta name="generator" content="gradveil compare">')
        write_text(file, page("compare.html.j2", comparison=self, names=NAMES))
        return file

    def _repr_html_(self) -> str:
        return page("compare_notebook.html.j2", comparison=self, names=NAMES)

    def __repr__(self) -> str:
        return f"<Comparison: {self.headline} {self.method}>"
