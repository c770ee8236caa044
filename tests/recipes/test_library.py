"""Every recipe: that it can be read, that its table is the paper's, and that it can be planned at both scales."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradveil import attacks, defenses
from gradveil.auditing.spec import AuditSpec
from gradveil.core.errors import UserError
from gradveil.federation import FederationPlan
from gradveil.recipes.audits import RecipeAudit
from gradveil.recipes.claims import Value
from gradveil.recipes.plan import make_plan
from gradveil.recipes.recipe import SCALES, TRAINING_METRICS, Recipe, Scale, TableCell, all_names, chosen, load
from gradveil.storage.run_folder import RunFolder

PAPERS = {
    "loda": ["table1", "table2", "table3", "table4", "table5", "table6", "table7", "figure2", "grids"],
    "dcs2": [*(f"table{i}" for i in range(1, 8)), "figure2", "figure3", "cost"],
    "refiner": ["table2", "table3", "figure2", "figure3", "figure4", "figure5", "figure6"],
    "ats": [*(f"table{i}" for i in range(1, 5)), *(f"figure{i}" for i in range(1, 7)), "search"],
    "precode": [*(f"table{i}" for i in range(1, 5)), *(f"figure{i}" for i in range(4, 8)), "supplement"],
}


def published(recipe: Recipe) -> dict[tuple[str, str], Value]:
    table = {}
    for row, values in recipe.published.items():
        for column, value in zip(recipe.columns, values, strict=True):
            if value is not None:
                table[row, column] = Value(value[0] if isinstance(value, tuple) else value)
    return table


class Unloaded:
    """An audit's case as far as its plan needs it: no data is read and no network built."""

    def __init__(self, spec: AuditSpec):
        self.id, self.spec = "unloaded", spec
        self.defenses = {str(text): defenses.parse(text) for text in spec.defenses}

    def attack(self, text: str) -> attacks.Attack:
        return attacks.parse(text)


def audit_of(spec: AuditSpec) -> RecipeAudit:
    return RecipeAudit(Unloaded(spec), RunFolder(Path("unused")))  # type: ignore[arg-type]


def test_every_table_and_figure_has_a_recipe() -> None:
    assert sorted(all_names()) == sorted(f"{paper}/{name}" for paper, names in PAPERS.items() for name in names)


@pytest.mark.parametrize("name", all_names())
@pytest.mark.parametrize("scale", SCALES)
def test_a_recipe_can_be_planned(name: str, scale: Scale) -> None:
    scaled = load(name).at(scale)
    lines = make_plan(scaled, timed=False)
    assert lines and sum(line.cells for line in lines) > 0
    assert len(scaled.cells) == len(scaled.recipe.rows) * len(scaled.recipe.columns)
    for cell in scaled.wanted():
        defenses.parse(cell.defense)
        if cell.attack:
            attacks.parse(cell.attack)
        assert not cell.measure or cell.measure in scaled.measures


@pytest.mark.parametrize("name", all_names())
@pytest.mark.parametrize("scale", SCALES)
def test_every_number_has_a_cell_in_its_audit(name: str, scale: Scale) -> None:
    scaled = load(name).at(scale)
    for cell in set(scaled.wanted()):
        if cell.measure:
            assert cell == TableCell(measure=cell.measure, value=cell.value)  # of no audit
        elif not (cell.figure in TRAINING_METRICS and scaled.specs[cell.audit].utility is None):  # "not run"
            assert audit_of(scaled.specs[cell.audit]).key_of(cell)


