"""A recipe run: its audits and measurements, and the result that the pages show."""

import math
import os
import platform
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from pydantic import JsonValue

from gradveil import __version__
from gradveil.auditing.case import Case
from gradveil.auditing.limits import Execution
from gradveil.auditing.progress import Display
from gradveil.auditing.run import Stopped, identity_of
from gradveil.auditing.work import one_thread
from gradveil.core.hashing import short_hash
from gradveil.core.results import Record
from gradveil.recipes import pictures
from gradveil.recipes.audits import RecipeAudit, SharedFolder
from gradveil.recipes.bench import Bench
from gradveil.recipes.charts import chart
from gradveil.recipes.claims import Value
from gradveil.recipes.measures import Measurement, Values
from gradveil.recipes.recipe import TRAINING_METRICS, Recipe, Scale, Scaled, TableCell
from gradveil.recipes.result import Panel, RecipeEnvironment, RecipeResult, TableEntry
from gradveil.storage.files import write_text
from gradveil.storage.run_folder import read_record

Measured = dict[TableCell, Value | str]  # a text says why there is no number


def run_recipe(
    recipe: Recipe,
    scale: Scale,
    out: Path,
    *,
    workers: int = 0,
    device: str = "cpu",
    display: Callable[[], Display] = Display,
    say: Callable[[str], None] = lambda _: None,
) -> RecipeResult:
    """Fill the table of a recipe and judge its claims. The result is also written to `out`."""
    scaled, began, seconds = recipe.at(scale), time.perf_counter(), 0.0
    execution = Execution(workers=workers, device=device)
    table: Measured = {}
    audits: dict[str, RecipeAudit] = {}
    for name, spec in scaled.specs.items():
        cells = {cell for cell in scaled.wanted() if cell.audit == name}
        if not cells:
            continue
        say(f"{recipe.name}: {name}")
        case = Case(spec)
        # Where the data cannot carry an accuracy the audit has no `utility`, and its cells stay empty.
        empty = {cell for cell in cells if cell.figure in TRAINING_METRICS and spec.utility is None}
        table |= dict.fromkeys(empty, "not run")
        with SharedFolder(out / "cases" / case.id).opened(identity_of(case)) as folder:
            audit = audits[name] = RecipeAudit(case, folder)
            seconds += audit.complete(cells - empty, execution, display())
            table |= {cell: audit.value(cell) for cell in cells - empty}
    for name in dict.fromkeys(cell.measure for cell in scaled.wanted() if cell.measure):
        say(f"{recipe.name}: {name}")
        measured = _measure(scaled.measures[name], out, display)
        seconds += measured.seconds
        cells = {cell for cell in scaled.wanted() if cell.measure == name}
        table |= {c: measured.values.get(c.value, f"the measure has no {c.value}") for c in cells}
    file = out / "results" / f"{recipe.name}.json"
    if scaled.pictures:
        rows = [audits[p.cell.audit].tensors(p.cell)[p.shows] for p in scaled.pictures]
        pictures.write(file.with_suffix(".png"), rows)
    result = _result(scaled, table, seconds, [audit.case for audit in audits.values()])
    if drawing := chart(recipe, result):
        write_text(file.with_suffix(".svg"), drawing)
    write_text(file, result.model_dump_json(indent=1, by_alias=True, exclude_none=True) + "\n")
    say(f"{recipe.name}: done in {time.perf_counter() - began:.0f} s")
    return result


# -- measurements ------------------------------------------------------------------------------------------------------


class StoredMeasurement(Record):
    """The values of a measurement, with the settings that they depend on."""

    settings: dict[str, JsonValue]
    seconds: float
    values: Values


def _measure(measurement: Measurement, out: Path, display: Callable[[], Display]) -> StoredMeasurement:
    """Take a measurement, or read the stored one of the same settings and version."""
    settings = measurement.model_dump(mode="json")
    file = out / "measures" / f"{short_hash([settings, __version__])}.json"
    if file.is_file():
        return read_record(file, StoredMeasurement, "delete it")
    unfinished, began = file.with_suffix(".part.json"), time.perf_counter()
    bench = Bench(unfinished, out / "cache", display)
    before = bench.seconds
    try:
        with one_thread():
            values = measurement.take(bench)
    except KeyboardInterrupt:
        raise Stopped(file.parent, len(bench.results), bench.total) from None
    finally:
        bench.stop()
    stored = StoredMeasurement(settings=settings, seconds=before + time.perf_counter() - began, values=values)
    write_text(file, stored.model_dump_json(indent=1) + "\n")
    unfinished.unlink(missing_ok=True)
    return stored


# -- the result --------------------------------------------------------------------------------------------------------


def _result(scaled: Scaled, table: Measured, seconds: float, cases: list[Case]) -> RecipeResult:
    recipe = scaled.recipe
    values = {position: table[cell] for position, cell in scaled.cells.items()}
    numbers = {position: value for position, value in values.items() if isinstance(value, Value)}
    rows: dict[str, dict[str, TableEntry]] = {row: {} for row in recipe.rows}
    for (row, column), value in values.items():
        if isinstance(value, Value):
            # The spread of a rate says nothing, that of one training is not measured.
            spread = math.isfinite(value.std) and scaled.cells[row, column].figure not in ("asr", "identified")
            rows[row][column] = round(value.mean, 4), round(value.std, 4) if spread else 0.0, value.n
        else:
            rows[row][column] = value
    scatter = recipe.scatter
    panels = {c: _points(values[scatter.across, c], values[scatter.up, c]) for c in recipe.columns} if scatter else {}
    return RecipeResult(
        recipe=recipe.name,
        scale=scaled.scale,
        settings=short_hash(scaled.settings()),
        rows=rows,
        claims=tuple(claim.judge(numbers, recipe.rows, recipe.columns) for claim in recipe.claims),
        seconds=round(seconds, 1),
        environment=_environment(scaled, cases),
        pictures=tuple(p.label for p in scaled.pictures) or None,
        scatter={column: points for column, points in panels.items() if points} or None,
    )


def _points(x: Value | str, y: Value | str) -> Panel | None:
    """The points of two cells, where both have single numbers."""
    if isinstance(x, str) or isinstance(y, str) or not len(x.each) == len(y.each) > 1:
        return None
    return tuple(round(number, 6) for number in x.each), tuple(round(number, 6) for number in y.each)


def _environment(scaled: Scaled, cases: list[Case]) -> RecipeEnvironment:
    return RecipeEnvironment(
        gradveil=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        numpy=version("numpy"),
        machine=platform.machine(),
        cores=os.cpu_count(),
        date=date.today().isoformat(),
        seeds=tuple(sorted({case.spec.seed for case in cases} | {m.seed for m in scaled.measures.values()})),
        data={case.data.name: case.data_hash[:12] for case in cases},
    )
