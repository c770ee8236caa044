"""The page an audit ends with: one self-contained file, above for who decides, below for who builds.

All text passes through an escaping template, no data stands inside a script, and the page's own policy lets nothing run
but the one script that was written here, nor anything be fetched.
"""

import base64
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from markupsafe import Markup

from gradveil.auditing.export import requirement, usage
from gradveil.auditing.spec import PictureMode, picture_default
from gradveil.core.errors import UserError
from gradveil.core.results import ImagePlace, ImageScores, Status
from gradveil.core.text import listing
from gradveil.protection.audited import FILE
from gradveil.report import answers, chart, words
from gradveil.report.about import About
from gradveil.report.clauses import DOCUMENTS, documents_text
from gradveil.report.evidence import PAGE, evidence_hash
from gradveil.report.page import page
from gradveil.report.pictures import Pictures, Strip, attacked, collect, worst_of
from gradveil.storage.files import write_text
from gradveil.storage.reading import parse_yaml
from gradveil.storage.run_folder import RunFolder, StoredCell
from gradveil.summary import AttackRow, CaseFacts, DefenseRow, Summary

# Columns of the table whose names are explained under another word.
COLUMN_TERMS = {"identified": "picked out", "PSNR, dB": "PSNR", "knowledge": "level of knowledge"}
PLACES = {"who": "The names in the head.", "evidence": "How to check it?"}  # parts of the file that the template writes
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
    defense: DefenseRow
    heads: list[tuple[str, str, bool]]  # victim, its label, and whether the column waits for "show all"
    rows: list[GalleryRow]

    @property
    def hides(self) -> bool:
        return any(more for *_, more in self.heads) or any(row.more for row in self.rows)

    @property
    def attacks(self) -> int:
        return sum(bool(row.note) for row in self.rows)


@dataclass(frozen=True)
class Reason:
    """Why attacks gave no numbers."""

    status: Status
    text: str
    attacks: list[str]  # each with the defenses


def write_report(run_dir: Path, pictures: str | None = None) -> Path:
    """Write `report.html` into a run's folder and return its path.

    `pictures`: none, blurred or shown; None: as the audit's own page had it.
    """
    if pictures is not None and pictures not in get_args(PictureMode):
        raise UserError(f"pictures '{pictures}': choose one of {', '.join(get_args(PictureMode))}.")
    run = RunFolder(Path(run_dir))
    file = run.path / PAGE
    write_text(file, render(run, pictures or picture_mode(run, Summary.read(run.path))))
    return file


def picture_mode(run: RunFolder, summary: Summary) -> PictureMode:
    """What the audit's own page shows: what was asked for, or what is usual for such data."""
    if not run.settings:
        return picture_default(summary.case.data)
    try:
        stored = parse_yaml(run.settings, run.path / "audit.yaml")
    except UserError:  # damaged, so nobody knows what was asked for
        stored = None
    if not isinstance(stored, dict):
        return "none"
    return next((mode for mode in get_args(PictureMode) if mode == stored.get("pictures")), picture_default(summary.case.data))


def render(run: RunFolder, pictures: str = "blurred") -> str:
    """The page as text. It depends on the folder alone, so that the same run gives the same page."""
    summary = Summary.read(run.path)
    shown = collect(run, summary, blurred=pictures != "shown") if pictures != "none" else Pictures()
    script = page("script.js.j2")
    every = [(d, r) for d in summary.defenses for r in d.attacks]
    rows = [(d, r) for d, r in every if r.status != "not applicable"]
    environment, about = run.environment, About.of_run(run.path)
    first, file = answers.first_answers(summary), answers.file_answers(summary)
    warning = answers.warning(summary)
    verdicts = [(d, worst_case(run, summary.case, d, shown)) for d in summary.defenses]
    pictured = [(d, w) for d, w in verdicts if pictures == "shown" and w and w.original][: answers.MOST_PICTURED]
    return page(
        "report.html.j2",
        summary=summary,
        about=about,
        title=answers.title(about),
        date=answers.date_text(environment),
        first_answers=first,
        file_answers=file,
        pictured=pictured,
        lead=answers.lead(summary),
        warning=warning,
        type_size=answers.type_size(about, first, file, more=len(warning or ""), pictured=bool(pictured)),
        documents=documents_text(),
        clause_groups=DOCUMENTS,
        questions={a.key: a.question for a in (*first, *file)} | PLACES,
        evidence=evidence_hash(run),
        mode=pictures,
        pictures=shown,
        script=Markup(script),  # our own file, without a word of the run in it
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        verdicts=verdicts,
        protection_file=FILE,
        uses=usage(summary.recommended, summary.case) if summary.recommended else [],
        use_requirement=requirement(summary.case),
        scatter=chart.privacy_utility(summary),
        control_rows=[r for r in summary.control.ranked if r.status != "not applicable"] if summary.control else [],
        rows=rows,
        inapplicable=reasons(summary, ["not applicable"]),
        unfinished=reasons(summary, ["failed", "not run"]),
        column_terms=COLUMN_TERMS,
        options={
            "defense": list(dict.fromkeys(d.spec for d, _ in rows)),
            "attack": list(dict.fromkeys(r.spec for _, r in rows)),
            "knowledge": list(dict.fromkeys(r.knowledge for _, r in rows)),
            "against": list(dict.fromkeys(r.against for _, r in rows)),
        },
        has_updates=any(r.updates != 1 for _, r in rows),
        has_lpips=any(r.lpips for _, r in rows),
        other_metrics=sorted({name for _, r in rows for name in r.others}),
        galleries=list(galleries(run, summary, shown)),
        accuracy=chart.accuracy_curves(run.cells.values(), [d.spec for d in summary.defenses]),
        objectives=list(objectives(run, summary)),
        settings=run.settings,
        hashes=environment and (environment.data_sha256, environment.model_sha256),
        environment=list(flatten(environment.model_dump())) if environment else [],
        case=list(flatten(summary.case.model_dump())),
    )