@pytest.mark.parametrize("scale", SCALES)
def test_the_trainings_of_recipes_are_stated_in_full(scale: Scale) -> None:
    """They are of several seeds at one learning rate, whatever the audit's own local training is."""
    number = 0
    for name in all_names():
        for audit, spec in load(name).at(scale).specs.items():
            training, stated = spec.utility, load(name).audits[audit].get("utility")
            if training is None:
                continue
            written = chosen(stated, scale)
            assert isinstance(written, dict) and training.factors == (1.0,)
            assert training.seeds >= (5 if scale == "cpu" else 3), name  # one training tells nothing about the spread
            names = {"images": "images_per_client"}
            wanted = {"clients": 10, "images_per_client": 200, "seed": spec.seed}
            wanted |= {names.get(key, key): value for key, value in written.items() if key not in ("model", "seeds")}
            assert training.model == written.get("model", "cnn")
            assert training.plan(spec.local_training, spec.batch_size, 10**6, spec.seed) == FederationPlan(**wanted), name
            number += 1
    assert number > 10


def test_a_cell_that_its_audit_has_not_is_told() -> None:
    spec = load("precode/table1").at("cpu").specs["lenet"]
    with pytest.raises(UserError, match="audit lenet has no cell for psnr under none from ig:steps=7"):
        audit_of(spec).key_of(TableCell(audit="lenet", attack="ig:steps=7", metric="psnr"))


@pytest.mark.parametrize("name", all_names())
def test_both_scales_have_the_same_rows_and_columns_and_paper_scale_is_the_larger(name: str) -> None:
    recipe = load(name)
    small, large = recipe.at("cpu"), recipe.at("paper")
    assert list(small.cells) == list(large.cells)
    for audit, spec in small.specs.items():
        assert spec.victims <= large.specs[audit].victims
        assert spec.seed == large.specs[audit].seed >= 100  # seeds below were developed on


@pytest.mark.parametrize("name", all_names())
def test_the_claims_hold_in_the_paper(name: str) -> None:
    """A claim that the published numbers do not bear out would be ours, not the paper's."""
    recipe = load(name)
    table = published(recipe)
    for claim in recipe.claims:
        if all(position in table for position in claim.positions(recipe.rows, recipe.columns)):
            judged = claim.judge(table, recipe.rows, recipe.columns)
            assert judged.verdict == "holds", judged


def test_every_recipe_makes_a_claim_that_can_be_checked() -> None:
    assert not [name for name in all_names() if not load(name).claims]


def test_a_slip_in_a_recipe_is_told_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = "title: x\naudits: {a: {data: mnist-5k}}\nrows: {r: {metric: psnr}}\ncolumns: {c: {audit: a}}\nsource: none\n"
    file.write_text(text)
    with pytest.raises(UserError, match="names no attack"):
        _ = load(str(file)).at("cpu").cells
    file.write_text(text + "cell: {attack: standard}\n")
    with pytest.raises(UserError, match="names the suite, which is many"):
        _ = load(str(file)).at("cpu").cells
    file.write_text(text + "published: {r: [1, 2]}\n")
    with pytest.raises(UserError, match="2 values for 1 columns"):
        load(str(file))
    file.write_text(text + "claims: [{text: t, at_most: [0, r | d]}]\n")
    with pytest.raises(UserError, match="which the table has not"):
        load(str(file))
    file.write_text(text + "measures: {m: {kind: perturbations, data: mnist-5k, seed: 0, images: 2, noise: 1, scal: 2}}\n")
    with pytest.raises(UserError, match=r"measures: m\.perturbations\.scale: Field required"):
        load(str(file)).at("cpu")
    file.write_text(text + "cell: {attack: ig, against: feed}\n")
    with pytest.raises(UserError, match="against: Input should be 'original', 'fed' or 'component'"):
        _ = load(str(file)).at("cpu").cells
    file.write_text(text + "cell: {attack: ig}\npictures: {mine: {audit: a, shows: rebuilt}}\n")
    with pytest.raises(UserError, match="picture mine: shows: Input should be 'original', 'fed' or 'reconstruction'"):
        _ = load(str(file)).at("cpu").pictures
    with pytest.raises(UserError, match="did you mean 'precode/table1'"):
        load("precode/tabel1")
