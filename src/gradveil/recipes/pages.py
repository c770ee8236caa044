"""The pages of results, one a paper, and their index: our table, the published one, the claims, and what was reduced."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradveil.recipes.charts import chart
from gradveil.recipes.recipe import PAPERS, Recipe, all_names, load
from gradveil.report.words import seconds_text
from gradveil.storage.files import write_text

Json = dict[str, Any]
VERDICTS = ("holds", "does not hold", "cannot be told")
TITLES = {
    "loda": "LODA (Wan et al. 2022)",
    "dcs2": "DCS2 (Wu et al. 2024)",
    "refiner": "Refiner (Fan et al. 2022, arXiv v1)",
    "ats": "ATS (Gao et al. 2021)",
    "precode": "PRECODE (Scheliga et al. 2022)",
}
NOT_RUN = "not run"


def write_pages(results: Path, docs: Path) -> list[Path]:
    """Every page, from the results that are in the folder; a recipe without one is named as not run."""
    found = {name: json.loads(file.read_text()) for name in all_names() if (file := results / f"{name}.json").is_file()}
    docs.mkdir(parents=True, exist_ok=True)
    written = []
    for paper in PAPERS:
        mine = [load(name) for name in all_names() if name.startswith(f"{paper}/")]
        lines = [f"# {TITLES[paper]}", "", *_head(paper)]
        for recipe in mine:
            lines += ["", *section(recipe, found.get(recipe.name))]
            if recipe.name in found:
                lines += _drawn(recipe, found[recipe.name], results, docs / "images")
        written.append(docs / f"{paper}.md")
        write_text(written[-1], "\n".join(lines) + "\n")
    written.append(docs / "index.md")
    write_text(written[-1], "\n".join(_index(found)) + "\n")
    return written


def _drawn(recipe: Recipe, result: Json, results: Path, images: Path) -> list[str]:
    """The recipe's pictures and its chart, where it has any."""
    name = recipe.name.replace("/", "-")
    images.mkdir(exist_ok=True)
    lines: list[str] = []
    if (picture := results / f"{recipe.name}.png").is_file():
        shutil.copyfile(picture, images / f"{name}.png")
        rows = "; ".join(result.get("pictures", ()))
        lines += ["", f"![{recipe.title}](images/{name}.png)", "", f"From above: {rows}."]
    if drawn := chart(recipe, result):
        write_text(images / f"{name}.svg", drawn)
        lines += ["", f"![{recipe.title}](images/{name}.svg)"]
    return lines


def _head(paper: str) -> list[str]:
    return [
        f"Written by `gradveil reproduce {paper} --docs`. Numbers are means over the victims ± their standard deviation. A",
        "claim holds, does not hold, or cannot be told: two means must differ by more than two standard errors, victim by",
        "victim where the victims are the same. *Scaled down* is what this run took in place of the paper's settings;",
        "`--scale paper` takes those.",
    ]


def section(recipe: Recipe, result: Json | None) -> list[str]:
    """One recipe's part of a page."""
    lines = [f"## {recipe.name}", "", f"{recipe.title}."]
    if result is None:
        return [*lines, "", "Not run.", *_published(recipe)]
    lines += ["", f"Here, at scale {result['scale']}:", "", *_table(recipe, _ours(recipe, result))]
    lines += [*_published(recipe), *_claims(result)]
    if recipe.comment:
        lines += ["", " ".join(recipe.comment.split())]
    if result["scale"] == "cpu" and (words := "; ".join(_reduced(recipe))):
        lines += ["", f"Scaled down: {words}."]
    return [*lines, "", _environment(result)]


def _published(recipe: Recipe) -> list[str]:
    lines = ["", f"Published: {' '.join(recipe.source.split())}"] if recipe.source else []
    if recipe.published:
        rows = {row: [_printed(value) for value in values] for row, values in recipe.published.items()}
        lines += ["", "Published:", "", *_table(recipe, rows)]
    return lines


def _table(recipe: Recipe, rows: dict[str, list[str]]) -> list[str]:
    columns = list(recipe.columns)
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return lines + [f"| {row} | {' | '.join(values)} |" for row, values in rows.items()]