def reasons(summary: Summary, statuses: Sequence[Status]) -> list[Reason]:
    """Why attacks gave no numbers, each reason once with all that it holds for."""
    where = defaultdict[tuple[Status, str], dict[str, list[str]]](dict)
    for defense in summary.defenses:
        for row in defense.ranked:
            if row.status in statuses:
                attacks = where[row.status, row.error or "no reason was stored"]
                attacks.setdefault(row.spec, []).append(defense.spec)
    every = len(summary.defenses)

    def under(specs: list[str]) -> str:
        return "every defense" if len(specs) == every > 1 else listing(specs)

    return [
        Reason(status, text, [f"{attack} under {under(specs)}" for attack, specs in attacks.items()])
        for (status, text), attacks in where.items()
    ]


def worst_case(run: RunFolder, case: CaseFacts, defense: DefenseRow, shown: Pictures) -> WorstCase | None:
    """The one private image of which most was rebuilt, in words and, if there are any, in pictures."""
    if (worst := worst_of(run, defense)) is None:
        return None
    cell, image = worst
    judged = {(v.victim, v.image): v.identified for v in defense.worst.by_victim} if defense.worst else {}
    identified = bool(judged.get(image.place, image.identified))  # by all attacks together, as the sentence above says
    scores = f"PSNR {words.digits(image.psnr, 1)} dB, SSIM {words.digits(image.ssim)}, {'not ' * (not identified)}identified"
    text = f"Worst case: {who(image.place, case.batch_size * case.aggregate > 1)}, rebuilt by {cell.attack}: {scores}."
    original, rebuilt = shown.originals.get(defense.spec), shown.rebuilt.get(cell.key)
    if original is None or rebuilt is None or image.place not in shown.places:
        return WorstCase(text, None, None)
    column = shown.places.index(image.place)
    private = ", ".join(filter(None, ("Private image", label_of(image, case))))
    again = f"The same image as rebuilt by {cell.attack}"
    tile = Tile(rebuilt.sprite, column, again, "rebuilt", identified)
    return WorstCase(text, Tile(original.sprite, column, private, "original"), tile)


def galleries(run: RunFolder, summary: Summary, shown: Pictures) -> Iterator[Gallery]:
    """For every defense the originals, what was fed where that differs, and each attack's reconstructions."""
    many = summary.case.batch_size * summary.case.aggregate > 1
    for defense in summary.defenses:
        original = shown.originals.get(defense.spec)
        drawn = [(r, c, s) for r, c in attacked(run, defense) if (s := shown.rebuilt.get(c.key))]
        if original is None or not drawn:
            continue
        labels = {image.place: label_of(image, summary.case) for image in drawn[0][1].victims}
        heads = [(who(p, many), labels.get(p, ""), p not in shown.first) for p in shown.places]
        rows = [GalleryRow("original", "", _tiles(original, "Private image", shown, many))]
        if fed := shown.fed.get(defense.spec):
            rows.append(GalleryRow("fed to the network", "", _tiles(fed, "Image as fed", shown, many)))
        rows += [_gallery_row(*attack, shown, many=many, more=rank >= STRONGEST) for rank, attack in enumerate(drawn)]
        yield Gallery(defense, heads, rows)


def _gallery_row(row: AttackRow, cell: StoredCell, strip: Strip, shown: Pictures, *, many: bool, more: bool) -> GalleryRow:
    tiles: list[Tile | None] = [None] * len(shown.places)
    for image in cell.victims:
        i = shown.places.index(image.place) if image.place in shown.places else -1
        if i >= 0 and strip.present[i]:
            alt = f"{who(image.place, many)} rebuilt by {row.spec}"
            caption = f"{words.digits(image.psnr, 1)} dB · {words.digits(image.ssim)}"
            tiles[i] = Tile(strip.sprite, i, alt, caption, bool(image.identified))
    identified, psnr = words.rate_text(row.identified), words.mean(row.psnr, 1)
    note = f"identified {identified}, PSNR {psnr} dB" if row.ok else row.status
    return GalleryRow(row.spec, note, tiles, more)


def _tiles(strip: Strip, alt: str, shown: Pictures, many: bool) -> list[Tile | None]:
    return [Tile(strip.sprite, i, f"{alt}, {who(p, many)}") if strip.present[i] else None for i, p in enumerate(shown.places)]


def who(place: ImagePlace, many: bool) -> str:
    return f"victim {place[0]}, image {place[1]}" if many else f"victim {place[0]}"


def label_of(image: ImageScores, case: CaseFacts) -> str:
    if image.label is None:
        return ""
    named = 0 <= image.label < len(case.class_names)
    return f"class {case.class_names[image.label] if named else image.label}"


def objectives(run: RunFolder, summary: Summary) -> Iterator[tuple[DefenseRow, list[tuple[str, chart.Spark]]]]:
    """The attacks' own objectives, one small curve each, by defense."""
    for defense in summary.defenses:
        cells = attacked(run, defense)
        drawn = [(row.spec, s) for row, cell in cells if (s := chart.objective_curve(cell.history))]
        if drawn:
            yield defense, drawn


def flatten(settings: Mapping[str, object], before: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as lines: `packages.torch`, its value."""
    for key, value in settings.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            more = f" … ({len(value)} in all)" if len(value) > LONG else ""
            yield name, (", ".join(map(str, value[:LONG])) + more or words.NOTHING)
        else:
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
            yield name, words.NOTHING if value is None else text
