"""Two runs side by side: what changed for every defense and attack, and whether that is more than chance.

Where both runs attacked the same images the difference of every victim with itself is taken, which cancels how hard a
victim is; else the two groups are compared. A victim is a batch: its images share an update and count as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm, t

from gradveil.core.errors import UserError
from gradveil.core.text import listing, plain, plural, shorten
from gradveil.report import words
from gradveil.report.folder import RunFolder
from gradveil.report.page import page
from gradveil.report.pictures import Place, place_of
from gradveil.report.view import DefenseView, SummaryView, number, whole
from gradveil.storage.files import write_text

WORST = "worst of all"  # the row of a defense that takes the strongest attack on every image
SAMPLING = ("seed", "victims")  # terms that draw what is attacked: the images, and the untrained weights
CLEAR = 0.05  # one minus the level of the intervals
METRICS = {"psnr": "PSNR, dB", "ssim": "SSIM", "identified": "identified"}

Images = Mapping[Place, Mapping[str, Any]]
Attacks = Mapping[str, Images]


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
            return "one training each, no interval"
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
        shares = self.metric in ("identified", "accuracy")
        places = 1 if self.metric == "psnr" else 2
        values = (self.before, self.after)
        before, after = (words.percent(v, 1) if shares else words.digits(v, places) for v in values)
        if self.difference is None:
            return before, after, words.NOTHING
        scale = 100 if shares else 1
        text = _signed(scale * self.difference, 1 if shares else places)
        if self.low is not None and self.high is not None and self.low != self.high:
            text += f" ({' to '.join(_signed(scale * v, 1 if shares else places) for v in (self.low, self.high))})"
        return before, after, text


@dataclass(frozen=True)
class Row:
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
    rows: list[Row]
    accuracy: Change
    notes: list[str] = field(default_factory=list)

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
        moved = [d for d in self.defenses if d.before != d.after]
        clear = [d.spec for d in self.defenses if d.rows and d.rows[0].clear]
        if not self.defenses:
            return "The runs have no defense in common."
        first = f"The verdict changed for {listing(d.spec for d in moved)}" if moved else "No verdict changed"
        if clear:
            return f"{first}; what the worst attack got changed clearly under {listing(clear)}."
        return f"{first}, and what the worst attack got changed nowhere clearly."


def compare(a: str | Path, b: str | Path, across: Iterable[str] = ()) -> Comparison:
    """Compare two finished runs. Cases that differ are refused, but for the terms named in `across`."""
    runs = [RunFolder.read(Path(p)) for p in (a, b)]
    views = [SummaryView.read(run.summary) for run in runs]
    notes = _check_cases(runs, views, set(across))
    named = [{d.spec: d for d in view.defenses} for view in views]
    attacks = [{spec: _attacks(run, d) for spec, d in found.items()} for run, found in zip(runs, named, strict=True)]
    shared = [spec for spec in named[0] if spec in named[1]]
    paired = _same_victims(runs, views, [_labels(found.values()) for found in attacks])
    for path, mine, other in ((a, named[0], named[1]), (b, named[1], named[0])):
        alone = [spec for spec in mine if spec not in other]
        if alone:
            notes.append(f"Only in {path}: {listing(alone)}.")
    changed = [_defense(named[0][spec], named[1][spec], attacks[0][spec], attacks[1][spec], paired) for spec in shared]
    victims = (whole(views[0].case.get("victims")) or 0, whole(views[1].case.get("victims")) or 0)
    scopes = (words.scope(views[0]), words.scope(views[1]))
    return Comparison(Path(a), Path(b), scopes, paired, victims, changed, notes)


def write_comparison(comparison: Comparison, file: str | Path) -> Path:
    """One self-contained page without a script."""
    file = Path(file)
    if file.is_dir():
        raise UserError(f"{file} is a folder; --out names the page's file, such as compare.html.")
    write_text(file, page("compare.html.j2", found=comparison, names=METRICS))
    return file


# -- may they be compared? -------------------------------------------------------------------------------------------


def _check_cases(runs: Sequence[RunFolder], views: Sequence[SummaryView], across: set[str]) -> list[str]:
    """Notes on what differs by permission; terms that differ without it are refused by name."""
    cases = [dict(view.case) for view in views]
    for case, run in zip(cases, runs, strict=True):
        for name in ("data_sha256", "model_sha256"):  # one name may stand for other files or weights by now
            if name in run.environment:
                case[name.removesuffix("_sha256") + "'s content"] = run.environment[name]
    terms = [n for n in dict.fromkeys([*cases[0], *cases[1]]) if cases[0].get(n) != cases[1].get(n)]
    # Another seed draws another split and other weights, and another name has other content of course.
    follows = {"data's content": ("data", "seed"), "model's content": ("model", "seed")}
    terms = [n for n in terms if not any(cause in terms for cause in follows.get(n, ()))]
    if "data" in terms:
        terms = [n for n in terms if n not in ("input_shape", "num_classes", "class_names")]
    unknown = [n for n in across if not any(n in (*case, *follows) for case in cases)]
    if unknown:
        raise UserError(f"--across {unknown[0]}: no term of these cases; they have {', '.join(cases[0])}.")
    wrong = [n for n in terms if n not in across and n not in SAMPLING]
    if wrong:
        listed = ", ".join(f"{n} ({_short(cases[0].get(n))} and {_short(cases[1].get(n))})" for n in wrong)
        allow = " ".join(f"--across '{n}'" if " " in n else f"--across {n}" for n in wrong)
        raise UserError(
            f"the runs are different cases: {listed}. A change could come from that; to compare all the same: {allow}."
        )
    notes = [f"The runs differ in {n}: {_short(cases[0].get(n))} and {_short(cases[1].get(n))}." for n in terms]
    for name, values in (("version", [v.version for v in views]), ("attack suite", [v.suite for v in views])):
        if values[0] != values[1]:
            notes.append(f"The runs differ in their {name}: {values[0]} and {values[1]}.")
    return notes


def _short(value: Any) -> str:
    return plain(shorten(str(value), 40))


def _same_victims(
    runs: Sequence[RunFolder], views: Sequence[SummaryView], labels: Sequence[Mapping[Place, Any]]
) -> bool:
    """Same data and draw, and the labels agree. With more victims in one run, the first of them are the same."""
    drawn = [tuple(view.case.get(n) for n in ("data", "seed", "batch_size")) for view in views]
    content = [run.environment.get("data_sha256") for run in runs]
    if drawn[0] != drawn[1] or content[0] != content[1]:
        return False
    both = labels[0].keys() & labels[1].keys()
    return bool(both) and all(labels[0][place] == labels[1][place] for place in both)


def _labels(defenses: Iterable[Attacks]) -> dict[Place, Any]:
    return {
        place: image.get("label")
        for attacks in defenses
        for images in attacks.values()
        for place, image in images.items()
    }


# -- one defense -----------------------------------------------------------------------------------------------------


def _attacks(run: RunFolder, defense: DefenseView) -> dict[str, Images]:
    """What every attack that ran got of every image."""
    ran = [(row.attack, cell) for row, cell in run.attacked(defense) if row.ok]
    return {name: {place_of(v): v for v in cell.get("victims") or []} for name, cell in ran}


def _defense(a: DefenseView, b: DefenseView, ours: Attacks, theirs: Attacks, paired: bool) -> DefenseChange:
    rows = [Row(WORST, list(_changes(_worst(ours), _worst(theirs), paired)))] if ours and theirs else []
    rows += [Row(name, list(_changes(ours[name], theirs[name], paired))) for name in ours if name in theirs]
    notes = []
    for which, mine, other in (("first", ours, theirs), ("second", theirs, ours)):
        alone = [name for name in mine if name not in other]
        if alone:
            notes.append(f"Only in the {which} run: {listing(alone)}. More attacks alone make the worst of all worse.")
    return DefenseChange(a.spec, a.verdict, b.verdict, rows, Change("accuracy", a.accuracy, b.accuracy), notes)


def _worst(attacks: Attacks) -> dict[Place, Mapping[str, Any]]:
    """For every image what the attack got that got most of it, by the verdict's own order."""

    def got(image: Mapping[str, Any]) -> tuple[bool, float, float]:
        ssim, psnr = (number(image.get(n)) for n in ("ssim", "psnr"))
        return bool(image.get("identified")), -math.inf if ssim is None else ssim, -math.inf if psnr is None else psnr

    places = dict.fromkeys(place for images in attacks.values() for place in images)
    return {p: max((images[p] for images in attacks.values() if p in images), key=got) for p in places}


