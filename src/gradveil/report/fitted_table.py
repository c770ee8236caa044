"""A table that fits the terminal: long cells continue below, but no name or number is broken.

A cell may break at spaces, behind the colon and the commas of a spec, and behind the plus of a chain. Where that does not
suffice, columns that say least are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.table import Table
from rich.text import Text

_BREAKS = re.compile(r"(?<=\s)(?=\S)|(?<=[:,])(?=[^\d\s])|(?<=\+)(?=[A-Za-z])")
GAPS = (2, 1)  # spaces between columns: one of the box and one of padding, or where that is too wide the first alone


@dataclass(frozen=True)
class FittedColumn:
    """One column. Of those that may be left out, the one with the largest number goes first."""

    header: str
    justify: Literal["left", "right"] = "left"
    left_out: int = 0  # 0: never


@dataclass
class FittedTable:
    """Lines of cells under headers; rich prints it in the width that there is."""

    columns: Sequence[FittedColumn]
    lines: list[tuple[list[Text], str]] = field(default_factory=list)
    sections: set[int] = field(default_factory=set)  # numbers of lines that a rule follows

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        texts = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        self.lines.append(([*texts, *(Text() for _ in self.columns[len(texts) :])], style))

    def add_section(self) -> None:
        self.sections.add(len(self.lines) - 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        gap, widths = self._widths(options.max_width)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False)
        for i, width in widths.items():
            column = self.columns[i]
            table.add_column(_packed(column.header, width), justify=column.justify, width=width, overflow="fold")
        for number, (cells, style) in enumerate(self.lines):
            packed = (Text(_packed(cells[i].plain, width), cells[i].style) for i, width in widths.items())
            table.add_row(*packed, style=Style.parse(style), end_section=number in self.sections)
        yield table

    def _widths(self, room: int) -> tuple[int, dict[int, int]]:
        """The spaces between columns, and the width of each column that is shown."""
        texts = [[column.header, *(cells[i].plain for cells, _ in self.lines)] for i, column in enumerate(self.columns)]
        widths = {i: max(map(cell_len, column)) for i, column in enumerate(texts)}
        gap = next((gap for gap in GAPS if _total(widths, gap) <= room), GAPS[-1])
        least = {i: max(map(_least, column)) for i, column in enumerate(texts)}
        for i in sorted(least, key=lambda i: -self.columns[i].left_out):
            if self.columns[i].left_out and _total(least, gap) > room:
                del least[i], widths[i]
        while _total(widths, gap) > room:
            slack = {i: width - least[i] for i, width in widths.items()}
            widest = (
                max(slack, key=slack.__getitem__) if any(s > 0 for s in slack.values()) else max(widths, key=widths.__getitem__)
            )
            if widths[widest] == 1:
                break
            widths[widest] -= 1
        return gap, widths


def _total(widths: dict[int, int], gap: int) -> int:
    return sum(widths.values()) + gap * (len(widths) - 1)


def _least(text: str) -> int:
    """The width below which a name or number would be broken. What continues a name is indented."""
    parts = _BREAKS.split(text)
    within = [part for before, part in pairwise(parts) if not before[-1:].isspace()]
    return max([*(cell_len(part.rstrip()) for part in parts), *(1 + cell_len(part.rstrip()) for part in within)])


def _packed(text: str, width: int) -> str:
    """The text in lines of at most this width."""
    lines, line = list[str](), ""
    for part in _BREAKS.split(text):
        if line and cell_len((line + part).rstrip()) > width:
            lines.append(line.rstrip())
            line = "" if line[-1].isspace() else " "
        line += part
    lines.append(line.rstrip())
    return "\n".join(piece for whole in lines for piece in (chop_cells(whole, width) if cell_len(whole) > width else [whole]))
