"""What a recipe came to, as it is stored for the pages: its table, its claims, and where it was measured."""

from typing import Literal

from pydantic import Field

from gradveil.core.results import Record
from gradveil.recipes.claims import JudgedClaim
from gradveil.recipes.recipe import Scale

TableEntry = tuple[float, float, int] | str  # mean, standard deviation, number of images; or why there is no number
Panel = tuple[tuple[float, ...], tuple[float, ...]]  # x and y of the points of a scatter chart


class RecipeEnvironment(Record):
    """Where and on what a recipe was measured."""

    gradveil: str
    python: str
    torch: str
    numpy: str
    machine: str
    cores: int | None
    date: str
    seeds: tuple[int, ...]
    data: dict[str, str]  # the beginning of its hash, by name


class RecipeResult(Record):
    """The measured table of a recipe."""

    version: Literal[1] = Field(default=1, alias="schema")
    recipe: str
    scale: Scale
    settings: str  # a hash of all that the result depends on
    rows: dict[str, dict[str, TableEntry]]
    claims: tuple[JudgedClaim, ...]
    seconds: float  # of all its cells
    environment: RecipeEnvironment
    pictures: tuple[str, ...] | None = None  # labels of the rows of pictures
    scatter: dict[str, Panel] | None = None  # by column
