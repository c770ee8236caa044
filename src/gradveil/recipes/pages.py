"""The pages of results, one per paper, and their index: our table, the published one, the claims, and what was reduced."""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from pydantic import JsonValue

from gradveil.core.hashing import short_hash
from gradveil.recipes.charts import chart
from gradveil.recipes.claims import ClaimVerdict
from gradveil.recipes.recipe import PAPERS, Printed, Recipe, all_names, load
from gradveil.recipes.result import RecipeResult, TableEntry
from gradveil.report.words import seconds_text
from gradveil.storage.files import write_text
from gradveil.storage.run_folder import read_record

NOT_RUN = "not run"
STORED = "stored"  # folder of all results beside the pages
HEAD = """Written by `gradveil reproduce {paper} --docs`. Numbers are means over the victims ± their standard deviation,
accuracies means over trainings of several seeds, each the mean of its last three evaluations. A claim holds, does not
hold, or cannot be told: two means must differ by more than two standard errors, victim by victim or seed by seed where
they are the same. *Scaled down* is what this run took in place of the paper's settings;
`--scale paper` takes those."""
INDEX = """# Which of the papers' claims hold here

Every table and figure with numbers of five papers is a recipe, run beside the published numbers: `gradveil reproduce --list`.
Written by `gradveil reproduce all --docs docs/results --minutes 110`, which goes on where it ended until all are run. {run} of
{all} recipes were run as they are now; of their claims {verdicts} at this scale. {stale} results are *out of date*: measured
before their recipe or the rules of judging changed, and not counted.

A claim that does not hold at CPU scale does not refute the paper: nets, images and iterations are fewer. What was
scaled down and what may explain a difference stands with each table.

## Other measurements

| question | page |
|---|---|
| Which defense survives which attack? | [standard-v2](suite.md), [on four networks](nets.md), [standard-v1](suite_v1.md) |
| Can images of a batch be told apart? | [batches](batches.md), [on networks with norms](norms.md) |
| Can they after local epochs? | [local epochs](local_epochs.md) |
| Can somebody tell whether an image was used? | [line-up](line_up.md) |
| What leaks in federations as they are? | [practice](practice.md) |
| How much protection is enough there? | [the cheapest settings that survive](tunes.md) |
| What does a defense cost in accuracy? What does DP-SGD cost in time? | [accuracy](utility.md), [time](per_image.md) |
| How often is a verdict wrong? | [false alarms](calibration.md), [odd defenses](odd_defenses.md), [stability](stability.md) |
| How does it compare with another tool? | [the suite beside a peer](peer.md), [speed](speed.md) |
| Is a plan's time right? Do both engines agree? | [plans](plan.md), [engines](flower.md) |
| What does it survive? Which Python? How soon does it answer? | [reliability](reliability.md) |
"""
HEADINGS: dict[ClaimVerdict, str] = {
    "does not hold": "Claims that do not hold here",
    "cannot be told": "Claims that cannot be told at this scale",
    "holds": "Claims that hold here",
}
OUT_OF_DATE = "**Out of date:** measured before this recipe or the rules of judging changed; run it again."
PLURAL = {"holds": "hold", "does not hold": "do not hold"}


def write_pages(results: Path, docs: Path) -> list[Path]:
    """Keep the results of a run in the pages' folder, and write every page from all that are kept there.

    A recipe without a result is named as not run; one whose result is of other settings or rules as out of date.
    """
    files = {name: docs / STORED / f"{name}.json" for name in all_names()}
    for name, file in files.items():
        if (new := results / f"{name}.json").is_file():
            read_record(new, RecipeResult, "run the recipe again")  # a damaged one replaces nothing
            write_text(file, new.read_text(encoding="utf-8"))
    stored = {n: read_record(file, RecipeResult, "run the recipe again") for n, file in files.items() if file.is_file()}
    written = []
    for paper, title in PAPERS.items():
        lines = [f"# {title}", "", HEAD.format(paper=paper)]
        for name in files:
            if name.startswith(f"{paper}/"):
                recipe, result = load(name), stored.get(name)
                lines += ["", *section(recipe, result)]
                lines += _drawings(recipe, result, results, docs / "images") if result else []
        written.append(docs / f"{paper}.md")
        write_text(written[-1], "\n".join(lines) + "\n")
    written.append(docs / "index.md")
    write_text(written[-1], "\n".join(_index(stored)) + "\n")
    return written


def is_stale(recipe: Recipe, result: RecipeResult) -> bool:
    """Whether the result was measured with other settings, or judged by other rules, than those of the recipe now."""
    return result.settings != short_hash(recipe.at(result.scale).settings())


def _drawings(recipe: Recipe, result: RecipeResult, results: Path, images: Path) -> list[str]:
    """The recipe's pictures and its chart, where it has any."""
    name = recipe.name.replace("/", "-")
    images.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    if (picture := results / f"{recipe.name}.png").is_file():
        shutil.copyfile(picture, images / f"{name}.png")
    if result.pictures and (images / f"{name}.png").is_file():  # of this run, or kept from an earlier one
        rows = "; ".join(result.pictures or ())
        lines += ["", f"![{recipe.title}](images/{name}.png)", "", f"From above: {rows}."]
    if not is_stale(recipe, result) and (drawing := chart(recipe, result)):
        write_text(images / f"{name}.svg", drawing)
    if (recipe.scatter or recipe.lines) and (images / f"{name}.svg").is_file():  # an old result keeps its old chart
        lines += ["", f"![{recipe.title}](images/{name}.svg)"]
    return lines


