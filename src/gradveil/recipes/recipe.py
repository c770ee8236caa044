"""A recipe: one table or figure of a paper, as audits and the way from their cells to its rows and columns.

It is plain YAML. Wherever a value is a mapping of `cpu` and `paper`, the scale chooses. A row and a column each describe a
part of a cell (audit, defense, attack, metric …); together with the recipe's `cell` they describe it fully. Texts may hold
`{key}`, filled from the other keys of the same cell. A name of `names` stands for the method that is written there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, TypeVar, cast

from pydantic import BaseModel, Field, JsonValue, TypeAdapter, ValidationError, field_validator, model_validator

from gradveil.attacks.suite import suite_named
from gradveil.auditing.spec import CONTROL, AuditSpec, make_spec
from gradveil.core.errors import UserError, unknown
from gradveil.recipes.claims import RULES, Claim, Position
from gradveil.recipes.searches import AnyMeasurement
from gradveil.storage.reading import read_yaml

Scale = Literal["cpu", "paper"]
SCALES: tuple[Scale, ...] = ("cpu", "paper")
PAPERS = {
    "loda": "LODA (Wan et al. 2022)",
    "dcs2": "DCS2 (Wu et al. 2024)",
    "refiner": "Refiner (Fan et al. 2022, arXiv v1)",
    "ats": "ATS (Gao et al. 2021)",
    "precode": "PRECODE (Scheliga et al. 2022)",
}
ROOT = Path(__file__).parent

# The metrics of a cell, by the work that measures them.
ATTACK_METRICS = ("psnr", "ssim", "mse", "mse_normalised", "lpips", "lpips_vgg", "asr", "identified")
UPDATE_METRICS = ("noise_ratio", "cosine", "length", "seconds")
TRAINING_METRICS = ("acc_test", "acc_train", "acc_sensitive", "acc_absent", "pdm")
METRICS = (*ATTACK_METRICS, *UPDATE_METRICS, *TRAINING_METRICS)
STATISTICS = ("mean", "std", "min", "max")

# The training of recipes, unless they state it: of a small network, at one learning rate, with enough seeds for a spread.
TRAINING: dict[str, JsonValue] = {
    "model": "cnn",
    "seeds": 5,
    "lr_grid": "1",
    "rounds": 20,
    "clients": 10,
    "images": 200,
    "fedsgd": False,
    "local_epochs": 1,
    "batch_size": 64,
    "optimizer": "sgd",
    "momentum": 0.9,
    "lr": 0.05,
    "mode": "train",
    "evaluate_every": 1,
}

Tree = dict[str, JsonValue]
Printed = int | float | tuple[int | float, int | float] | None  # a number, or mean and spread, or nothing
T = TypeVar("T")


class TableCell(BaseModel, frozen=True):
    """One number of a table: from a cell of an audit, or from a measurement."""

    audit: str = ""
    defense: str = CONTROL
    attack: str = ""
    metric: str = ""  # `psnr`, with a statistic `psnr.max`; of a training with a round `acc_test@5`, or a share `acc_test@25%`
    against: Literal["original", "fed", "component"] = "original"
    measure: str = ""
    value: str = ""  # of the measurement

    @property
    def figure(self) -> str:
        return self.metric.partition(".")[0].partition("@")[0]

    @property
    def statistic(self) -> str:
        return self.metric.partition(".")[2] or "mean"

    def rounds(self, trained: int) -> int:
        """Up to which of the rounds of a training the number is; all, unless the metric names a round or a share."""
        text = self.metric.partition("@")[2]
        return round(float(text[:-1]) / 100 * trained) if text.endswith("%") else int(text or trained)


class Picture(BaseModel, extra="forbid", frozen=True):
    """A row of pictures: the private images, the images that were fed, or their reconstructions."""

    label: str
    cell: TableCell
    shows: Literal["original", "fed", "reconstruction"]


class ScatterChart(BaseModel, extra="forbid", frozen=True):
    """A chart: two rows of the table against each other, one panel per column."""

    across: str
    up: str


class Recipe(BaseModel, extra="forbid", frozen=True):
    """The content of a YAML file."""

    name: str
    title: str
    common: Tree = Field(default_factory=dict)  # settings of every audit
    audits: dict[str, Tree] = Field(default_factory=dict)
    measures: dict[str, Tree] = Field(default_factory=dict)
    names: Tree = Field(default_factory=dict)
    cell: Tree = Field(default_factory=dict)
    rows: dict[str, Tree]
    columns: dict[str, Tree]
    published: dict[str, list[Printed]] = Field(default_factory=dict)  # by row
    source: str = ""  # what the paper prints, where it prints no table of these rows and columns
    claims: tuple[Claim, ...] = ()
    pictures: dict[str, Tree] = Field(default_factory=dict)
    scatter: ScatterChart | None = None
    lines: tuple[str, ...] = ()  # columns that every row is drawn across as a line
    reduced: str = ""  # what was reduced beside the differences between the scales
    comment: str = ""  # why our numbers differ, where they do

    @field_validator("rows", "columns", "published", mode="before")
    @classmethod
    def _text_keys(cls, value: object) -> object:
        return {str(key): part or {} for key, part in value.items()} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.published and list(self.published) != list(self.rows):
            raise ValueError("the published rows are not those of the recipe")
        if not self.published and not self.source:
            raise ValueError("there is neither a published table nor a word on what the paper prints")
        for row, values in self.published.items():
            if len(values) != len(self.columns):
                raise ValueError(f"published row {row} has {len(values)} values for {len(self.columns)} columns")
        for row in (self.scatter.across, self.scatter.up) if self.scatter else ():
            if row not in self.rows:
                raise ValueError(f"the scatter names the row {row}, which the table has not")
        for column in self.lines:
            if column not in self.columns:
                raise ValueError(f"the lines name the column {column}, which the table has not")
        for claim in self.claims:
            if not claim.text:
                raise ValueError("a claim has no text")
            for row, column in claim.positions(self.rows, self.columns):
                if row not in self.rows or column not in self.columns:
                    raise ValueError(f"claim '{claim.text}' names {row} | {column}, which the table has not")
        return self

    def at(self, scale: Scale) -> Scaled:
        return Scaled(self, scale)


class Scaled:
    """A recipe at one scale: its audits, measurements and cells, checked."""

    def __init__(self, recipe: Recipe, scale: Scale):
        self.recipe, self.scale = recipe, scale
        self._names = chosen(recipe.names, scale)
        self.measures = _validated(dict[str, AnyMeasurement], chosen(recipe.measures, scale), f"{recipe.name}: measures")

    @cached_property
    def cells(self) -> dict[Position, TableCell]:
        recipe = self.recipe
        return {
            (row, column): self._cell({**recipe.cell, **across, **down})
            for row, across in recipe.rows.items()
            for column, down in recipe.columns.items()
        }

    @cached_property
    def pictures(self) -> list[Picture]:
        rows = []
        for label, keys in self.recipe.pictures.items():
            cell = self._cell({**self.recipe.cell, "metric": "psnr", **keys})
            shows = keys.get("shows", "reconstruction")
            picture = {"label": label, "cell": cell, "shows": shows}
            rows.append(_validated(Picture, picture, f"{self.recipe.name}: picture {label}"))
        return rows

    @cached_property
    def specs(self) -> dict[str, AuditSpec]:
        """The audits, each with exactly the defenses and attacks that its cells need."""
        # The attacks of the papers look at networks in evaluation mode.
        shared = {"pictures": "shown", "mode": "eval", **chosen(self.recipe.common, self.scale)}
        specs = {}
        for name, settings in chosen(self.recipe.audits, self.scale).items():
            used = [cell for cell in self.wanted() if cell.audit == name]
            defenses = list(dict.fromkeys(cell.defense for cell in used)) or [CONTROL]
            attacks = list(dict.fromkeys(cell.attack for cell in used if cell.attack)) or ["ig"]
            stated = {**shared, **settings}
            if isinstance(training := stated.get("utility"), dict):
                stated["utility"] = {**TRAINING, **training}
            specs[name] = make_spec({**stated, "defenses": defenses, "attacks": attacks})
        return specs

    def wanted(self) -> Iterator[TableCell]:
        """Every cell of the table and of the pictures, and what their numbers are compared with."""
        for cell in [*self.cells.values(), *(p.cell for p in self.pictures)]:
            yield cell
            if cell.figure in ("pdm", "length"):
                yield undefended(cell)
            if cell.against == "component":
                yield update_of(cell)

    def settings(self) -> dict[str, object]:
        """All that a result depends on, to recognize a stored result that is out of date."""
        recipe, cells = self.recipe, {" | ".join(key): cell.model_dump() for key, cell in self.cells.items()}
        trees = {"common": recipe.common, "audits": recipe.audits, "measures": recipe.measures}
        # Numbers whose rules never changed keep their hash.
        ruled = any(cell.figure in TRAINING_METRICS or cell.against != "original" for cell in self.cells.values())
        rules = {"rules": RULES, "training": TRAINING} if ruled else {}
        return {**chosen(trees, self.scale), "cells": cells, **rules}

    def _cell(self, keys: Tree) -> TableCell:
        keys = chosen(keys, self.scale)
        texts = {key: value.format_map(keys) if isinstance(value, str) else value for key, value in keys.items()}
        if texts.get("measure"):  # no audit, whatever the recipe's other cells name
            texts = {key: texts[key] for key in ("measure", "value") if key in texts}
        texts |= {key: self._names.get(str(texts[key]), texts[key]) for key in ("defense", "attack") if key in texts}
        cell = _validated(TableCell, texts, self.recipe.name)
        self._check(cell)
        return cell

    def _check(self, cell: TableCell) -> None:
        where = f"{self.recipe.name}: "
        if cell.measure:
            if cell.measure not in self.measures:
                raise UserError(where + str(unknown("measure", cell.measure, self.measures)))
            return
        if cell.audit not in self.recipe.audits:
            raise UserError(where + str(unknown("audit", cell.audit, self.recipe.audits)))
        place = cell.metric.partition("@")[2].removesuffix("%")
        is_metric = cell.figure in METRICS and cell.statistic.partition("@")[0] in STATISTICS
        if not is_metric or (place and not place.isdecimal()):
            raise UserError(where + str(unknown("metric", cell.metric, METRICS)))
        if cell.figure in ATTACK_METRICS and (not cell.attack or suite_named(cell.attack)):
            problem = "the suite, which is many" if cell.attack else "no attack"
            raise UserError(where + f"{cell.metric} under {cell.defense} names {problem}; name one attack.")


def undefended(cell: TableCell) -> TableCell:
    """The cell of the same audit without a defense: its test accuracy, or its update."""
    return TableCell(audit=cell.audit, metric="cosine" if cell.figure in UPDATE_METRICS else "acc_test")


def update_of(cell: TableCell) -> TableCell:
    """The cell with the update that was attacked."""
    return TableCell(audit=cell.audit, defense=cell.defense, metric="cosine")


def chosen(tree: T, scale: Scale) -> T:
    """The tree at one scale: a mapping of both scales becomes the value of this one."""
    if isinstance(tree, dict):
        if tree.keys() == set(SCALES):
            return cast("T", tree[scale])
        return cast("T", {key: chosen(value, scale) for key, value in tree.items()})
    return cast("T", [chosen(value, scale) for value in tree]) if isinstance(tree, list) else tree


# -- the library -------------------------------------------------------------------------------------------------------


def names() -> list[tuple[str, str]]:
    """Every recipe with its title, paper by paper."""
    return [(name, load(name).title) for name in all_names()]


def all_names() -> list[str]:
    """Every recipe, paper by paper, tables first."""
    return [
        f"{paper}/{name}"
        for paper in PAPERS
        for name in sorted((f.stem for f in (ROOT / paper).glob("*.yaml")), key=lambda n: ("table" not in n, n))
    ]


def load(name: str) -> Recipe:
    """A recipe by its name, or from a YAML file of the user."""
    ours = name in all_names()
    file = ROOT / f"{name}.yaml" if ours else Path(name)
    if file.suffix not in (".yaml", ".yml"):
        raise unknown("recipe", name, all_names(), hint="`gradveil reproduce --list` shows all.")
    values = read_yaml(file)
    if not isinstance(values, dict):
        raise UserError(f"{file}: a recipe is written as `key: value` lines.")
    audits = values.get("audits")
    if isinstance(audits, dict):
        values = {**values, "audits": {key: _with_training(audit, f"{file}: {key}") for key, audit in audits.items()}}
    return _validated(Recipe, {"name": name if ours else file.stem, **values}, str(file))


@cache
def trainings() -> dict[str, Tree]:
    """The trainings of the papers by name, at both scales."""
    return _validated(dict[str, Tree], read_yaml(ROOT / "trainings.yaml"), "trainings.yaml")


def _with_training(audit: object, where: str) -> object:
    """The settings of an audit with the training that it names, or with those that it names for the two scales."""
    if not isinstance(audit, dict):
        return audit
    utility = audit.get("utility")
    if isinstance(utility, str):
        return {**audit, "utility": _training(utility, where)}
    if isinstance(utility, dict) and all(isinstance(utility.get(scale), str) for scale in SCALES):
        return {**audit, "utility": {scale: _training(utility[scale], where)[scale] for scale in SCALES}}
    return audit


def _training(name: str, where: str) -> Tree:
    if name not in trainings():
        raise UserError(f"{where}: {unknown('training', name, trainings())}")
    return trainings()[name]


def _validated(kind: type[T], values: object, where: str) -> T:
    """The values as this type, or one clear line on the first that does not fit."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        parts = [where, ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")]
        raise UserError(": ".join(part for part in parts if part) + ".") from None
