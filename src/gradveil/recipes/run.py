"""A recipe run: only the cells that its table asks for, each stored once for all recipes of an output folder."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from gradveil import __version__, attacks, defenses
from gradveil.auditing import plan as audit_plan
from gradveil.auditing.case import Case, short_hash
from gradveil.auditing.cells import one_thread
from gradveil.auditing.limits import Limits, find_device, share_of_memory
from gradveil.auditing.plan import make_plan
from gradveil.auditing.progress import Display
from gradveil.auditing.run import Stopped, identity_of
from gradveil.auditing.workers import run_cells
from gradveil.core.errors import UserError
from gradveil.core.results import Statistic
from gradveil.recipes import pictures
from gradveil.recipes.charts import chart
from gradveil.recipes.claims import Place, Value
from gradveil.recipes.measures import MEASURES
from gradveil.recipes.recipe import (
    ATTACK_METRICS,
    CONTROL,
    TRAINING_METRICS,
    UPDATE_METRICS,
    Cell,
    Recipe,
    Scale,
    Scaled,
    chosen,
)
from gradveil.storage.files import write_json, write_text
from gradveil.storage.run_folder import RunFolder, StoredCell

Json = dict[str, Any]
Say = Callable[[str], None]
T = TypeVar("T")

# Between seeds, test accuracies of this size of training differ by about two points (docs/results/utility.md).
SEED_SPREAD = 2.0


class Store(RunFolder):
    """A case's folder among those of all recipes: what defenses train once is kept for every case."""

    @property
    def cache(self) -> Path:
        return self.path.parents[1] / "cache"


def run_recipe(
    recipe: Recipe,
    scale: Scale,
    out: Path,
    *,
    workers: int = 0,
    device: str = "cpu",
    display: Callable[[], Display] = Display,
    say: Say = lambda _: None,
) -> Json:
    """The result: every cell of the table, the claims, and what it was measured on. It is also written to `out`."""
    scaled, begun = recipe.at(scale), time.perf_counter()
    limits = Limits(share_of_memory(None, max(workers, 1)), find_device(device))
    found: dict[Cell, Value | str] = {}
    cost = 0.0
    folders: dict[str, tuple[Case, RunFolder]] = {}
    for audit, spec in scaled.specs.items():
        cells = {cell for cell in scaled.wanted() if cell.audit == audit}
        if not cells:
            continue
        say(f"{recipe.name}: {audit}")
        case = Case(spec)
        # Where the data cannot carry an accuracy the audit has no `utility`, and its cells stay empty.
        empty = {cell for cell in cells if cell.figure in TRAINING_METRICS and spec.utility is None}
        found |= dict.fromkeys(empty, "not run")
        with Store(out / "cases" / case.id).opened(identity_of(case)) as folder:
            folders[audit] = case, folder
            cost += _complete(case, folder, cells - empty, workers, display(), limits)
            found |= {cell: _read(case, folder, cell) for cell in cells - empty}
    for name in dict.fromkeys(cell.measure for cell in scaled.wanted() if cell.measure):
        say(f"{recipe.name}: {name}")
        values, seconds = _measured(scaled, name, out, display)
        cost += seconds
        for cell in scaled.wanted():
            if cell.measure == name:
                found[cell] = values.get(cell.value, f"the measure has no {cell.value}")
    result = _result(scaled, found, cost, [case for case, _ in folders.values()])
    file = out / "results" / f"{recipe.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    if scaled.pictures:
        tensors = [folders[p.cell.audit][1].tensors(key_of(folders[p.cell.audit][0], p.cell)) for p in scaled.pictures]
        pictures.write(file.with_suffix(".png"), [t[p.shows] for t, p in zip(tensors, scaled.pictures, strict=True)])
        result["pictures"] = [p.label for p in scaled.pictures]
    if recipe.scatter:
        result["scatter"] = _points(scaled, found)
    if drawn := chart(recipe, result):
        write_text(file.with_suffix(".svg"), drawn)
    write_json(file, result)
    say(f"{recipe.name}: done in {time.perf_counter() - begun:.0f} s")
    return result


def _points(scaled: Scaled, found: dict[Cell, Value | str]) -> dict[str, list[list[float]]]:
    """For every column the single numbers of the two rows of the scatter, where both have them."""
    scatter, points = scaled.recipe.scatter, {}
    assert scatter is not None
    for column in scaled.recipe.columns:
        x, y = (found[scaled.cells[row, column]] for row in (scatter.across, scatter.up))
        if isinstance(x, Value) and isinstance(y, Value) and len(x.each) == len(y.each) > 1:
            points[column] = [[round(number, 6) for number in value.each] for value in (x, y)]
    return points


# -- audits ------------------------------------------------------------------------------------------------------------