def section(recipe: Recipe, result: RecipeResult | None) -> list[str]:
    """One recipe's part of a page."""
    lines = [f"## {recipe.name}", "", f"{recipe.title}."]
    if result is None:
        return [*lines, "", "Not run.", *_published(recipe)]
    ours = {row: [entry_text(result.rows.get(row, {}).get(c, NOT_RUN)) for c in recipe.columns] for row in recipe.rows}
    stale = is_stale(recipe, result)
    lines += ["", OUT_OF_DATE] if stale else []
    lines += ["", f"Here, at scale {result.scale}:", "", *_table(recipe, ours), *_published(recipe)]
    if result.claims:
        lines += ["", "| claim | here | figures |", "|---|---|---|"]
        when = " (out of date)" if stale else ""
        lines += [f"| {c.claim} | {c.verdict}{when} | {c.figures.replace(' | ', ' / ')} |" for c in result.claims]
    if stale:  # notes and differences between the scales are those of the recipe as it is now
        return [*lines, *_measured(result)]
    if recipe.comment:
        lines += ["", " ".join(recipe.comment.split())]
    if result.scale == "cpu" and (text := "; ".join(scaled_down(recipe))):
        lines += ["", f"Scaled down: {text}."]
    return [*lines, *_measured(result)]


def _measured(result: RecipeResult) -> list[str]:
    about = result.environment
    return [
        "",
        f"Seeds {', '.join(map(str, about.seeds))}; {seconds_text(result.seconds)} of work in all its cells; "
        f"gradveil {about.gradveil}, torch {about.torch}, Python {about.python}, {about.machine}, {about.date}.",
    ]


def _published(recipe: Recipe) -> list[str]:
    lines = ["", f"Published: {' '.join(recipe.source.split())}"] if recipe.source else []
    if recipe.published:
        rows = {row: [printed_text(value) for value in values] for row, values in recipe.published.items()}
        lines += ["", "Published:", "", *_table(recipe, rows)]
    return lines


def _table(recipe: Recipe, rows: dict[str, list[str]]) -> list[str]:
    columns = list(recipe.columns)
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return lines + [f"| {row} | {' | '.join(values)} |" for row, values in rows.items()]


def entry_text(entry: TableEntry) -> str:
    """A measured value of a table."""
    if isinstance(entry, str):
        return entry.partition(":")[0] if entry.startswith(("failed", "not applicable")) else entry
    mean, std, n = entry
    return _number(mean) + (f" ± {_number(std)}" if std and n > 1 else "")


def printed_text(value: Printed) -> str:
    """A published value of a table."""
    if value is None:
        return "–"
    return f"{value[0]} ± {value[1]}" if isinstance(value, tuple) else str(value)


def _number(value: float) -> str:
    """Three figures; at most three decimals."""
    return f"{value:.{sum(abs(value) < limit for limit in (100, 10, 1))}f}"


def scaled_down(recipe: Recipe) -> Iterator[str]:
    """What differs between the scales, as the recipe writes it, so that nothing is left out."""
    texts: dict[str, None] = {}
    for part in ("common", "audits", "measures", "names", "rows", "columns", "cell"):
        for path, cpu, paper in _differences(getattr(recipe, part)):
            where = " ".join(word for word in path if word != "utility")
            texts[f"{where} {_words(cpu)} (paper: {_words(paper)})"] = None
    yield from texts
    if recipe.reduced:
        yield " ".join(recipe.reduced.split()).rstrip(".")


def _differences(tree: JsonValue, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], JsonValue, JsonValue]]:
    if not isinstance(tree, dict):
        return
    if tree.keys() != {"cpu", "paper"}:
        for key, value in tree.items():
            yield from _differences(value, (*path, key))
        return
    cpu, paper = tree["cpu"], tree["paper"]
    if isinstance(cpu, dict) and isinstance(paper, dict):
        yield from (((*path, key), cpu.get(key), paper[key]) for key in paper if cpu.get(key) != paper[key])
    else:
        yield path, cpu, paper


def _words(value: JsonValue) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(inner)}" for key, inner in value.items())
    if isinstance(value, str):
        return f"`{value}`" if value else "as it is"
    return NOT_RUN if value is False else "by default" if value is None else str(value)


def _index(results: dict[str, RecipeResult]) -> list[str]:
    stale = {name for name, result in results.items() if is_stale(load(name), result)}
    counts = Counter(claim.verdict for name in results.keys() - stale for claim in results[name].claims)
    verdicts = ", ".join(f"{counts[verdict]} {PLURAL.get(verdict, verdict)}" for verdict in get_args(ClaimVerdict))
    lines = [INDEX.format(run=len(results) - len(stale), all=len(all_names()), verdicts=verdicts, stale=len(stale))]
    links = {name: f"[{name}]({name.partition('/')[0]}.md#{name.replace('/', '')})" for name in all_names()}
    current = {name: result for name, result in results.items() if name not in stale}
    for verdict, heading in HEADINGS.items():
        lines += [f"## {heading} ({counts[verdict]})", "", "| recipe | claim |", "|---|---|"]
        for name, result in current.items():
            lines += [f"| {links[name]} | {claim.claim} |" for claim in result.claims if claim.verdict == verdict]
        lines.append("")
    others = {
        "The paper makes no claim that figures bear out": [name for name, result in current.items() if not result.claims],
        "Out of date": [name for name in links if name in stale],
        "Not run": [name for name in links if name not in results],
    }
    for text, names in others.items():
        lines += [f"{text}: {', '.join(links[name] for name in names)}.", ""] if names else []
    return lines[:-1]
