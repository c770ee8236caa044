"""Write src/gradveil/cli/catalogue.json: all that `gradveil list`, `show`, `--help` and completion say.

`python tests/record_catalogue.py` reads the registries, the recipes, their stored results and the commands themselves.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.models import ArgumentInfo

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gradveil import attacks, defenses, models, recipes  # noqa: E402
from gradveil.attacks import Attack  # noqa: E402
from gradveil.attacks.suite import accepted_counters  # noqa: E402
from gradveil.auditing.presets import PRESETS  # noqa: E402
from gradveil.auditing.strength import STRENGTHS  # noqa: E402
from gradveil.cli import COMMANDS  # noqa: E402
from gradveil.cli.catalogue import (  # noqa: E402
    FILE,
    Catalogue,
    CommandParameter,
    CommandText,
    ListedName,
    ListedRecipe,
    MethodCard,
    MethodSetting,
)
from gradveil.cli.described import TYPES  # noqa: E402
from gradveil.cli.options import with_options  # noqa: E402
from gradveil.core.options import types_of  # noqa: E402
from gradveil.core.settings import Registry, default_of, fields_of  # noqa: E402
from gradveil.data.catalogue import EMBEDDED, NAMED_SETS, NamedSet  # noqa: E402
from gradveil.defenses import Defense  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "stored"
REGISTRIES: dict[str, Registry] = {"attack": attacks.registry, "defense": defenses.registry, "model": models.MODELS}
BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
AUTHOR = r"[A-Z][a-zà-ü]+"
PAPER = re.compile(rf"{AUTHOR}(?:(?:, {AUTHOR})*(?: and {AUTHOR})?|(?: et al\.)),? (?:[A-Z]+ )?(?:19|20)\d\d\b")


def current() -> Catalogue:
    return Catalogue(
        tuple(card(kind, cls) for kind, registry in REGISTRIES.items() for cls in registry),
        tuple(ListedName(named.name, named.description, needed_files(named)) for named in NAMED_SETS.values()),
        tuple(ListedName(name, preset.description) for name, preset in PRESETS.items()),
        tuple(recipe(name) for name, _ in recipes.names()),
        {name: command(name) for name in COMMANDS},
    )


def needed_files(named: NamedSet) -> str:
    return "" if named is EMBEDDED else named.files


# -- methods -----------------------------------------------------------------------------------------------------------


def card(kind: str, cls: type) -> MethodCard:
    doc, module = inspect.getdoc(cls) or "", inspect.getdoc(sys.modules[cls.__module__]) or ""
    idea, _, rest = doc.partition("\n")
    text = re.split(r"^(?:Args|Example):", rest, maxsplit=1, flags=re.MULTILINE)[0].strip()
    paper = PAPER.search(" ".join(doc.split())) or PAPER.search(" ".join(module.split()))
    explained = meanings(doc)
    settings = tuple(setting(name, field, explained[name]) for name, field in fields_of(cls).items())
    whole, facts, shown = (
        "\n\n".join(part for part in (text, module) if part),
        dict(facts_of(cls)),
        examples(kind, cls.name, doc),
    )
    return MethodCard(kind, cls.name, idea, whole, paper[0] if paper else "", facts, settings, tuple(shown))


def facts_of(cls: type) -> Iterator[tuple[str, str]]:
    if issubclass(cls, Defense):
        yield "stage", ", ".join(cls().stages) or "none"
        yield "countered by", ", ".join(accepted_counters(cls)) or "no attack of this project"
        if cls.counters:
            yield "claimed counters", ", ".join(cls.counters)
        if cls in STRENGTHS:
            yield "made stronger by", STRENGTHS[cls].setting
        if cls.random:
            yield "random", "two updates of one batch differ"
    if issubclass(cls, Attack):
        yield "needs", ", ".join(sorted(cls.needs)) or "nothing but the update"
        if cls.against:
            yield "built against", ", ".join(defense.name for defense in cls.against)


def meanings(doc: str) -> dict[str, str]:
    """What `Args` says of each setting: line by line, or in the short form `Args: a, b as for …; c: …`."""
    explained: dict[str, str] = {}
    if short := re.search(r"^Args: (.*)$", doc, re.MULTILINE):
        for part in re.finditer(r"(?:^|; ?)([^:;]*?)(: | as for )(.*?)(?=; ?[\w, ]+(?:: | as for )|$)", short[1]):
            meaning = part[3] if part[2] == ": " else f"as for {part[3]}"
            explained |= dict.fromkeys(re.sub(r"\(.*?\)", "", part[1]).replace(" ", "").split(","), meaning)
    elif block := re.search(r"^Args:\n((?:    .*\n|\n)+)", doc + "\n", re.MULTILINE):
        for names, meaning in re.findall(r"^([\w, ]+): (.*(?:\n +.*)*)", inspect.cleandoc(block[1]), re.MULTILINE):
            explained |= dict.fromkeys(names.replace(" ", "").split(","), " ".join(meaning.split()))
    return explained


def setting(name: str, field: FieldInfo, meaning: str) -> MethodSetting:
    kinds = " | ".join(kind_text(kind) for kind in types_of(field))
    limits = [(symbol, getattr(m, key)) for m in field.metadata for key, symbol in BOUNDS.items() if hasattr(m, key)]
    bounds = ", ".join(f"{symbol} {limit:g}" for symbol, limit in limits)
    default = default_of(field)
    return MethodSetting(name, kinds, None if default is PydanticUndefined else str(default), bounds, meaning)


def kind_text(kind: object) -> str:
    if get_origin(kind) is Literal:
        return " | ".join(str(value) for value in get_args(kind))
    if get_origin(kind) is Callable:
        return "Callable"
    return kind.__name__ if type(kind) is type else str(kind)


def examples(kind: str, name: str, doc: str) -> Iterator[str]:
    """The command with the settings of the docstring's example, then that example where it is of Python."""
    if typed := re.search(r"^Example: (gradveil .*)$", doc, re.MULTILINE):
        yield typed[1]
        return
    code = "\n".join(re.findall(r"^ +(?:>>>|\.\.\.) (.*)$", doc, re.MULTILINE))
    spec = next((text for text in re.findall(r'"([^"]*)"', code) if re.split("[:+]", text)[0] == name), name)
    yield f"gradveil audit --{kind} {spec}"
    if code:
        yield code


