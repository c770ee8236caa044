"""A recipe: one table or figure of a paper, as audits and the way from their cells to its rows and columns.

It is plain YAML. Wherever a value is a mapping of `cpu` and `paper`, the scale chooses. A row and a column each name a
part of a cell (audit, defense, attack, metric …); together with the recipe's `cell` they name it wholly. Texts may hold
`{key}`, filled from the other keys of the same cell, and a name of `names` stands for the method it is given there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gradveil.auditing.spec import SUITE, AuditSpec, make_spec
from gradveil.core.errors import UserError, unknown
from gradveil.recipes.claims import Claim

Scale = Literal["cpu", "paper"]
SCALES: tuple[Scale, ...] = ("cpu", "paper")
PAPERS = {"loda": "LODA", "dcs2": "DCS2", "refiner": "Refiner", "ats": "ATS", "precode": "PRECODE"}
ROOT = Path(__file__).parent
CONTROL = "none"

# What a cell may ask for, by the work that gives it.
ATTACK_METRICS = ("psnr", "ssim", "mse", "mse_normalised", "lpips", "asr", "identified")
UPDATE_METRICS = ("noise_ratio", "cosine", "seconds")
TRAINING_METRICS = ("acc_test", "acc_train", "acc_sensitive", "pdm")
STATISTICS = ("mean", "std", "min", "max")


@dataclass(frozen=True)
class Cell:
    """One number of a table: of an audit's cell, or of a measure."""

    audit: str = ""
    defense: str = CONTROL
    attack: str = ""
    metric: str = ""  # with .min, .max or .std of it; of a training also @round
    against: Literal["original", "fed"] = "original"
    measure: str = ""
    value: str = ""  # of the measure

    @property
    def figure(self) -> str:
        return self.metric.partition(".")[0].partition("@")[0]

    @property
    def statistic(self) -> str:
        return self.metric.partition(".")[2] or "mean"

    @property
    def round(self) -> int | None:
        """The round of a training that is asked for; None: the last."""
        text = self.metric.partition("@")[2]
        return int(text) if text else None


@dataclass(frozen=True)
class Picture:
    """A row of pictures: of the private images, of what was fed, or of what an attack made of them."""

    label: str
    cell: Cell
    shows: Literal["original", "fed", "reconstruction"]


