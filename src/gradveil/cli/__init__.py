"""The command line. A command is a file in this folder with a function `command`, and a line in the table below.

A file is imported when its command is called, and most import torch, which takes seconds. Help and completion are answered
from the catalogue in its place.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
import typer.core

from gradveil import __version__
from gradveil.core.errors import UserError
from gradveil.core.text import plain
from gradveil.processes.ending import orderly

if TYPE_CHECKING:
    import click

STOPPED = 130  # exit code, as shells have it
MAX_LINE = 1000  # characters of an error: what a user wrote may be long
PATIENCE = 3.0  # seconds for stopping in order

COMMANDS = {
    "audit": "Attack the updates of a model under each defense; report leaks.",
    "tune": "Find the cheapest setting of a defense that survives.",
    "attack": "Rebuild the images behind a captured update.",
    "protect": "Write a protected copy of an image data set.",
    "search": "Search an ATS policy for a data set and a model.",
    "train": "Train a model in a federation whose clients are defended.",
    "certify": "Say what noise promises, or which noise a risk needs.",
    "report": "Write the report of a run again.",
    "export": "Write an audited defense to a file that clients act by.",
    "compare": "Compare two runs, or two settings of a defense.",
    "card": "Write a result card for each defense of a run.",
    "check": "Run the audit of a result card again, and compare.",
    "reproduce": "Run a table or figure of a paper, and say which claims hold.",
    "list": "List attacks, defenses, models, data sets or recipes.",
    "show": "Show a method: its idea, its settings with bounds, an example.",
}

LIGHT = ("list", "show", "compare", "reproduce")  # files that load nothing slow before the command begins
LONG = ("audit", "tune", "attack", "protect", "search", "train", "reproduce")  # a log of them begins at once

# What the parser raises for a wrong command line; typer has it from click, or brings its own copy.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]

typer.core.HAS_RICH = False  # help is plain text: with rich, typer writes a backslash before every bracket


class _Commands(typer.core.TyperGroup):
    """Finds a command by its file."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if ctx.resilient_parsing:  # a shell asks for completions
            return _described(cmd_name)
        from gradveil.cli.options import parser_of

        return parser_of(importlib.import_module(f"gradveil.cli.{cmd_name}").command)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name, *others = args
        if name in COMMANDS and "--help" in others:
            return name, _described(name), others
        with loading(name, quiet="--quiet" in others or name in LIGHT):
            return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # typer would end without a word
            raise typer.Abort from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])


def _described(name: str) -> click.Command:
    from gradveil.cli.described import described_parser

    return described_parser(name)


@contextmanager
def loading(name: str, quiet: bool = False) -> Iterator[None]:
    """A line until the command is loaded: on a terminal it goes away again, in a log it is the first one of a long command."""
    text, terminal = f"gradveil {name}: loading PyTorch …", sys.stderr.isatty()
    if quiet or name not in COMMANDS or "torch" in sys.modules or not (terminal or name in LONG):
        yield
        return
    print(text, end="" if terminal else "\n", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if terminal:
            print("\r" + " " * len(text) + "\r", end="", file=sys.stderr, flush=True)


app = typer.Typer(name="gradveil", cls=_Commands, rich_markup_mode=None, pretty_exceptions_enable=False)


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


class _Interrupts:
    """Ctrl-C. The first one stops the work. While it stops, others are ignored; after a few seconds they end the process."""

    def __init__(self) -> None:
        self._first: float | None = None

    def __call__(self, number: int, frame: object) -> None:
        if self._first is None:
            self._first = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - self._first > PATIENCE:
            os._exit(STOPPED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: done; 1: a --fail-if condition holds; 2: bad input, told in one line; 130: stopped by Ctrl-C.

    3: with --fail-if or --junit, the audit cannot tell.
    """
    ours = arguments is None and threading.current_thread() is threading.main_thread()
    for stream in (sys.stdout, sys.stderr):
        if ours and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal or file whose encoding lacks a character of ours
    if ours and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _Interrupts())
    try:
        with orderly():
            code = _run(arguments)
    except (KeyboardInterrupt, typer.Abort):
        print("gradveil: stopped; what was finished is kept.", file=sys.stderr)
        code = STOPPED
    if ours and code == STOPPED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to stop but the interpreter
    return code


def _run(arguments: Sequence[str] | None) -> int:
    try:
        # Not list(…): in this package that name is a command.
        words = None if arguments is None else [*arguments]
        if any("\0" in word for word in words or ()):
            return _refuse("the command holds a zero byte; leave it out.")
        code = app(args=words, prog_name="gradveil", standalone_mode=False)
    except UserError as error:
        return _refuse(str(error))
    except OSError as error:
        from gradveil.storage.files import no_space

        if no_space(error):
            return _refuse("no space left on the disk; what is finished is kept, and the same command resumes.")
        if error.filename is None:  # not about a path of the user's
            raise
        return _refuse(f"{error.filename}: {(error.strerror or str(error)).lower()}.")
    except _USAGE_ERROR as error:
        return _refuse(getattr(error, "format_message", error.__str__)())
    return code if isinstance(code, int) else 0


def _refuse(text: str) -> int:
    line = plain(" ".join(text.split()))
    print(
        "gradveil:", line if len(line) <= MAX_LINE else f"{line[: MAX_LINE // 2]} … {line[-MAX_LINE // 2 :]}", file=sys.stderr
    )
    return 2