def _changes(a: Images, b: Images, paired: bool) -> Iterator[Change]:
    single = all(image == 0 for _, image in (*a, *b))  # one image a victim
    for metric in METRICS:
        before, after = _values(a, metric), _values(b, metric)
        if paired:
            both = [place for place in before if place in after]
            before, after = ({p: found[p] for p in both} for found in (before, after))
        low, high = _interval(before, after, paired, metric == "identified" and single)
        groups = [_by_victim(v) for v in (before, after)]
        means = [float(np.mean([*group.values()])) if group else None for group in groups]
        yield Change(metric, means[0], means[1], low, high, min(len(group) for group in groups))


def _values(images: Images, metric: str) -> dict[Place, float]:
    """What was measured and is finite; an image that could not be identified at all has no say."""
    found = {}
    for place, image in images.items():
        given = image.get(metric)
        value = float(given) if isinstance(given, bool) else number(given)
        if value is not None and math.isfinite(value):
            found[place] = value
    return found


def _by_victim(values: Mapping[Place, float]) -> dict[int, float]:
    groups: dict[int, list[float]] = {}
    for (victim, _), value in values.items():
        groups.setdefault(victim, []).append(value)
    return {victim: float(np.mean(group)) for victim, group in groups.items()}


# -- intervals -------------------------------------------------------------------------------------------------------


