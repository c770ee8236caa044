"""Running: only what a table asks for, each cell once for all recipes, and pages that say what was not run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gradveil.auditing import workers
from gradveil.auditing.case import Case
from gradveil.auditing.run import Stopped
from gradveil.core.errors import UserError
from gradveil.core.hashing import short_hash
from gradveil.recipes import pages
from gradveil.recipes.audits import RecipeAudit, SharedFolder
from gradveil.recipes.claims import RULES
from gradveil.recipes.recipe import all_names, load
from gradveil.recipes.result import RecipeResult
from gradveil.recipes.run import run_recipe

RECIPE = """
title: A table of two defenses
common: {{data: mnist-5k, model: lenet, victims: 2, knowledge: paper, seed: 100}}
audits: {{a: {{}}}}
names: {{IG: {{cpu: "ig:steps=2", paper: ig}}}}
cell: {{audit: a, attack: IG}}
rows:
  none: {{defense: none}}
  pruned: {{defense: "prune:ratio=0.9"}}
columns:
  PSNR: {{metric: psnr}}
  PSNR, best: {{metric: psnr.max}}
  MSE: {{metric: mse}}
  ASR: {{metric: asr}}
  cosine: {{metric: cosine}}
  accuracy: {{metric: acc_test}}
{more}
published:
  none: [50.0, null, 0.0, 100.0, 1.0, 90.0]
  pruned: [[10.0, 1.0], null, 0.1, 0.0, 0.9, 80.0]