def _complete(
    case: Case, folder: RunFolder, cells: Iterable[Cell], workers: int, display: Display, limits: Limits
) -> float:
    """Do what is not stored yet. Returns the seconds that all of these cells took, whenever that was."""
    plan = {cell.key: cell for cell in make_plan(case)}
    keys: dict[str, None] = {}
    for wanted in cells:
        for key in _with_needs(key_of(case, wanted), plan):
            keys[key] = None
    ordered = [cell for key, cell in plan.items() if key in keys]
    left = [cell for cell in ordered if not _stored(folder, cell)]
    display.start(len(ordered), len(ordered) - len(left))
    try:
        run_cells(left, case, folder, display, limits, workers=workers)
    except KeyboardInterrupt:
        done = sum(folder.read(cell.key) is not None for cell in ordered)
        raise Stopped(folder.path, done, len(ordered)) from None
    finally:
        display.stop()
    return sum(folder.outcome(cell.key).seconds or 0.0 for cell in ordered)


def _stored(folder: RunFolder, cell: audit_plan.Cell) -> bool:
    """Whether it is done, and with the images that pictures and normalised distances are made of."""
    stored = folder.read(cell.key)
    return stored is not None and (cell.kind != "attack" or stored.status != "ok" or bool(stored.tensors))


def _with_needs(key: str, plan: dict[str, audit_plan.Cell]) -> Iterable[str]:
    yield key
    for needed in plan[key].needs:
        yield from _with_needs(needed, plan)


def key_of(case: Case, cell: Cell) -> str:
    """The key of the audit's cell that a number of the table comes from.

    An audit has each method once, as it was first written: `precode:k=256` stands for `precode` too.
    """
    kind = "attack" if cell.figure in ATTACK_METRICS else "observe" if cell.figure in UPDATE_METRICS else "utility"
    defense = defenses.parse(cell.defense).spec
    attack = attacks.parse(cell.attack).spec if kind == "attack" else ""
    for planned in make_plan(case):
        same = planned.kind == kind and case.defenses[planned.defense].spec == defense
        if same and (case.attack(planned.attack).spec if planned.attack else "") == attack:
            return planned.key
    by = f" from {attack}" if attack else ""
    raise UserError(f"audit {cell.audit} has no cell for {cell.metric} under {cell.defense}{by}.")


def _read(case: Case, folder: RunFolder, cell: Cell) -> Value | str:
    """A stored number, or in words why there is none."""
    stored = folder.outcome(key_of(case, cell))
    if stored.status != "ok":
        return f"{stored.status}: {stored.error}"
    if cell.figure in TRAINING_METRICS:
        return _training(case, folder, cell, stored)
    if cell.figure == "seconds":
        return Value((stored.seconds or 0.0) / (case.spec.victims * case.spec.updates))
    if cell.figure in UPDATE_METRICS:
        each = [value for change in stored.changes if (value := getattr(change, cell.figure, None)) is not None]
        return Value.of(each) if each else "the model differs, so updates cannot be compared"
    return _attack(case, folder, cell, stored)


def _attack(case: Case, folder: RunFolder, cell: Cell, stored: StoredCell) -> Value | str:
    rows = {row.against: row for row in stored.rows}
    if cell.against == "fed" and "fed" in rows:
        row = rows["fed"]
        if cell.figure == "asr":
            return Value(100 * (row.asr or 0.0))
        statistic: Statistic = getattr(row, cell.figure)
        if cell.statistic == "mean":
            return Value(statistic.mean, statistic.std, row.scored)
        return Value(getattr(statistic, cell.statistic))
    if cell.figure == "mse_normalised":
        tensors, std = folder.tensors(stored.key), case.data.std.view(-1, 1, 1)
        gaps = ((tensors["reconstruction"] - tensors["original"]) / std).square().flatten(0, 1).flatten(1).mean(1)
        return Value.of(gaps.tolist())
    if cell.figure == "asr":
        return Value.of(100.0 * image.recognisable for image in stored.victims)
    if cell.figure == "identified":
        return Value.of(100.0 * bool(image.identified) for image in stored.victims)
    each = [getattr(image, cell.figure) for image in stored.victims]
    if any(value is None for value in each):
        return f"{cell.figure} was not measured"
    every = Value.of(each)
    one = {"min": min(each), "max": max(each), "std": every.std}
    return every if cell.statistic == "mean" else Value(one[cell.statistic])


def _training(case: Case, folder: RunFolder, cell: Cell, stored: StoredCell) -> Value | str:
    curve = stored.history["acc_test" if cell.figure == "pdm" else cell.figure]
    rounds = range(len(curve)) if cell.round is None else [cell.round - 1]
    measured = [value for i in rounds if i < len(curve) and (value := curve[i]) is not None]
    if not measured:
        return "not measured in this round"
    accuracy = measured[-1]
    tested = len(case.data.test) if cell.figure != "acc_sensitive" else case.spec.utility.images  # type: ignore[union-attr]
    spread = math.hypot(100 * math.sqrt(accuracy * (1 - accuracy) / tested), SEED_SPREAD)
    if cell.figure != "pdm":
        return Value(100 * accuracy, spread)
    base = _read(case, folder, Cell(cell.audit, CONTROL, metric="acc_test"))
    if isinstance(base, str) or not base.mean:
        return "no undefended accuracy to compare with"
    return Value(100 * (base.mean - 100 * accuracy) / base.mean, 100 * math.hypot(spread, base.std) / base.mean)


