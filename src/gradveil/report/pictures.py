"""Pictures for the page: one strip of tiles per cell, each strip a PNG that is embedded once.

A page must open at once even for fourteen defenses under twelve attacks, so all the strips together stay within a
budget. When they do not fit, fewer victims are shown (the worst of each defense first) and the page says how many.

A blurred picture is its mean colour, rounded to a few levels: two bits per channel are all that the page holds of it.
Anything finer lets a reader who has candidates tell which of them it is; SECURITY.md has the measured rates.
"""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gradveil.core.errors import UserError
from gradveil.core.results import ImagePlace, ImageScores
from gradveil.storage.run_folder import RunFolder, StoredCell
from gradveil.summary import AttackRow, DefenseRow, Summary

BUDGET = 11_000_000  # bytes of all strips as base64; leaves room for the tables of a large audit below 15 MB
SIDES = (128, 96, 64)  # longest side of a tile in pixels: larger images are scaled down for the page alone
MOST = 64  # tiles in a strip: browsers refuse very wide pictures
ENOUGH = 8  # tiles that should be there before tiles are made smaller
LEVELS = 4  # of each channel of a blurred picture


@dataclass(frozen=True)
class Strip:
    """One embedded picture and which of its tiles hold something."""

    sprite: int
    present: tuple[bool, ...]


@dataclass
class Pictures:
    """All strips of a page. Every strip has one tile for each of `places`, in that order."""

    places: list[ImagePlace] = field(default_factory=list)
    first: set[ImagePlace] = field(default_factory=set)  # the tiles to show before the reader asks for more
    total: int = 0  # private images of the run, shown or not
    size: tuple[int, int] = (1, 1)  # of a tile: width, height
    scaled_from: tuple[int, int] | None = None
    sprites: list[str] = field(default_factory=list)  # PNG data URIs
    originals: dict[str, Strip] = field(default_factory=dict)  # by defense
    fed: dict[str, Strip] = field(default_factory=dict)  # by defense, only where it differs from the original
    rebuilt: dict[str, Strip] = field(default_factory=dict)  # by cell
    notes: list[str] = field(default_factory=list)


def attacked(run: RunFolder, defense: DefenseRow) -> list[tuple[AttackRow, StoredCell]]:
    """The attacks on a defense with their cells, strongest first. A folder may hold cells of other audits too."""
    return [(row, run.cells[row.cell]) for row in defense.ranked if row.cell in run.cells]


def worst_of(run: RunFolder, defense: DefenseRow) -> tuple[StoredCell, ImageScores] | None:
    """The cell and the image where most was given away: identified first, then the most alike."""
    pairs = [(cell, image) for row, cell in attacked(run, defense) if row.ok for image in cell.victims]
    return max(pairs, key=lambda pair: pair[1].strength, default=None)


def collect(run: RunFolder, summary: Summary, *, blurred: bool) -> Pictures:
    """Encode what is worth showing and fits."""
    cells = {d.spec: [cell for _, cell in attacked(run, d)] for d in summary.defenses}
    worst = [pair for d in summary.defenses if (pair := worst_of(run, d))]
    every = {image.place for group in cells.values() for cell in group for image in cell.victims}
    # The worst victims lead, so that cutting the list never hides a worst case.
    ranked = list(dict.fromkeys([image.place for _, image in worst] + sorted(every)))
    if not ranked:
        return Pictures()
    notes: list[str] = []
    if blurred:
        pictures = _encode(run, cells, sorted(ranked[:MOST]), None, notes.append)
    else:
        count, side = _fit(run, cells, ranked)
        pictures = _encode(run, cells, sorted(ranked[:count]), side, notes.append)
    pictures.first, pictures.total, pictures.notes = set(ranked[:ENOUGH]), len(every), notes
    return pictures


def _fit(run: RunFolder, cells: Mapping[str, Sequence[StoredCell]], ranked: list[ImagePlace]) -> tuple[int, int]:
    """How many tiles a strip may have, and how large, judged by a sample of them."""
    sample, wanted = ranked[:4], min(len(ranked), MOST)
    for side in SIDES:
        sampled = _encode(run, cells, sorted(sample), side, lambda _: None)
        tile_bytes = sum(map(len, sampled.sprites)) / len(sample)
        count = max(1, min(wanted, int(BUDGET / tile_bytes) if tile_bytes else wanted))
        if count >= min(wanted, ENOUGH) or not sampled.scaled_from:
            break
    return count, side


def _encode(
    run: RunFolder,
    cells: Mapping[str, Sequence[StoredCell]],
    places: list[ImagePlace],
    side: int | None,
    note: Callable[[str], None],
) -> Pictures:
    """All strips with tiles of at most `side` pixels; of one pixel each, blurred, where it is None."""
    pictures = Pictures(places=places)
    sprites: dict[bytes, int] = {}  # by the content of a strip before it is blurred

    def strip(cell: StoredCell, name: str) -> Strip | None:
        try:
            images = run.images(cell, name, places)
        except UserError as error:  # one broken file must not cost the page; the page says so
            note(str(error))
            return None
        shape = next((image.shape for image in images if image is not None), None)
        if shape is None:
            return None
        height, width = shape[-2:]
        scale = min(1.0, (side or SIDES[0]) / max(height, width))
        pictures.size = max(1, round(width * scale)), max(1, round(height * scale))
        pictures.scaled_from = (width, height) if side and scale < 1 else None
        tiles = [_tile(image, pictures.size) for image in images]
        content = b"".join(tile.tobytes() for tile in tiles)
        if content not in sprites:
            sprites[content] = len(sprites)
            pictures.sprites.append(_png(tiles if side else [_mean_colour(tile) for tile in tiles]))
        return Strip(sprites[content], tuple(image is not None for image in images))

    for defense, group in cells.items():
        for cell in group:
            if rebuilt := strip(cell, "reconstruction"):
                pictures.rebuilt[cell.key] = rebuilt
                # The originals are those of the case and what is fed is the defense's: the first cell tells both.
                if defense not in pictures.originals and (original := strip(cell, "original")):
                    pictures.originals[defense] = original
                    fed = strip(cell, "fed")
                    if fed and fed.sprite != original.sprite:
                        pictures.fed[defense] = fed
    return pictures


def _tile(image: NDArray[np.floating] | None, size: tuple[int, int]) -> NDArray[np.uint8]:
    """H × W × 3 or H × W pixels of a tile; grey where there is nothing."""
    if image is None:
        return np.full(size[::-1], 128, np.uint8)
    levels = np.nan_to_num(image.astype(np.float64), nan=0.5, posinf=1.0, neginf=0.0).clip(0, 1)
    # Two channels, or ten, have no colours of their own: their mean is shown.
    pixels = levels.transpose(1, 2, 0) if len(levels) == 3 else levels.mean(0)
    tile = Image.fromarray((pixels * 255).round().astype(np.uint8))
    if tile.size != size:
        tile = tile.resize(size, Image.Resampling.LANCZOS)
    return np.asarray(tile)


def _mean_colour(tile: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A tile as one pixel with its mean colour in few levels."""
    step = 255 / (LEVELS - 1)
    levels = np.round(tile.mean((0, 1), keepdims=True) / step)
    return np.asarray(np.round(levels * step), dtype=np.uint8)


def _png(tiles: list[NDArray[np.uint8]]) -> str:
    colour = any(tile.ndim == 3 for tile in tiles)
    same = [np.repeat(t[..., None], 3, axis=2) if colour and t.ndim == 2 else t for t in tiles]
    buffer = io.BytesIO()
    Image.fromarray(np.concatenate(same, axis=1)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
