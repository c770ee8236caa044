"""The chart of two rows: every point where it belongs, and a slip in the recipe told."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from gradveil.errors import UserError
from gradveil.recipes import charts
from gradveil.recipes.claims import Value
from gradveil.recipes.recipe import load
from gradveil.recipes.run import run_recipe

SVG = "{http://www.w3.org/2000/svg}"


def test_points_stand_in_their_order_and_on_the_line_they_lie_on(tmp_path: Path) -> None:
    x = (0.0, 1.0, 2.0, 4.0)
    panels = {"a < b": (Value.of(x), Value.of(10 - 2 * v for v in x)), "up": (Value.of(x), Value.of(x))}
    charts.write(tmp_path / "chart.svg", panels, "x & y")
    root = ET.parse(tmp_path / "chart.svg").getroot()
    places = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]
    falling, rising = places[:4], places[4:]
    assert len(places) == 8 and [p[0] for p in falling] == sorted(p[0] for p in falling)
    assert [p[1] for p in falling] == sorted(p[1] for p in falling)  # downwards on the page is down
    assert [p[1] for p in rising] == sorted((p[1] for p in rising), reverse=True)
    lines = [p.attrib["d"] for p in root.iter(f"{SVG}path") if "stroke-dasharray" in p.attrib]
    (x1, y1), (x2, y2) = falling[0], falling[-1]
    assert lines[0] == f"M{x1} {y1}L{x2} {y2}"
    words = [t.text for t in root.iter(f"{SVG}text")]
    assert "a < b" in words and words.count("x & y") == 2


def test_a_scatter_of_a_row_that_is_not_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "title: Mine\naudits: {a: {data: mnist-5k}}\ncell: {audit: a, attack: ig}\nrows: {none: {defense: none}}\n"
        "columns: {PSNR: {metric: psnr}}\nsource: nothing.\nscatter: {across: none, up: all}\n"
    )
    with pytest.raises(UserError, match="the scatter names the row all"):
        load(str(file))


def test_a_recipe_draws_its_scatter(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "title: Mine\naudits: {a: {data: mnist-5k, victims: 3}}\ncell: {audit: a, attack: 'ig:steps=2', defense: none}\n"
        "rows: {MSE: {metric: mse}, PSNR: {metric: psnr}}\ncolumns: {victims: {}}\nsource: nothing.\n"
        "scatter: {across: MSE, up: PSNR}\n"
    )
    run_recipe(load(str(file)), "cpu", tmp_path / "out")
    (chart,) = (tmp_path / "out" / "results").rglob("*.svg")
    assert len(list(ET.parse(chart).getroot().iter(f"{SVG}circle"))) == 3
