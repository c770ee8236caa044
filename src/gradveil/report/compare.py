"""Two runs side by side: what changed for every defense and attack, and whether that is more than chance.

Where both runs attacked the same images the difference of every victim with itself is taken, which cancels how hard a
victim is; else the two groups are compared. A victim is a batch: its images share an update and count as one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradveil.core.errors import UserError
from gradveil.core.results import ImagePlace, ImageScores, strongest
from gradveil.core.text import listing, plain, plural, shorten
from gradveil.report import words
from gradveil.report.intervals import interval
from gradveil.report.page import page
from gradveil.report.pictures import attacked
from gradveil.storage.files import check_replaceable, write_text
from gradveil.storage.run_folder import RunFolder
from gradveil.summary import DefenseRow, Summary

WORST = "worst of all"  # the row of a defense that takes the strongest attack on every image
SAMPLING = ("seed", "victims")  # terms that draw what is attacked: the images, and the untrained weights
METRICS = {"psnr": "PSNR, dB", "ssim": "SSIM", "identified": "identified"}

ScoredImages = Mapping[ImagePlace, ImageScores]
Attacks = Mapping[str, ScoredImages]


@dataclass(frozen=True)
class Change:
    """One number in both runs. `low` to `high` is where the true difference lies, at the level of 95%."""

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
    def reading(self) -> str:
        if self.difference is None:
            return "not measured in both"
        if self.metric == "accuracy":
            return "no interval"
        if self.low is None or self.high is None:
            return "too few victims to tell"
        if self.low == self.high == 0:
            return "the same"
        if self.low <= 0 <= self.high:
            return "within noise"
        return "leaks more" if self.low > 0 else "leaks less"

    @property
    def clear(self) -> bool:
        return self.reading.startswith("leaks")

    @property
    def texts(self) -> tuple[str, str, str]:
        """Before, after and the difference with its interval, as they are shown."""
        share, places = self.metric in ("identified", "accuracy"), 2 if self.metric == "ssim" else 1
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
    """One attack on one defense in both runs, or the worst of all attacks."""

    attack: str
    changes: list[Change]

    @property
    def clear(self) -> bool:
        return any(c.clear for c in self.changes)


@dataclass(frozen=True)
class DefenseChange:
    spec: str
    before: str  # the verdicts
    after: str
    rows: list[AttackChange]
    accuracy: Change
    notes: list[str]

    @property
    def verdict(self) -> str:
        return self.before if self.before == self.after else f"{self.before} → {self.after}"


@dataclass(frozen=True)
class Comparison:
    """What changed from the run in `a` to the run in `b`."""

    a: Path
    b: Path
    scopes: tuple[str, str]
    paired: bool
    victims: tuple[int, int]
    defenses: list[DefenseChange]
    notes: list[str]

    @property
    def method(self) -> str:
        if self.paired:
            return f"the same {plural(min(self.victims), 'victim')} in both runs, compared each with itself"
        return f"other victims in each run ({self.victims[0]} and {self.victims[1]}), compared as two groups"

    @property
    def headline(self) -> str:
        if not self.defenses:
            return "The runs have no defense in common."
        moved = [d.spec for d in self.defenses if d.before != d.after]
        clear = [d.spec for d in self.defenses if d.rows and d.rows[0].clear]
        first = f"The verdict changed for {listing(moved)}" if moved else "No verdict changed"
        where = f"; what the worst attack got changed clearly under {listing(clear)}"
        return f"{first}{where if clear else ', and what the worst attack got changed nowhere clearly'}."

    def save(self, file: str | Path) -> Path:
        """Write one self-contained page without a script."""
        file = Path(file)
        if file.is_dir():
            raise UserError(f"{file} is a folder; --out names the page's file, such as compare.html.")
        check_replaceable(file, '<meta name="generator" content="gradveil compare">')
        write_text(file, page("compare.html.j2", comparison=self, names=METRICS))
        return file


@dataclass(frozen=True)
class _Run:
    """One of the two: its summary, what its environment tells of data and model, and what every attack got."""

    path: Path
    summary: Summary
    terms: dict[str, object]
    attacks: Mapping[str, Attacks]  # by defense, of those that ran

    @classmethod
    def read(cls, path: Path) -> _Run:
        folder, summary = RunFolder(path), Summary.read(path)
        terms: dict[str, object] = dict(summary.case)
        if environment := folder.environment:  # one name may stand for other files or weights by now
            terms |= {"data's content": environment.data_sha256, "model's content": environment.model_sha256}
        got = {
            d.spec: {row.spec: {i.place: i for i in cell.victims} for row, cell in attacked(folder, d) if row.ok}
            for d in summary.defenses
        }
        return cls(path, summary, terms, got)

    @property
    def labels(self) -> dict[ImagePlace, int | None]:
        scored = [images for attacks in self.attacks.values() for images in attacks.values()]
        return {place: image.label for images in scored for place, image in images.items()}


def compare_runs(a: Path, b: Path, across: Iterable[str] = ()) -> Comparison:
    """Compare two finished runs. Cases that differ are refused, but for the terms named in `across`."""
    first, second = _Run.read(a), _Run.read(b)
    notes = _check_cases(first, second, set(across))
    paired = _same_victims(first, second)
    ours, theirs = ({d.spec: d for d in run.summary.defenses} for run in (first, second))
    for path, mine, other in ((a, ours, theirs), (b, theirs, ours)):
        if alone := [spec for spec in mine if spec not in other]:
            notes.append(f"Only in {path}: {listing(alone)}.")
    common = [spec for spec in ours if spec in theirs]
    changed = [_defense(ours[s], theirs[s], first.attacks[s], second.attacks[s], paired) for s in common]
    victims = (first.summary.case.victims, second.summary.case.victims)
    return Comparison(a, b, (first.summary.scope, second.summary.scope), paired, victims, changed, notes)


# -- may they be compared? -------------------------------------------------------------------------------------------


def _check_cases(a: _Run, b: _Run, across: set[str]) -> list[str]:
    """Notes on what differs by permission; terms that differ without it are refused by name."""
    differs = {n: f"{_short(a.terms.get(n))} and {_short(b.terms.get(n))}" for n in {**a.terms, **b.terms}}
    differs = {n: text for n, text in differs.items() if a.terms.get(n) != b.terms.get(n)}
    # Another seed draws another split and other weights, and another name has other content of course.
    follows: dict[str, tuple[str, ...]] = dict.fromkeys(("input_shape", "num_classes", "class_names"), ("data",))
    follows |= dict.fromkeys(("data's content", "mean", "std"), ("data", "seed")) | {"model's content": ("model", "seed")}
    differs = {n: text for n, text in differs.items() if not any(cause in differs for cause in follows.get(n, ()))}
    if unknown := [n for n in across if n not in {*a.terms, *b.terms, *follows}]:
        raise UserError(f"--across {unknown[0]}: no term of these cases; they have {', '.join(a.terms)}.")
    if wrong := [n for n in differs if n not in across and n not in SAMPLING]:
        listed = ", ".join(f"{n} ({differs[n]})" for n in wrong)
        allow = f"to compare all the same: {' '.join(f'--across {shlex.quote(n)}' for n in wrong)}"
        raise UserError(f"the runs are different cases: {listed}. A change could come from that; {allow}.")
    notes = [f"The runs differ in {n}: {text}." for n, text in differs.items()]
    for name in ("gradveil", "suite"):
        first, second = getattr(a.summary, name), getattr(b.summary, name)
        if first != second:
            notes.append(f"The runs differ in their {name}: {first} and {second}.")
    return notes


def _short(value: object) -> str:
    return plain(shorten(str(value), 40))


def _same_victims(a: _Run, b: _Run) -> bool:
    """Same data and draw, and the labels agree. With more victims in one run, the first of them are the same."""
    if any(a.terms.get(n) != b.terms.get(n) for n in ("data", "data's content", "seed", "batch_size")):
        return False
    both = a.labels.keys() & b.labels.keys()
    return bool(both) and all(a.labels[place] == b.labels[place] for place in both)


# -- one defense -----------------------------------------------------------------------------------------------------


def _defense(a: DefenseRow, b: DefenseRow, ours: Attacks, theirs: Attacks, paired: bool) -> DefenseChange:
    rows = [AttackChange(WORST, list(_changes(_worst(ours), _worst(theirs), paired)))] if ours and theirs else []
    rows += [AttackChange(name, list(_changes(ours[name], theirs[name], paired))) for name in ours if name in theirs]
    notes = []
    for which, mine, other in (("first", ours, theirs), ("second", theirs, ours)):
        if alone := [name for name in mine if name not in other]:
            notes.append(f"Only in the {which} run: {listing(alone)}. More attacks alone make the worst of all worse.")
    return DefenseChange(a.spec, a.verdict, b.verdict, rows, Change("accuracy", a.accuracy, b.accuracy), notes)


def _worst(attacks: Attacks) -> ScoredImages:
    """For every image what the attack got that got most of it, by the verdict's own order."""
    places = dict.fromkeys(place for images in attacks.values() for place in images)
    return {place: strongest([images[place] for images in attacks.values() if place in images]) for place in places}


def _changes(a: ScoredImages, b: ScoredImages, paired: bool) -> Iterator[Change]:
    single = all(image == 0 for _, image in (*a, *b))  # one image per victim
    for metric in METRICS:
        before, after = (
            {place: float(v) for place, image in images.items() if (v := getattr(image, metric)) is not None}
            for images in (a, b)
        )
        if paired:
            both = [place for place in before if place in after]
            before, after = ({p: values[p] for p in both} for values in (before, after))
        groups = _by_victim(before), _by_victim(after)
        low, high = interval(*groups, paired, metric == "identified" and single)
        first, second = (float(np.mean([*group.values()])) if group else None for group in groups)
        yield Change(metric, first, second, low, high, min(map(len, groups)))


def _by_victim(values: Mapping[ImagePlace, float]) -> dict[int, float]:
    groups: dict[int, list[float]] = {}
    for (victim, _), value in values.items():
        groups.setdefault(victim, []).append(value)
    return {victim: float(np.mean(group)) for victim, group in groups.items()}
