"""`gradveil list [KIND]`: what there is, with what to choose by; without a kind, all of it."""

from collections.abc import Iterator
from typing import Annotated

import typer

from gradveil.cli.catalogue import KINDS, ListedName, ListedRecipe, MethodCard, catalogue
from gradveil.cli.layout import hanging
from gradveil.core.errors import unknown
from gradveil.core.text import duration
from gradveil.storage.data_folder import FOLDER, data_folder

NOTE = (
    "Times are of the work in all cells at --scale cpu, as measured once. mnist-5k is built in; other data is read from the "
    f"folder that {FOLDER} names (`gradveil list data`)."
)
Entry = tuple[str, str, str]  # a name, one line about it, and what to choose by


def command(
    kind: Annotated[str, typer.Argument(help="attacks, defenses, models, data, presets, recipes. [all]", metavar="KIND")] = "",
) -> None:
    """List attacks, defenses, models, data sets, presets or recipes; without a kind, all of them."""
    if kind and kind not in KINDS:
        raise unknown("list of", kind, KINDS, hint=f"There are: {', '.join(KINDS)}.")
    if kind:
        print_kind(kind)
        return
    for number, name in enumerate(KINDS):
        typer.echo(("\n" if number else "") + name)
        print_kind(name, "  ")


def print_kind(kind: str, indent: str = "") -> None:
    """Everything of one kind."""
    entries = [*_entries(kind)]
    width = max(len(name) for name, *_ in entries)
    for name, text, facts in entries:
        head = f"{indent}{name:<{width}}  "
        typer.echo(hanging(head, text))
        if facts:
            typer.echo(hanging(" " * len(head), facts))
    if kind == "recipes":
        typer.echo("\n" + hanging(indent, NOTE))


def _entries(kind: str) -> Iterator[Entry]:
    lists = catalogue()
    if kind == "data":
        yield from ((entry.name, entry.text, _missing(entry)) for entry in lists.data)
    elif kind == "presets":
        yield from ((entry.name, entry.text, "") for entry in lists.presets)
    elif kind == "recipes":
        yield from ((entry.name, entry.title, _needs(entry)) for entry in lists.recipes)
    else:
        yield from ((card.name, card.idea, _facts(card)) for card in lists.methods_of(kind))


def _facts(card: MethodCard) -> str:
    """`update stage; Zhu et al. 2019; countered by prune-mask; stronger by ratio`"""
    if card.kind != "defense":
        return ""
    stage, strength = card.facts["stage"], card.facts.get("made stronger by")
    facts = ["" if stage == "none" else f"{stage} stage", card.paper]
    facts += ["" if card.name == "none" else f"countered by {card.facts['countered by']}"]
    facts += [f"made stronger by {strength}" if strength else ""]
    return "; ".join(fact for fact in facts if fact)


def _missing(entry: ListedName) -> str:
    folder = data_folder(entry.name)
    if not entry.files or (folder is not None and folder.is_dir()):
        return ""
    return f"(files not here: put {entry.files} into {entry.name}/ in the folder that {FOLDER} names)"


def _needs(entry: ListedRecipe) -> str:
    time = "time not measured" if entry.minutes is None else duration(60 * entry.minutes)
    return f"{time}; data: {', '.join(entry.data)}"
