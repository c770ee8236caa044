"""Benchmarks in parts: `run` does those that are not stored yet in benchmarks/parts, `write` puts all on a page."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PARTS = Path(__file__).parent / "parts"
Parts = dict[str, dict[str, Any]]  # by the name of the file, without its ending


def command_line(
    description: str | None,
    run: Callable[[argparse.Namespace], None],
    page: Callable[[Parts], Iterable[str]],
    out: str,
    add_options: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Parse the command line and act.

    Args:
        description: of the benchmark, for `--help`.
        run: does the parts that are missing in `options.store`.
        page: the lines of the page.
        out: the page's file in docs/results.
        add_options: adds the options of `run`.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running, writing = commands.add_parser("run"), commands.add_parser("write")
    for command in (running, writing):
        command.add_argument("--store", type=Path, default=PARTS / Path(out).stem, help="folder of the parts that are done")
    add_options(running)
    running.set_defaults(act=run)
    writing.add_argument("--out", type=Path, default=Path("docs/results") / out)
    writing.set_defaults(act=lambda options: write(options.store, options.out, page))
    options = parser.parse_args()
    options.act(options)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> Iterable[str]:
    """An empty line, and the table below it."""
    names = list(head)
    yield from ("", f"| {' | '.join(names)} |", f"|{'---|' * len(names)}")
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)


def commands(title: str, lines: Iterable[object]) -> Iterable[str]:
    """A title, and below it the commands in a block that no test runs."""
    yield from ("", title, "", "```text", *map(str, lines), "```")


def write(store: Path, out: Path, page: Callable[[Parts], Iterable[str]]) -> None:
    parts = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(store.glob("*.json"))}
    out.write_text("\n".join(page(parts)) + "\n", encoding="utf-8")
    print(out.read_text(encoding="utf-8"))
