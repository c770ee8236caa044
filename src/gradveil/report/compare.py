"""Compare two runs, or two settings of a defense.

Where both sides attacked the same images the difference of every victim with itself is taken, which cancels how hard a
victim is; else the two groups are compared. A victim is a batch: its images share an update and count as one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradveil.core.errors import UserError
from gradveil.core.results import ImagePlace, ImageScores, strongest
from gradveil.core.text import listing, plain, shorten
from gradveil.protection.audited import registered
from gradveil.report.comparison import (
    ACCURACY,
    BESIDE,
    COSINE,
    LIMIT,
    LINE_UP,
    METRICS,
    WORST,
    AttackChange,
    Change,
    Comparison,
    DefenseChange,
)
from gradveil.report.intervals import interval
from gradveil.report.pictures import attacked
from gradveil.storage.environment import Environment
from gradveil.storage.run_folder import RunFolder
from gradveil.summary import DefenseRow, Summary

SAMPLING = ("seed", "victims")  # terms that draw what is attacked: the images, and the untrained weights

ScoredImages = Mapping[ImagePlace, ImageScores]
Attacks = Mapping[str, ScoredImages]


@dataclass(frozen=True)
class _Run:
    """One of the two: its summary, what its environment tells of data and model, and what every attack got."""

    path: Path
    summary: Summary
    environment: Environment | None
    attacks: Mapping[str, Attacks]  # by defense, of those that ran

    @classmethod
    def read(cls, path: Path) -> _Run:
        folder, summary = RunFolder(path), Summary.read(path)
        got = {
            d.spec: {row.spec: {i.place: i for i in cell.victims} for row, cell in attacked(folder, d) if row.ok}
            for d in summary.defenses
        }
        return cls(path, summary, folder.environment, got)

    @property
    def terms(self) -> dict[str, object]:
        terms: dict[str, object] = dict(self.summary.case)
        if here := self.environment:  # one name may stand for other files or weights by now
            terms |= {"data's content": here.data_sha256, "model's content": here.model_sha256}
        return terms

    @property
    def versions(self) -> dict[str, str]:
        installed = {} if self.environment is None else {"torch": self.environment.packages.get("torch", "unknown")}
        return {"gradveil": self.summary.gradveil, "suite": self.summary.suite, **installed}

    @property
    def labels(self) -> dict[ImagePlace, int | None]:
        scored = [images for attacks in self.attacks.values() for images in attacks.values()]
        return {place: image.label for images in scored for place, image in images.items()}

    def row(self, text: str) -> DefenseRow:
        """The row of a defense, whatever its spelling."""
        rows = {d.spec: d for d in self.summary.defenses}
        spelled = {_normal(spec): d for spec, d in rows.items()}
        if row := rows.get(text) or spelled.get(_normal(text)):
            return row
        raise UserError(f"{self.path} has no defense {shorten(text, 80)}; it has {listing(rows)}.")


def _normal(text: str) -> str:
    """A defense without settings that are the default; as it is written where it is not registered."""
    try:
        return registered(text).spec
    except UserError:
        return text


def compare_runs(a: Path, b: Path | None = None, defenses: Sequence[str] = (), across: Iterable[str] = ()) -> Comparison:
    """Compare two finished runs, or two defenses: of one run, or the first of run `a` with the second of run `b`.

    Cases that differ are refused, but for the terms named in `across`.
    """
    first = _Run.read(a)
    second = first if b is None else _Run.read(b)
    if len(defenses) > 2 or (b is None and len(defenses) < 2):
        audited = listing(d.spec for d in first.summary.defenses)
        raise UserError(f"give two runs, or one run and two defenses: --defense FIRST --defense SECOND; it has {audited}.")
    notes = _check_cases(first, second, set(across))
    paired = _same_victims(first, second)
    ours, theirs = ({d.spec: d for d in run.summary.defenses} for run in (first, second))
    if defenses:
        pairs = [(first.row(defenses[0]), second.row(defenses[-1]))]
    else:
        pairs = [(ours[spec], theirs[spec]) for spec in ours if spec in theirs]
        for run, mine, other in ((first, ours, theirs), (second, theirs, ours)):
            if alone := [spec for spec in mine if spec not in other]:
                notes.append(f"Only in {run.path}: {listing(alone)}.")
    changed = [_defense(x, y, first.attacks[x.spec], second.attacks[y.spec], paired) for x, y in pairs]
    victims = (first.summary.case.victims, second.summary.case.victims)
    scopes = (first.summary.scope, second.summary.scope)
    return Comparison(first.path, second.path, scopes, paired, victims, changed, notes)


# -- may they be compared? -------------------------------------------------------------------------------------------


def _check_cases(a: _Run, b: _Run, across: set[str]) -> list[str]:
    """Notes on what differs by permission; terms that differ without it are refused by name."""
    ours, theirs = a.terms, b.terms
    differs = {n: f"{_short(ours.get(n))} and {_short(theirs.get(n))}" for n in {**ours, **theirs}}
    differs = {n: text for n, text in differs.items() if ours.get(n) != theirs.get(n)}
    # Another seed draws another split and other weights, and another name has other content of course.
    follows: dict[str, tuple[str, ...]] = dict.fromkeys(("input_shape", "num_classes", "class_names"), ("data",))
    follows |= dict.fromkeys(("data's content", "mean", "std"), ("data", "seed")) | {"model's content": ("model", "seed")}
    differs = {n: text for n, text in differs.items() if not any(cause in differs for cause in follows.get(n, ()))}
    if unknown := [n for n in across if n not in {*ours, *theirs, *follows}]:
        raise UserError(f"--across {unknown[0]}: no term of these cases; they have {', '.join(ours)}.")
    if wrong := [n for n in differs if n not in across and n not in SAMPLING]:
        listed = ", ".join(f"{n} ({differs[n]})" for n in wrong)
        allow = f"to compare all the same: {' '.join(f'--across {shlex.quote(n)}' for n in wrong)}"
        raise UserError(f"the runs are different cases: {listed}. A change could come from that; {allow}.")
    notes = [f"The runs differ in {n}: {text}." for n, text in differs.items()]
    for name, version in a.versions.items():
        if version != b.versions.get(name, version):
            notes.append(f"The runs differ in their {name}: {version} and {b.versions[name]}.")
    return notes


def _short(value: object) -> str:
    return plain(shorten(str(value), 40))


def _same_victims(a: _Run, b: _Run) -> bool:
    """Same data and draw, and the labels agree. With more victims in one run, the first of them are the same."""
    drawn_by = ("data", "data's content", "seed", "batch_size", "aggregate", "skip_victims")
    if any(a.terms.get(n) != b.terms.get(n) for n in drawn_by):
        return False
    ours, theirs = a.labels, b.labels
    both = ours.keys() & theirs.keys()
    return bool(both) and all(ours[place] == theirs[place] for place in both)


# -- one defense -----------------------------------------------------------------------------------------------------


def _defense(a: DefenseRow, b: DefenseRow, ours: Attacks, theirs: Attacks, paired: bool) -> DefenseChange:
    rows = [AttackChange(WORST, list(_changes(_worst(ours), _worst(theirs), paired)))] if ours and theirs else []
    rows += [AttackChange(name, list(_changes(ours[name], theirs[name], paired))) for name in ours if name in theirs]
    if beside := list(_beside(a, b, paired)):
        rows.append(AttackChange(BESIDE, beside))
    notes = []
    for which, mine, other in (("first", ours, theirs), ("second", theirs, ours)):
        if alone := [name for name in mine if name not in other]:
            notes.append(f"Only on the {which} side: {listing(alone)}. More attacks alone make the worst of all worse.")
    if a.line_up and b.line_up and a.line_up.m != b.line_up.m:
        notes.append(f"The line-ups have {a.line_up.m} and {b.line_up.m} candidates: with fewer, guessing succeeds more often.")
    return DefenseChange((a.spec, b.spec), (a.verdict, b.verdict), rows, notes)


def _beside(a: DefenseRow, b: DefenseRow, paired: bool) -> Iterator[Change]:
    """What is measured of a defense without an attack, where a side has it: line-up, its proven limit, and the cost."""
    if a.line_up and b.line_up:
        length = min(len(a.line_up.ranks), len(b.line_up.ranks)) if paired else None
        before, after = (dict(enumerate(float(r == 1) for r in row.ranks[:length])) for row in (a.line_up, b.line_up))
        low, high = interval(before, after, paired, shares=True)
        yield Change(LINE_UP, _mean(before), _mean(after), low, high, min(len(before), len(after)))
    limits = [row.line_up.certificate.upper if row.line_up and row.line_up.certificate else None for row in (a, b)]
    for metric, (first, second) in {LIMIT: limits, COSINE: [a.cosine, b.cosine], ACCURACY: [a.accuracy, b.accuracy]}.items():
        if first is not None or second is not None:
            yield Change(metric, first, second)


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
        ours, theirs = _by_victim(before), _by_victim(after)
        low, high = interval(ours, theirs, paired, shares=metric == "identified" and single)
        yield Change(metric, _mean(ours), _mean(theirs), low, high, min(len(ours), len(theirs)))


def _mean(values: Mapping[int, float]) -> float | None:
    return float(np.mean([*values.values()])) if values else None


def _by_victim(values: Mapping[ImagePlace, float]) -> dict[int, float]:
    groups: dict[int, list[float]] = {}
    for (victim, _), value in values.items():
        groups.setdefault(victim, []).append(value)
    return {victim: float(np.mean(group)) for victim, group in groups.items()}