def _ours(recipe: Recipe, result: Json) -> dict[str, list[str]]:
    return {row: [_cell(result["rows"].get(row, {}).get(column)) for column in recipe.columns] for row in recipe.rows}


def _cell(value: Any) -> str:
    if value is None:
        return NOT_RUN
    if isinstance(value, str):
        return value.partition(":")[0] if value.startswith(("failed", "not applicable")) else value
    mean, std, n = value
    return _number(mean) + (f" ± {_number(std)}" if std and n > 1 else "")


def _printed(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return f"{value[0]} ± {value[1]}"
    return str(value)


def _number(value: float) -> str:
    size = abs(value)
    return (
        f"{value:.0f}"
        if size >= 100
        else f"{value:.1f}"
        if size >= 10
        else f"{value:.2f}"
        if size >= 1
        else f"{value:.3f}"
    )


def _claims(result: Json) -> list[str]:
    if not result["claims"]:
        return []
    lines = ["", "| claim | here | figures |", "|---|---|---|"]
    for found in result["claims"]:
        figures = found["figures"].replace(" | ", " / ")
        lines.append(f"| {found['claim']} | {found['verdict']} | {figures} |")
    return lines


def _reduced(recipe: Recipe) -> Iterator[str]:
    """What differs between the scales, as the recipe says it, so that nothing is left out."""
    seen = set()
    for part in ("common", "audits", "measures", "names", "rows", "columns", "cell"):
        for path, cpu, paper in _differences(getattr(recipe, part)):
            where = " ".join(word for word in path if word not in ("utility",))
            text = f"{where} {_words(cpu)} (paper: {_words(paper)})"
            if text not in seen:
                seen.add(text)
                yield text
    if recipe.reduced:
        yield " ".join(recipe.reduced.split()).rstrip(".")


def _differences(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(tree, dict) and tree.keys() == {"cpu", "paper"}:
        cpu, paper = tree["cpu"], tree["paper"]
        if isinstance(cpu, dict) and isinstance(paper, dict):
            for key in [k for k in paper if cpu.get(k) != paper[k]]:
                yield (*path, key), cpu.get(key), paper[key]
        else:
            yield path, cpu, paper
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _differences(value, (*path, str(key)))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(inner)}" for key, inner in value.items())
    if isinstance(value, str):
        return f"`{value}`" if value else "as it is"
    return "not run" if value is False else "by default" if value is None else str(value)


def _environment(result: Json) -> str:
    about = result["environment"]
    seeds = ", ".join(map(str, about["seeds"]))
    return (
        f"Seeds {seeds}; {seconds_text(result['seconds'])} of work in all its cells; gradveil {about['gradveil']}, torch "
        f"{about['torch']}, Python {about['python']}, {about['machine']}, {about['date']}."
    )


# -- index -------------------------------------------------------------------------------------------------------------


def _index(results: dict[str, Json]) -> list[str]:
    counted = Counter(found["verdict"] for result in results.values() for found in result["claims"])
    lines = [
        "# The papers' tables, run here",
        "",
        "Every table and figure with numbers of five papers, as recipes: `gradveil reproduce --list`. Written by",
        f"`gradveil reproduce all --docs`. {len(results)} of {len(all_names())} recipes were run; of their claims "
        + ", ".join(f"{counted[v]} {_plural(v)}" for v in VERDICTS)
        + " at this scale.",
        "",
        "A claim that does not hold at CPU scale does not refute the paper: nets, images and iterations are fewer. What was",
        "scaled down and what may explain a difference stands with each table.",
        "",
        "| recipe | claim | here |",
        "|---|---|---|",
    ]
    for name in all_names():
        link = f"[{name}]({name.partition('/')[0]}.md#{name.replace('/', '')})"
        if name not in results:
            lines.append(f"| {link} | | not run |")
            continue
        for found in results[name]["claims"] or [
            {"claim": "(the paper makes no claim that figures bear out)", "verdict": ""}
        ]:
            lines.append(f"| {link} | {found['claim']} | {found['verdict']} |")
    return lines


def _plural(verdict: str) -> str:
    return {"holds": "hold", "does not hold": "do not hold"}.get(verdict, verdict)
