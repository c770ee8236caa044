"""The parser of a command without the command: for its help and for completion, which must not wait for torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradveil.cli.catalogue import KINDS, METHODS, CommandParameter, catalogue
from gradveil.cli.options import parser_for
from gradveil.core.errors import UserError

if TYPE_CHECKING:
    import click

TYPES: dict[str, object] = {"str": str, "int": int, "float": float, "bool": bool, "Path": Path, "list[str]": list[str]}

# What completes the value of an option or argument.
_VALUES = {"defense": "defenses", "attack": "attacks", "without": "attacks", "model": "models", "data": "data"}
_VALUES |= {"preset": "presets", "utility-model": "models"}


def described_parser(command: str) -> click.Command:
    """Like the parser of the command itself, in all but what it does."""
    text = catalogue().commands[command]

    def run(**values: object) -> int | None:
        raise UserError(f"--help stands where {command} expects a value; give the value first.")

    run.__doc__ = text.help
    run.__dict__["__signature__"] = inspect.Signature([_parameter(command, parameter) for parameter in text.parameters])
    return parser_for(run, command)


def _parameter(command: str, described: CommandParameter) -> inspect.Parameter:
    values = _completed(command, described)
    if described.words:
        info = typer.Option(*described.words, help=described.help, metavar=described.metavar, autocompletion=values)
        info.min, info.max = described.least, described.most
    else:
        info = typer.Argument(help=described.help, metavar=described.metavar, autocompletion=values)
    info.show_default = False
    default = inspect.Parameter.empty if described.required else None
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(described.name, kind, default=default, annotation=Annotated[TYPES[described.kind], info])


def _completed(command: str, described: CommandParameter) -> Callable[[str], list[str]] | None:
    """The names that a word may become."""
    if described.words:
        kind = _VALUES.get(described.words[0].removeprefix("--"))
        names = catalogue().names(kind) if kind else []
    elif command == "show":
        names = [name for kind in (*METHODS, "data") for name in catalogue().names(kind)]
    else:
        names = {"list": [*KINDS], "reproduce": catalogue().names("recipes")}.get(command, [])
    return (lambda incomplete: [name for name in names if name.startswith(incomplete)]) if names else None