def _interval(
    before: Mapping[Place, float], after: Mapping[Place, float], paired: bool, shares: bool
) -> tuple[float | None, float | None]:
    a, b = _by_victim(before), _by_victim(after)
    if min(len(a), len(b)) < 2:
        return None, None
    if paired:
        differences = np.array([b[v] - a[v] for v in a])
        if not differences.any():
            return 0.0, 0.0
        return paired_shares(differences) if shares else paired_means(differences)
    first, second = np.array([*a.values()]), np.array([*b.values()])
    return two_shares(first, second) if shares else two_means(first, second)


def paired_means(differences: np.ndarray) -> tuple[float, float]:
    """Student's interval of the mean difference."""
    n = len(differences)
    half = t.ppf(1 - CLEAR / 2, n - 1) * differences.std(ddof=1) / math.sqrt(n)
    return float(differences.mean() - half), float(differences.mean() + half)


def two_means(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Welch's interval: the groups may spread differently."""
    parts = [x.var(ddof=1) / len(x) for x in (a, b)]
    if not sum(parts):
        return float(b.mean() - a.mean()), float(b.mean() - a.mean())
    freedom = sum(parts) ** 2 / sum(p**2 / (len(x) - 1) for p, x in zip(parts, (a, b), strict=True))
    half = t.ppf(1 - CLEAR / 2, freedom) * math.sqrt(sum(parts))
    return float(b.mean() - a.mean() - half), float(b.mean() - a.mean() + half)


def paired_shares(differences: np.ndarray) -> tuple[float, float]:
    """Bonett and Price's interval: the shares that changed either way, each with one more added. Holds for few too."""
    n = len(differences) + 2
    up, down = ((differences > 0).sum() + 1) / n, ((differences < 0).sum() + 1) / n
    half = norm.ppf(1 - CLEAR / 2) * math.sqrt((up + down - (up - down) ** 2) / n)
    return max(-1.0, float(up - down - half)), min(1.0, float(up - down + half))


def two_shares(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Agresti and Caffo's interval: one hit and one miss added to each group. Holds for few too."""
    n, m = len(a) + 2, len(b) + 2
    p, q = (a.sum() + 1) / n, (b.sum() + 1) / m
    half = norm.ppf(1 - CLEAR / 2) * math.sqrt(p * (1 - p) / n + q * (1 - q) / m)
    return max(-1.0, float(q - p - half)), min(1.0, float(q - p + half))


def _signed(value: float, places: int) -> str:
    text = words.digits(value, places)
    return f"+{text}" if value > 0 and any(c in text for c in "123456789∞") else text