class Scatter(BaseModel):
    """A chart: two rows of the table against each other, a panel for every column."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    across: str
    up: str


class Recipe(BaseModel):
    """As a YAML file says it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    common: dict[str, Any] = Field(default_factory=dict)  # of every audit
    audits: dict[str, dict[str, Any]] = Field(default_factory=dict)
    measures: dict[str, dict[str, Any]] = Field(default_factory=dict)
    names: dict[str, Any] = Field(default_factory=dict)
    cell: dict[str, Any] = Field(default_factory=dict)
    rows: dict[str, dict[str, Any]]
    columns: dict[str, dict[str, Any]]
    published: dict[str, list[Any]] = Field(default_factory=dict)  # numbers, [mean, spread] or null, by row
    source: str = ""  # what the paper prints, where it prints no table of these rows and columns
    claims: tuple[Claim, ...] = ()
    pictures: dict[str, dict[str, Any]] = Field(default_factory=dict)
    scatter: Scatter | None = None
    lines: tuple[str, ...] = ()  # columns that every row is drawn across as a line
    reduced: str = ""  # beside what the two scales show by themselves
    comment: str = ""  # why ours differs, where it does

    @field_validator("rows", "columns", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        return {str(key): part or {} for key, part in value.items()} if isinstance(value, dict) else value

    @field_validator("published", mode="before")
    @classmethod
    def _published(cls, value: Any) -> Any:
        return {str(key): row for key, row in value.items()} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        if self.published:
            if list(self.published) != list(self.rows):
                raise ValueError("the published rows are not those of the recipe")
            for row, values in self.published.items():
                if len(values) != len(self.columns):
                    raise ValueError(f"published row {row} has {len(values)} values for {len(self.columns)} columns")
        elif not self.source:
            raise ValueError("there is neither a published table nor a word on what the paper prints")
        if self.scatter:
            for row in (self.scatter.across, self.scatter.up):
                if row not in self.rows:
                    raise ValueError(f"the scatter names the row {row}, which the table has not")
        for column in self.lines:
            if column not in self.columns:
                raise ValueError(f"the lines name the column {column}, which the table has not")
        places = {(row, column) for row in self.rows for column in self.columns}
        for claim in self.claims:
            for place in claim.places(self.rows, self.columns):
                if place not in places:
                    raise ValueError(f"claim '{claim.text}' names {' | '.join(place)}, which the table has not")
        return self

    @property
    def paper(self) -> str:
        return self.name.partition("/")[0]

    def at(self, scale: Scale) -> Scaled:
        return Scaled(self, scale)


class Scaled:
    """A recipe at one scale: checked specs, and every cell written out."""

    def __init__(self, recipe: Recipe, scale: Scale):
        self.recipe, self.scale = recipe, scale
        self.measures: dict[str, dict[str, Any]] = chosen(recipe.measures, scale)
        self._names: dict[str, str] = chosen(recipe.names, scale)

    @cached_property
    def cells(self) -> dict[tuple[str, str], Cell]:
        """By row and column."""
        recipe = self.recipe
        return {
            (row, column): self._cell({**recipe.cell, **across, **down})
            for row, across in recipe.rows.items()
            for column, down in recipe.columns.items()
        }

    @cached_property
    def pictures(self) -> list[Picture]:
        found = []
        for label, given in self.recipe.pictures.items():
            shows = given.get("shows", "reconstruction")
            rest = {key: value for key, value in given.items() if key != "shows"}
            found.append(Picture(label, self._cell({**self.recipe.cell, "metric": "psnr", **rest}), shows))
        return found

    @cached_property
    def specs(self) -> dict[str, AuditSpec]:
        """The audits, each with exactly the defenses and attacks that its cells ask for."""
        shared, own = chosen(self.recipe.common, self.scale), chosen(self.recipe.audits, self.scale)
        specs = {}
        for name, given in own.items():
            used = [cell for cell in self.wanted() if cell.audit == name]
            methods = {
                "defenses": list(dict.fromkeys(c.defense for c in used)) or [CONTROL],
                "attacks": list(dict.fromkeys(c.attack for c in used if c.attack)) or ["ig"],
            }
            specs[name] = make_spec({"pictures": "shown", **shared, **given, **methods})
        return specs

    def wanted(self) -> Iterator[Cell]:
        """Every cell of the table and of the pictures; a loss of accuracy needs the undefended one too."""
        for cell in [*self.cells.values(), *(p.cell for p in self.pictures)]:
            yield cell
            if cell.figure == "pdm":
                yield Cell(cell.audit, CONTROL, metric="acc_test")

    def _cell(self, given: Mapping[str, Any]) -> Cell:
        given = chosen(dict(given), self.scale)
        texts = {key: value.format_map(given) if isinstance(value, str) else value for key, value in given.items()}
        known: dict[str, Any] = {key: value for key, value in texts.items() if key in Cell.__dataclass_fields__}
        if known.get("measure"):  # of no audit, whatever the recipe's other cells are of
            known = {key: known[key] for key in ("measure", "value") if key in known}
        for kind in ("defense", "attack"):
            if kind in known:
                known[kind] = self._names.get(known[kind], known[kind])
        cell = Cell(**known)
        self._check(cell)
        return cell

    def _check(self, cell: Cell) -> None:
        where = f"{self.recipe.name}: "
        if cell.measure:
            if cell.measure not in self.measures:
                raise UserError(where + str(unknown("measure", cell.measure, self.measures)))
            return
        metrics = (*ATTACK_METRICS, *UPDATE_METRICS, *TRAINING_METRICS)
        if cell.audit not in self.recipe.audits:
            raise UserError(where + str(unknown("audit", cell.audit, self.recipe.audits)))
        if cell.figure not in metrics or cell.statistic.partition("@")[0] not in STATISTICS:
            raise UserError(where + str(unknown("metric", cell.metric, metrics)))
        if cell.figure in ATTACK_METRICS and cell.attack in ("", SUITE):
            what = "the suite, which is many" if cell.attack else "no attack"
            raise UserError(where + f"{cell.metric} under {cell.defense} names {what}; name one attack.")


def chosen(tree: Any, scale: Scale) -> Any:
    """What holds at a scale: a mapping of both scales becomes the value of this one."""
    if isinstance(tree, dict):
        if tree.keys() == set(SCALES):
            return tree[scale]
        return {key: chosen(value, scale) for key, value in tree.items()}
    return [chosen(value, scale) for value in tree] if isinstance(tree, list) else tree


# -- the library -------------------------------------------------------------------------------------------------------


def names() -> list[tuple[str, str]]:
    """Every recipe with its title, paper by paper."""
    return [(name, load(name).title) for name in all_names()]


def all_names() -> list[str]:
    found = [f"{paper}/{file.stem}" for paper in PAPERS for file in sorted((ROOT / paper).glob("*.yaml"))]
    return sorted(found, key=lambda name: (list(PAPERS).index(name.partition("/")[0]), _order(name)))


def _order(name: str) -> tuple[int, str]:
    return (0 if "/table" in name else 1, name)


def load(name: str) -> Recipe:
    """A recipe by its name, or from a YAML file of one's own."""
    ours = name in all_names()
    file = ROOT / f"{name}.yaml" if ours else Path(name)
    if file.suffix not in (".yaml", ".yml"):
        raise unknown("recipe", name, all_names(), hint="`gradveil reproduce --list` shows all.")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: {(error.strerror or 'cannot be read').lower()}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not YAML ({' '.join(str(error).split())}).") from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: a recipe is written as `key: value` lines.")
    try:
        return Recipe.model_validate({"name": name if ours else file.stem, **values})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{file}: {where + ': ' if where else ''}{first['msg']}.") from None
