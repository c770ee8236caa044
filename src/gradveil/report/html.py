"""The page an audit ends with: one self-contained file, above for who decides, below for who builds.

All text passes through an escaping template, no data stands inside a script, and the page's own policy lets nothing run
but the one script that was written here, nor anything be fetched.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from markupsafe import Markup

from gradveil.core.errors import UserError
from gradveil.report import chart, words
from gradveil.report.folder import RunFolder
from gradveil.report.page import page
from gradveil.report.pictures import Pictures, Place, Strip, collect, place_of, worst_of
from gradveil.report.view import DefenseView, Row, SummaryView, number, texts, whole
from gradveil.storage.files import write_text

PictureMode = Literal["none", "blurred", "shown"]
STRONGEST = 3  # attacks of a defense that the gallery shows before the reader asks for all

LONG = 24  # entries of a list in the settings, such as class names, before it is cut


@dataclass(frozen=True)
class Tile:
    """One picture: a tile of a strip, and its words for those who cannot see it."""

    sprite: int
    column: int
    alt: str
    caption: str = ""
    identified: bool = False


@dataclass(frozen=True)
class WorstCase:
    text: str
    original: Tile | None
    rebuilt: Tile | None


@dataclass(frozen=True)
class GalleryRow:
    name: str
    note: str
    tiles: list[Tile | None]
    more: bool = False


@dataclass(frozen=True)
class Gallery:
    defense: DefenseView
    heads: list[tuple[str, str, bool]]  # victim, its label, and whether the column waits for "show all"
    rows: list[GalleryRow]

    @property
    def hides(self) -> bool:
        return any(more for *_, more in self.heads) or any(row.more for row in self.rows)

    @property
    def attacks(self) -> int:
        return sum(bool(row.note) for row in self.rows)


@dataclass(frozen=True)
class Setting:
    name: str
    value: str


def write_report(run_dir: Path, pictures: PictureMode = "blurred") -> Path:
    """Write `report.html` into a run's folder and return its path."""
    if pictures not in get_args(PictureMode):
        raise UserError(f"pictures '{pictures}': choose one of {', '.join(get_args(PictureMode))}.")
    run = RunFolder.read(Path(run_dir))
    write_text(run.path / "report.html", render(run, pictures))
    return run.path / "report.html"


def render(run: RunFolder, pictures: PictureMode = "blurred") -> str:
    """The page as text. It depends on the folder alone, so that the same run gives the same page."""
    view = SummaryView.read(run.summary)
    shown = collect(run, view) if pictures != "none" else Pictures()
    script = page("script.js.j2")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rows = [(d, r) for d in view.defenses for r in d.rows]
    control = view.control
    return page(
        "report.html.j2",
        view=view,
        mode=pictures,
        pictures=shown,
        script=Markup(script),  # our own file, without a word of the run in it
        script_hash=digest,
        verdicts=[(d, worst_case(run, view, d, shown)) for d in view.defenses],
        choice=words.recommend(view),
        scatter=chart.privacy_utility(view),
        control_rows=sorted(
            (r for r in control.rows if r.against == "original") if control else [],
            key=lambda r: r.strength,
            reverse=True,
        ),
        rows=rows,
        options={
            "defense": list(dict.fromkeys(d.spec for d, _ in rows)),
            "attack": view.attacks(),
            "knowledge": list(dict.fromkeys(r.knowledge for _, r in rows)),
            "against": list(dict.fromkeys(r.against for _, r in rows)),
        },
        has_updates=any(r.updates not in (None, 1) for _, r in rows),
        has_lpips=any(r.lpips.mean is not None for _, r in rows),
        galleries=list(galleries(run, view, shown)),
        accuracy=chart.accuracy_curves(run.of_kind("utility"), view),
        objectives=list(objectives(run, view)),
        settings=run.settings,
        environment=list(flatten(run.environment)),
        case=list(flatten(view.case)),
    )


def class_names(view: SummaryView) -> list[str]:
    return texts(view.case.get("class_names"))


def worst_case(run: RunFolder, view: SummaryView, defense: DefenseView, shown: Pictures) -> WorstCase | None:
    """The one private image of which most was rebuilt, in words and, if there are any, in pictures."""
    found = worst_of(run, defense)
    if found is None:
        return None
    cell, victim = found
    attack, place = str(cell.get("attack", "?")), place_of(victim)
    text = f"Worst case: {who(place, batched(view))}, rebuilt by {attack}: {scores(victim)}."
    original, rebuilt = shown.originals.get(defense.spec), shown.rebuilt.get(str(cell.get("key")))
    if original is None or rebuilt is None or place not in shown.places:
        return WorstCase(text, None, None)
    column = shown.places.index(place)
    label = label_of(victim, class_names(view))
    return WorstCase(
        text,
        Tile(original.sprite, column, f"Private image, {label}" if label else "Private image", "original"),
        Tile(
            rebuilt.sprite, column, f"The same image as rebuilt by {attack}", "rebuilt", bool(victim.get("identified"))
        ),
    )