claims:
  - {{text: pruning changes the update, order: [pruned | cosine, none | cosine]}}
  - {{text: pruning costs accuracy, order: [pruned | accuracy, none | accuracy]}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(RECIPE.format(more=""))
    return file


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    real = workers.run_cell

    def run_cell(cell, *rest):  # type: ignore[no-untyped-def]
        done.append(str(cell))
        return real(cell, *rest)

    monkeypatch.setattr(workers, "run_cell", run_cell)
    return done


def test_a_table_is_filled_and_its_claims_judged(recipe: Path, tmp_path: Path) -> None:
    result = run_recipe(load(str(recipe)), "cpu", tmp_path / "out")
    none, pruned = result.rows["none"], result.rows["pruned"]
    assert none["PSNR"][0] > 3 and none["PSNR"][2] == 2
    assert none["PSNR, best"][0] >= none["PSNR"][0]
    assert none["cosine"][0] == pytest.approx(1) and 0.3 < pruned["cosine"][0] < 1
    assert none["accuracy"] == "not run"  # the audit has no `utility`
    assert [claim.verdict for claim in result.claims] == ["holds", "cannot be told"]


def test_cells_are_shared_between_recipes_and_runs(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = counted(monkeypatch)
    first = run_recipe(load(str(recipe)), "cpu", tmp_path / "out")
    assert sorted(done) == sorted(
        f"{work} under {defense}" for work in ("updates", "ig:steps=2") for defense in ("none", "prune:ratio=0.9")
    )
    done.clear()
    other = tmp_path / "other.yaml"
    other.write_text(recipe.read_text().replace("A table", "Another table"))
    second = run_recipe(load(str(other)), "cpu", tmp_path / "out")
    assert done == [] and second.rows == first.rows


def test_ctrl_c_keeps_what_is_done(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = workers.run_cell, []

    def stopping(cell, *rest):  # type: ignore[no-untyped-def]
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(str(cell))
        return real(cell, *rest)

    monkeypatch.setattr(workers, "run_cell", stopping)
    with pytest.raises(Stopped, match="2 of 4 cells are done"):
        run_recipe(load(str(recipe)), "cpu", tmp_path / "out")
    monkeypatch.setattr(workers, "run_cell", real)
    done = counted(monkeypatch)
    run_recipe(load(str(recipe)), "cpu", tmp_path / "out")
    assert len(done) == 2 and not set(done) & set(seen)


def test_a_section_shows_both_tables_the_claims_and_what_was_reduced(recipe: Path, tmp_path: Path) -> None:
    mine = load(str(recipe))
    text = "\n".join(pages.section(mine, run_recipe(mine, "cpu", tmp_path / "out")))
    assert "| pruned | 10.0 ± 1.0 | – | 0.1 | 0.0 | 0.9 | 80.0 |" in text
    assert "not run" in text and "cannot be told" in text
    assert "IG `ig:steps=2` (paper: `ig`)" in text and "Seeds 100" in text


def test_pages_name_what_was_not_run(tmp_path: Path, make_result: Callable[..., RecipeResult]) -> None:
    results = tmp_path / "results" / "refiner"
    results.mkdir(parents=True)
    claim = {"claim": "c", "verdict": "holds", "figures": "f"}
    settings = short_hash(load("refiner/figure2").at("cpu").settings())
    rows = {"Shift": {"MSE": [0.03, 0.01, 64]}}
    result = make_result(recipe="refiner/figure2", rows=rows, claims=[claim], settings=settings)
    (results / "figure2.json").write_text(result.model_dump_json(by_alias=True))
    written = pages.write_pages(tmp_path / "results", tmp_path / "docs")
    assert {file.name for file in written} == {"loda.md", "dcs2.md", "refiner.md", "ats.md", "precode.md", "index.md"}
    page = (tmp_path / "docs" / "refiner.md").read_text()
    assert "| Shift | 0.030 ± 0.010 |" in page and "| Noise | not run |" in page
    index = (tmp_path / "docs" / "index.md").read_text()
    assert f"1 of {len(all_names())} recipes were run as they are now; of their claims 1 hold" in " ".join(index.split())
    assert "Not run: [loda/table1](loda.md#lodatable1), " in index


def test_a_damaged_result_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "refiner").mkdir()
    (tmp_path / "refiner" / "figure2.json").write_text('{"recipe": "refiner/figure2"}')
    with pytest.raises(UserError, match=r"figure2.json is damaged.*run the recipe again"):
        pages.write_pages(tmp_path, tmp_path / "docs")


TRAINED = """
title: Accuracies of a federation with one defended client, and scores against what was mixed
common: {data: "mnist-5k:private=240", model: lenet, victims: 3, knowledge: paper, seed: 100}
audits:
  a: {}
  trained: {utility: {clients: 4, images: 16, rounds: 4, batch_size: 8, seeds: 2, defended: 1, model: cnn}}
cell: {defense: "{by}", attack: "ig:steps=2"}
rows:
  none: {by: none}
  mixed: {by: "mixup:k=4"}
columns:
  accuracy: {audit: trained, metric: acc_test}
  first round: {audit: trained, metric: "acc_test@1"}
  lost: {audit: trained, metric: pdm}
  absent: {audit: trained, metric: acc_absent, defense: none}
  PSNR: {audit: a, metric: psnr}
  of the largest: {audit: a, metric: psnr, against: component}
  as fed: {audit: a, metric: psnr, against: fed}
  VGG: {audit: a, metric: lpips_vgg}
  length: {audit: a, metric: length}
source: nothing.
"""


def test_accuracies_are_of_paired_seeds_and_scores_of_paired_victims(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(TRAINED)
    recipe = load(str(tmp_path / "mine.yaml"))
    result = run_recipe(recipe, "cpu", tmp_path / "out")
    none, mixed = result.rows["none"], result.rows["mixed"]
    assert none["accuracy"][2] == mixed["accuracy"][2] == none["absent"][2] == 2  # seeds
    assert none["absent"] == mixed["absent"]  # the same for every defense
    assert none["lost"][:2] == (0.0, 0.0)
    lost = 100 * (none["accuracy"][0] - mixed["accuracy"][0]) / none["accuracy"][0]
    assert mixed["lost"][0] == pytest.approx(lost, abs=0.01)
    assert none["PSNR"] == none["of the largest"] == none["as fed"] and none["length"][:2] == (1.0, 0.0)
    assert mixed["as fed"][2] == 3 and len({mixed[c][0] for c in ("PSNR", "of the largest", "as fed")}) > 1
    assert mixed["length"][0] != 1.0 and 0 < none["VGG"][0] < 2

    scaled = recipe.at("cpu")
    audit = scaled.specs["trained"]
    case = Case(audit)
    folder = SharedFolder(tmp_path / "out" / "cases" / case.id)
    stored = RecipeAudit(case, folder)
    attacked = Case(scaled.specs["a"])
    other = RecipeAudit(attacked, SharedFolder(tmp_path / "out" / "cases" / attacked.id))
    for (row, column), one in scaled.cells.items():
        number = (stored if one.audit == "trained" else other).value(one)
        assert not isinstance(number, str) and len(number.each) == number.n == (2 if one.audit == "trained" else 3), (
            row,
            column,
        )
    cell = scaled.cells["none", "accuracy"]
    curves = folder.outcome(stored.key_of(cell)).history
    expected = [sum(curves[name][-3:]) / 3 for name in ("acc_test", "acc_test@1")]  # the last three rounds
    assert stored.value(cell).each == pytest.approx([100 * share for share in expected])
    first = stored.value(scaled.cells["none", "first round"])
    assert first.each == pytest.approx([100 * curves[name][0] for name in ("acc_test", "acc_test@1")])


def test_a_result_of_other_settings_or_rules_is_called_out_of_date(
    tmp_path: Path, make_result: Callable[..., RecipeResult]
) -> None:
    (tmp_path / "mine.yaml").write_text(TRAINED)
    recipe = load(str(tmp_path / "mine.yaml"))
    rows = {row: dict.fromkeys(recipe.columns, "not run") for row in recipe.rows}
    old = make_result(rows=rows, settings="0123456789")
    assert pages.is_stale(recipe, old) and pages.OUT_OF_DATE in pages.section(recipe, old)
    new = make_result(rows=rows, settings=short_hash(recipe.at("cpu").settings()))
    assert not pages.is_stale(recipe, new) and pages.OUT_OF_DATE not in pages.section(recipe, new)
    judged = recipe.at("cpu").settings()
    assert judged["rules"] == RULES and judged["training"]["seeds"] == 5
