"""Charts of tables: every point where it belongs, and a slip in the recipe told."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from gradveil.core.errors import UserError
from gradveil.recipes.charts import chart
from gradveil.recipes.recipe import load
from gradveil.recipes.result import RecipeResult
from gradveil.recipes.run import run_recipe

SVG = "{http://www.w3.org/2000/svg}"


RECIPE = """
title: Mine
audits: {a: {data: mnist-5k, victims: 3}}
cell: {audit: a, attack: 'ig:steps=2', defense: none}
rows: {MSE: {metric: mse}, PSNR: {metric: psnr}}
columns: {victims: {}, 'a < b': {}}
source: nothing.
"""


Written = Callable[[str], str]
MakeResult = Callable[..., RecipeResult]


def drawn(name: str, result: RecipeResult) -> ET.Element:
    text = chart(load(name), result)
    assert text is not None
    return ET.fromstring(text)


def places(root: ET.Element) -> list[tuple[float, float]]:
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]


def test_points_stand_in_their_order_and_on_the_line_they_lie_on(written: Written, make_result: MakeResult) -> None:
    x = [0.0, 1.0, 2.0, 4.0]
    points = {"a < b": [x, [10 - 2 * v for v in x]], "up": [x, x]}
    root = drawn(written(RECIPE + "scatter: {across: MSE, up: PSNR}"), make_result(scatter=points))
    falling, rising = places(root)[:4], places(root)[4:]
    assert len(rising) == 4 and [p[0] for p in falling] == sorted(p[0] for p in falling)
    assert [p[1] for p in falling] == sorted(p[1] for p in falling)  # downwards on the page is down
    assert [p[1] for p in rising] == sorted((p[1] for p in rising), reverse=True)
    lines = [p.attrib["d"] for p in root.iter(f"{SVG}path") if "stroke-dasharray" in p.attrib]
    (x1, y1), (x2, y2) = falling[0], falling[-1]
    assert lines[0] == f"M{x1} {y1}L{x2} {y2}"
    words = [t.text for t in root.iter(f"{SVG}text")]
    assert "a < b" in words and words.count("MSE") == 2


def test_rows_are_lines_across_the_columns_and_one_that_was_not_run_is_left_out(
    written: Written, make_result: MakeResult
) -> None:
    rows = {"MSE": {"victims": [1.0, 0.1, 3], "a < b": [3.0, 0.1, 3]}, "PSNR": {"victims": [2.0, 0, 1], "a < b": "not run"}}
    root = drawn(written(RECIPE + "lines: [victims, a < b]"), make_result(rows=rows))
    (left, low), (right, high) = places(root)
    assert left < right and low > high
    words = [t.text for t in root.iter(f"{SVG}text")]
    assert "MSE" in words and "PSNR" not in words and "a < b" in words


def test_a_result_without_single_numbers_has_no_scatter(written: Written, make_result: MakeResult) -> None:
    name = written(RECIPE + "scatter: {across: MSE, up: PSNR}")
    assert chart(load(name), make_result(scatter={})) is None


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("scatter: {across: MSE, up: all}", "the scatter names the row all"),
        ("scatter: {across: MSE, up: PSNR, left: MSE}", "scatter.left: Extra inputs are not permitted"),
        ("lines: [victims, all]", "the lines name the column all"),
    ],
)
def test_a_chart_of_what_is_not_in_the_table_is_refused(written: Written, more: str, told: str) -> None:
    name = written(RECIPE + more)
    with pytest.raises(UserError, match=told):
        load(name)


def test_a_recipe_draws_its_scatter(written: Written, tmp_path: Path) -> None:
    name = written(RECIPE + "scatter: {across: MSE, up: PSNR}")
    result = run_recipe(load(name), "cpu", tmp_path / "out")
    (file,) = (tmp_path / "out" / "results").rglob("*.svg")
    assert len(places(ET.parse(file).getroot())) == 6
    assert result.scatter is not None
    assert [len(numbers) for numbers in result.scatter["victims"]] == [3, 3]