def galleries(run: RunFolder, view: SummaryView, shown: Pictures) -> Iterator[Gallery]:
    """For every defense the originals, what was fed where that differs, and each attack's reconstructions."""
    many, names = batched(view), class_names(view)
    for defense in view.defenses:
        original = shown.originals.get(defense.spec)
        if original is None:
            continue
        drawn = [(r, c, s) for r, c in run.attacked(defense) if (s := shown.rebuilt.get(str(c.get("key"))))]
        if not drawn:
            continue
        victims = {place_of(v): v for v in drawn[0][1].get("victims") or []}
        heads = [(who(p, many), label_of(victims.get(p, {}), names), p not in shown.first) for p in shown.places]
        rows = [GalleryRow("original", "", _tiles(original, "Private image", shown, many))]
        if defense.spec in shown.fed:
            rows.append(
                GalleryRow("fed to the network", "", _tiles(shown.fed[defense.spec], "Image as fed", shown, many))
            )
        rows += [
            _gallery_row(r, c, s, shown, many=many, more=rank >= STRONGEST) for rank, (r, c, s) in enumerate(drawn)
        ]
        yield Gallery(defense, heads, rows)


def _gallery_row(
    row: Row, cell: Mapping[str, Any], strip: Strip, shown: Pictures, *, many: bool, more: bool
) -> GalleryRow:
    by_place = {place_of(v): v for v in cell.get("victims") or []}
    tiles = [
        Tile(strip.sprite, i, f"{who(p, many)} rebuilt by {row.attack}", short_scores(v), bool(v.get("identified")))
        if strip.present[i]
        else None
        for i, p in enumerate(shown.places)
        for v in [by_place.get(p, {})]
    ]
    note = (
        f"identified {words.rate_text(row.identified)}, PSNR {words.digits(row.psnr.mean, 1)} dB"
        if row.ok
        else row.status
    )
    return GalleryRow(row.attack, note, tiles, more)


def _tiles(strip: Strip, alt: str, shown: Pictures, many: bool) -> list[Tile | None]:
    return [
        Tile(strip.sprite, i, f"{alt}, {who(p, many)}") if strip.present[i] else None
        for i, p in enumerate(shown.places)
    ]


def batched(view: SummaryView) -> bool:
    return (whole(view.case.get("batch_size")) or 1) > 1


def who(place: Place, many: bool) -> str:
    return f"victim {place[0]}, image {place[1]}" if many else f"victim {place[0]}"


def label_of(victim: Mapping[str, Any], names: list[str]) -> str:
    label = victim.get("label")
    if isinstance(label, int) and 0 <= label < len(names):
        return f"class {names[label]}"
    return "" if label is None else f"class {label}"


def scores(victim: Mapping[str, Any]) -> str:
    identified = "identified" if victim.get("identified") else "not identified"
    psnr, ssim = words.digits(number(victim.get("psnr")), 1), words.digits(number(victim.get("ssim")))
    return f"PSNR {psnr} dB, SSIM {ssim}, {identified}"


def short_scores(victim: Mapping[str, Any]) -> str:
    return f"{words.digits(number(victim.get('psnr')), 1)} dB · {words.digits(number(victim.get('ssim')))}"


def objectives(run: RunFolder, view: SummaryView) -> Iterator[tuple[DefenseView, list[tuple[str, chart.Spark]]]]:
    """The attacks' own objectives, a small curve each, by defense."""
    for defense in view.defenses:
        cells = run.attacked(defense)
        drawn = [(row.attack, s) for row, cell in cells if (s := chart.objective_curve(cell.get("history")))]
        if drawn:
            yield defense, drawn


def flatten(given: Mapping[str, Any], before: str = "") -> Iterator[Setting]:
    """Nested settings as lines: `hardware.cpu`, its value."""
    for key, value in given.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            more = f" … ({len(value)} in all)" if len(value) > LONG else ""
            yield Setting(name, ", ".join(map(str, value[:LONG])) + more or words.NOTHING)
        else:
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
            yield Setting(name, words.NOTHING if value is None else text)