# -- measures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A part of a measure, as displays show it."""

    key: str
    kind: str = "measure"
    defense: str = ""
    attack: str = ""

    def __str__(self) -> str:
        return self.key


class Kept:
    """The bench of a measure: its pieces and the seconds they took are in a file as soon as each is done."""

    def __init__(self, file: Path, cache: Path, display: Callable[[], Display]):
        self._file, self.cache, self._display = file, cache, display
        stored = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self.pieces: Json = stored.get("pieces", {})
        self.seconds: float = stored.get("seconds", 0.0)
        self.total = 1  # until it is known
        self._before: Display | None = None

    def progress(self, what: str, done: int, total: int, /) -> None:
        piece = Piece(what)
        if self._before is None:
            self._before = self._display()
            self._before.start(1, 0)
            self._before.begin(piece)
        self._before.progress(piece, done, total)

    def each(self, pieces: Mapping[str, T], work: Callable[[T], Any], /) -> Json:
        self.stop()
        shown, self.total = self._display(), len(pieces)
        shown.start(self.total, len(self.pieces.keys() & pieces.keys()))
        try:
            for key, item in pieces.items():
                if key not in self.pieces:
                    shown.begin(Piece(key))
                    begun = time.perf_counter()
                    self.pieces[key] = work(item)
                    took = time.perf_counter() - begun
                    self.seconds += took
                    write_json(self._file, {"seconds": self.seconds, "pieces": self.pieces})
                    piece = Piece(key)
                    shown.end(piece, StoredCell(**vars(piece), seconds=took, tensors=None))
        finally:
            shown.stop()
        return {key: self.pieces[key] for key in pieces}

    def stop(self) -> None:
        if self._before is not None:
            self._before.stop()


def _measured(scaled: Scaled, name: str, out: Path, display: Callable[[], Display]) -> tuple[dict[str, Value], float]:
    """What is not a cell of an audit, stored likewise under a hash of all it rests on."""
    given = dict(scaled.measures[name])
    kind = given.pop("kind")
    file = out / "measures" / f"{short_hash([kind, given, __version__])}.json"
    if file.is_file():
        stored = json.loads(file.read_text(encoding="utf-8"))
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        part, begun = file.with_suffix(".part.json"), time.perf_counter()
        kept = Kept(part, out / "cache", display)
        earlier = kept.seconds
        try:
            with one_thread():
                values = MEASURES[kind].take(kept, **given)
        except KeyboardInterrupt:
            raise Stopped(part.parent, len(kept.pieces), kept.total) from None
        finally:
            kept.stop()
        stored = {
            "kind": kind,
            "given": given,
            "seconds": earlier + time.perf_counter() - begun,
            "values": {key: [v.mean, v.std, v.n, list(v.each)] for key, v in values.items()},
        }
        write_json(file, stored)
        part.unlink(missing_ok=True)
    return {key: Value(m, s, n, tuple(each)) for key, (m, s, n, each) in stored["values"].items()}, stored["seconds"]


# -- the result --------------------------------------------------------------------------------------------------------


def _result(scaled: Scaled, found: dict[Cell, Value | str], seconds: float, cases: list[Case]) -> Json:
    recipe = scaled.recipe
    values = {place: found[cell] for place, cell in scaled.cells.items()}
    table: dict[Place, Value] = {place: value for place, value in values.items() if isinstance(value, Value)}
    rows: Json = {}
    for (row, column), value in values.items():
        rate = scaled.cells[row, column].figure in ("asr", "identified")  # its spread says nothing
        rows.setdefault(row, {})[column] = value if isinstance(value, str) else _plain(value, rate)
    return {
        "schema": 1,
        "recipe": recipe.name,
        "scale": scaled.scale,
        "settings": short_hash(settings_of(scaled)),
        "rows": rows,
        "claims": [claim.judge(table, recipe.rows, recipe.columns).plain() for claim in recipe.claims],
        "seconds": round(seconds, 1),
        "environment": _environment(scaled, cases),
    }


def _plain(value: Value, rate: bool) -> list[float]:
    return [round(value.mean, 4), 0.0 if rate else round(value.std, 4), value.n]


def settings_of(scaled: Scaled) -> Json:
    """All that a recipe says of a result, so that a stored one can be told from a stale one."""
    recipe = scaled.recipe
    return {
        "audits": chosen({"common": recipe.common, **recipe.audits}, scaled.scale),
        "measures": scaled.measures,
        "cells": {" | ".join(place): str(cell) for place, cell in scaled.cells.items()},
    }


def _environment(scaled: Scaled, cases: list[Case]) -> Json:
    seeds = {case.spec.seed for case in cases} | {m["seed"] for m in scaled.measures.values() if "seed" in m}
    return {
        "gradveil": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "date": date.today().isoformat(),
        "seeds": sorted(seeds),
        "data": {case.data.name: case.data_hash[:12] for case in cases},
    }