# -- recipes and commands ----------------------------------------------------------------------------------------------


def recipe(name: str) -> ListedRecipe:
    loaded = recipes.load(name)
    scaled, stored = loaded.at("cpu"), RESULTS / f"{name}.json"
    sources = [str(spec.data) for spec in scaled.specs.values()]
    sources += [scaled.measures[cell.measure].data for cell in scaled.wanted() if cell.measure]
    result = json.loads(stored.read_text(encoding="utf-8")) if stored.is_file() else {}
    minutes = float(f"{result['seconds'] / 60:.2g}") if result.get("scale") == "cpu" else None
    names = dict.fromkeys(source.partition(":")[0] for source in sources)
    return ListedRecipe(name, loaded.title, minutes, tuple(names))


def command(name: str) -> CommandText:
    function = with_options(importlib.import_module(f"gradveil.cli.{name}").command)
    parameters = inspect.signature(function).parameters.values()
    return CommandText(inspect.getdoc(function) or "", tuple(parameter(p) for p in parameters))


def parameter(declared: inspect.Parameter) -> CommandParameter:
    kind, info = get_args(declared.annotation)
    kinds = [part for part in get_args(kind) if part is not NoneType] if type(None) in get_args(kind) else [kind]
    text = next(text for text, cls in TYPES.items() if cls == kinds[0])
    words = [word for word in (info.default, *(info.param_decls or ())) if isinstance(word, str)]
    if not words and not isinstance(info, ArgumentInfo):
        words = [f"--{declared.name.replace('_', '-')}"]
    required = declared.default is inspect.Parameter.empty
    return CommandParameter(declared.name, text, tuple(words), info.help or "", info.metavar, required, info.min, info.max)


def main() -> None:
    FILE.write_bytes(TypeAdapter(Catalogue).dump_json(current(), indent=1) + b"\n")


if __name__ == "__main__":
    main()
