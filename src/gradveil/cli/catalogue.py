"""What `list`, `show`, `--help` and shell completion say, read from catalogue.json: none of them needs torch or a method.

`python tests/record_catalogue.py` writes the file from the registries, the recipes and the commands themselves; a test fails
where it differs from them.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

FILE = Path(__file__).with_name("catalogue.json")
METHODS = {"attacks": "attack", "defenses": "defense", "models": "model"}
KINDS = (*METHODS, "data", "presets", "recipes")  # as `gradveil list` spells them


@dataclass(frozen=True)
class MethodSetting:
    """One setting of a method."""

    name: str
    kind: str
    default: str | None  # None: it must be given
    bounds: str
    meaning: str


@dataclass(frozen=True)
class MethodCard:
    """A defense, an attack or a model."""

    kind: str
    name: str
    idea: str  # one line
    text: str  # more about it, in paragraphs
    paper: str  # the first that its text names
    facts: dict[str, str]  # stage, counters and the like
    settings: tuple[MethodSetting, ...]
    examples: tuple[str, ...]


@dataclass(frozen=True)
class ListedName:
    """A data set or a preset."""

    name: str
    text: str
    files: str = ""  # that its folder must hold, where it is not built in


@dataclass(frozen=True)
class ListedRecipe:
    """A table or figure of a paper."""

    name: str
    title: str
    minutes: float | None  # of work in all its cells at scale cpu, where it was measured
    data: tuple[str, ...]


@dataclass(frozen=True)
class CommandParameter:
    """One option or argument of a command."""

    name: str
    kind: str  # a key of `described.TYPES`
    words: tuple[str, ...]  # `--data`; none of an argument
    help: str
    metavar: str | None
    required: bool
    least: float | None = None  # of a number
    most: float | None = None


@dataclass(frozen=True)
class CommandText:
    """A command: its help and its parameters."""

    help: str
    parameters: tuple[CommandParameter, ...]


@dataclass(frozen=True)
class Catalogue:
    """All that there is."""

    methods: tuple[MethodCard, ...]
    data: tuple[ListedName, ...]
    presets: tuple[ListedName, ...]
    recipes: tuple[ListedRecipe, ...]
    commands: dict[str, CommandText]

    def methods_of(self, kind: str) -> list[MethodCard]:
        return [method for method in self.methods if method.kind == METHODS[kind]]

    def names(self, kind: str) -> list[str]:
        if kind in METHODS:
            return [method.name for method in self.methods_of(kind)]
        entries: dict[str, tuple[ListedName | ListedRecipe, ...]] = {
            "data": self.data,
            "presets": self.presets,
            "recipes": self.recipes,
        }
        return [entry.name for entry in entries[kind]]


@cache
def catalogue() -> Catalogue:
    return TypeAdapter(Catalogue).validate_json(FILE.read_bytes())
