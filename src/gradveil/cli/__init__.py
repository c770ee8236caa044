"""The command line. A command is a file in this folder with a function `command`, and its name in the list below."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import typer

from gradveil import __version__
from gradveil.core.errors import UserError
from gradveil.storage.files import no_space

COMMANDS = ("audit", "attack", "protect", "search", "train", "report", "compare", "reproduce", "list", "show")

# What the parser raises for a wrong command line; typer has it from click, or brings its own copy.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(name="gradveil", rich_markup_mode=None)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradveil {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Do the updates of federated training leak their images, and what stops it?"""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _name in COMMANDS:
    app.command(_name)(importlib.import_module(f"gradveil.cli.{_name}").command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: done; 1: a --fail-if condition holds; 2: bad input, told in one line; 130: stopped by Ctrl-C."""
    try:
        # Not list(…): in this package that name is a command.
        given = None if arguments is None else [*arguments]
        code = app(args=given, prog_name="gradveil", standalone_mode=False)
    except UserError as error:
        return _tell(str(error))
    except OSError as error:
        if not no_space(error):
            raise
        return _tell("no space left on the disk; what is finished is kept, and the same command goes on from it.")
    except _USAGE_ERROR as error:
        return _tell(getattr(error, "format_message", error.__str__)())
    return code if isinstance(code, int) else 0


def one_line(text: str) -> str:
    """Text from anywhere as a single line: what could steer a terminal is written out instead."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))


def _tell(text: str) -> int:
    print("gradveil:", one_line(text), file=sys.stderr)
    return 2
