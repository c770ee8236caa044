"""`gradveil show NAME`: what a method is, whose idea it is, its settings with meaning and bounds, and an example."""

from typing import Annotated

import typer

from gradveil.cli.catalogue import METHODS, MethodCard, MethodSetting, catalogue
from gradveil.cli.layout import hanging, paragraphs
from gradveil.core.errors import unknown


def command(name: Annotated[str, typer.Argument(help="A defense, attack, model or data set.", metavar="NAME")]) -> None:
    """Show what a method is, whose idea it is, its settings with meaning and bounds, and an example."""
    lists = catalogue()
    cards = [_card(method) for method in lists.methods if method.name == name]
    cards += [[f"{entry.name} (data set)", paragraphs(entry.text)] for entry in lists.data if entry.name == name]
    if not cards:
        names = [entry for kind in (*METHODS, "data") for entry in lists.names(kind)]
        raise unknown("method", name, names, hint="`gradveil list defenses` shows one kind of them.")
    typer.echo("\n\n".join(block for card in cards for block in card if block))


def _card(method: MethodCard) -> list[str]:
    facts = {**method.facts, **({"paper": method.paper} if method.paper else {})}
    settings = "\n".join(["settings:", *map(_setting, method.settings)]) if method.settings else "no settings"
    return [
        f"{method.name} ({method.kind})",
        paragraphs(method.idea),
        paragraphs(method.text),
        "\n".join(hanging(f"{title}: ", text) for title, text in facts.items()),
        settings,
        "\n".join(["example:", *(f"  {line}" for example in method.examples for line in example.splitlines())]),
    ]


def _setting(setting: MethodSetting) -> str:
    """`std: float = 0.01 (> 0)`, and below it what it means."""
    default = ", required" if setting.default is None else f" = {setting.default}"
    bounds = f" ({setting.bounds})" if setting.bounds else ""
    head = hanging("  ", f"{setting.name}: {setting.kind}{default}{bounds}")
    return f"{head}\n{hanging(' ' * 6, setting.meaning)}"
