"""Tables that fit the terminal and break no name."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from gradveil.report.fitted_table import FittedColumn, FittedTable

SPECS = ["none", "prune:ratio=0.9", "graddefense:std=0.01,slices=10", "ats:policy=3-1-7+43-18-18", "dcs2+gaussian:std=1e+3"]
PIECES = {"none", "prune:", "ratio=0.9", "graddefense:", "std=0.01,", "slices=10", "ats:", "policy=3-1-7+43-18-18"}
PIECES |= {"dcs2+", "gaussian:", "std=1e+3"}


def shown(width: int) -> list[str]:
    numbers = [FittedColumn("PSNR", "right", 1), FittedColumn("SSIM", "right", 2), FittedColumn("identified", "right")]
    table = FittedTable([FittedColumn("defense"), FittedColumn("verdict"), *numbers])
    for spec in SPECS:
        table.add_row(spec, Text("no leak shown", "red"), "159.9", "1.00", "100% (40–100%)")
    table.add_section()
    table.add_row("baseline")
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [50, 60, 70, 80, 120])
def test_every_line_fits_and_names_break_only_between_their_parts(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert all(piece in text for piece in PIECES)
    assert "leak" in text and "(40–100%)" in text


def test_a_wide_terminal_has_one_line_per_row() -> None:
    lines = shown(120)
    assert [line.split()[0] for line in lines if ":" in line or "none" in line] == SPECS
    assert len(lines) == 2 + len(SPECS) + 2


def test_columns_that_say_least_are_left_out_first() -> None:
    headers = {width: shown(width)[0].split() for width in (120, 50, 44)}
    assert "SSIM" in headers[120] and "PSNR" in headers[120]
    assert "SSIM" not in headers[50] and "PSNR" in headers[50]
    assert "PSNR" not in headers[44] and "verdict" in headers[44]


def test_a_continued_name_is_indented() -> None:
    assert any(line.startswith(" slices=10 ") for line in shown(50))
