"""Coordinates of the charts against the numbers they stand for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.report import chart
from gradveil.storage.run_folder import StoredCell
from gradveil.summary import Summary

Made = Callable[..., chart.CostChart]
Parsed = Callable[[dict[str, Any]], Summary]


@pytest.fixture
def made(parsed: Parsed, summary: dict[str, Any]) -> Made:
    """Defenses by name, each with a rate and a cost (PDM in percent, or one minus the cosine)."""
    (template, *_) = summary["defenses"]

    def make(points: dict[str, tuple[float, float]], utility: bool = True) -> chart.CostChart:
        summary["defenses"] = [
            {
                **template,
                "spec": spec,
                "utility": {**template["utility"], "pdm": cost} if utility else None,
                "gradient": {"cosine": 1 - cost, "noise_ratio": None},
                "worst": {
                    **template["worst"],
                    "identified": {"rate": rate, "low": rate / 2, "high": (1 + rate) / 2, "chance": 0.01},
                },
            }
            for spec, (rate, cost) in points.items()
        ]
        scatter = chart.privacy_utility(parsed(summary))
        assert scatter is not None
        return scatter

    return make


def test_points_stand_where_their_numbers_say(made: Made) -> None:
    scatter = made({"none": (1.0, 0.0), "a": (0.5, 10.0), "b": (0.0, 20.0)})
    none, a, b = scatter.points
    assert (none.x, none.y) == (scatter.frame.left, scatter.frame.top)
    assert (b.x, b.y) == (scatter.frame.right, scatter.frame.bottom)
    assert a.x == pytest.approx((scatter.frame.left + scatter.frame.right) / 2)
    assert a.y == pytest.approx((scatter.frame.top + scatter.frame.bottom) / 2)
    height = scatter.frame.bottom - scatter.frame.top
    assert (a.low, a.high) == (
        pytest.approx(scatter.frame.bottom - height / 4),
        pytest.approx(scatter.frame.bottom - height * 3 / 4),
    )


@pytest.mark.parametrize(("loss", "low", "cut"), [(-30.0, -66.0, -30.0), (-5.0, -66.0, -20.0), (4.0, 1.0, 1.0)])
def test_an_interval_that_is_cut_still_holds_its_loss(
    parsed: Parsed, summary: dict[str, Any], loss: float, low: float, cut: float
) -> None:
    defended = summary["defenses"][1]
    defended["utility"] = {**summary["defenses"][2]["utility"], "pdm": loss, "low": low, "high": 30.0}
    scatter = chart.privacy_utility(parsed(summary))
    assert scatter is not None
    point = next(point for point in scatter.points if point.defense.spec == defended["spec"])
    assert point.span is not None and point.span[0] <= point.x <= point.span[1]
    assert f"({cut:.1f} to 30.0%)".replace("-", "−") in point.tip.replace("-", "−")


def test_without_utility_the_cosine_is_the_cost_and_unchanged_is_left(made: Made) -> None:
    scatter = made({"none": (1.0, 0.0), "a": (0.5, 0.4)}, utility=False)
    assert "cosine" in scatter.x_title
    assert scatter.x_ticks[0].text == "1.00"
    assert scatter.points[0].x == scatter.frame.left < scatter.points[1].x


def test_nothing_measured_is_no_chart(parsed: Parsed, summary: dict[str, Any]) -> None:
    for defense in summary["defenses"]:
        defense["worst"] = None
    assert chart.privacy_utility(parsed(summary)) is None


def test_defenses_without_a_cost_are_named_not_dropped(parsed: Parsed, summary: dict[str, Any]) -> None:
    summary["defenses"][2]["utility"] = None
    scatter = chart.privacy_utility(parsed(summary))
    assert scatter is not None and scatter.missing == ["precode"]


def test_points_on_one_spot_share_a_label(made: Made) -> None:
    scatter = made({"a": (1.0, 0.0), "b": (1.0, 0.0), "c": (0.0, 9.0)})
    assert [p.label for p in scatter.points] == ["a, b", "", "c"]


def test_many_defenses_are_numbered_and_labels_keep_apart(made: Made) -> None:
    scatter = made({f"d{i}": ((i * 5 % 14) / 14, i * 2.0) for i in range(14)})
    assert scatter.numbered and scatter.points[4].label == "5"
    spots = [(p.label_x, p.label_y) for p in scatter.points]
    assert all(math.dist(p, q) > 10 for p, q in itertools.combinations(spots, 2))


@settings(deadline=None)
@given(st.floats(-100, 100), st.floats(1e-3, 1e3))
def test_ticks_cover_the_range_evenly_and_stay_few(low: float, width: float) -> None:
    ticks = chart.nice_ticks(low, low + width)
    assert ticks[0] <= low + 1e-6 * width and ticks[-1] >= low + width * (1 - 1e-6)
    assert 2 <= len(ticks) <= 8
    gaps = [b - a for a, b in itertools.pairwise(ticks)]
    assert max(gaps) - min(gaps) <= 1e-6 * max(gaps) + 1e-9 * abs(low)


def test_objectives_falling_far_are_drawn_logarithmically_with_their_ends() -> None:
    spark = chart.objective_curve({"objective": [10.0**-i for i in range(5)], "step": [0, 100, 200, 300, 400]})
    assert spark is not None and spark.log and (spark.first, spark.last, spark.steps) == ("1", "0.0001", 400)
    heights = [float(p.split(",")[1]) for p in spark.path.split()]
    steps = [b - a for a, b in itertools.pairwise(heights)]
    assert max(steps) - min(steps) < 0.05, "equal ratios are equal steps"


@pytest.mark.parametrize("history", [{}, {"objective": []}, {"objective": [1.0]}, {"objective": [None, None, 1.0]}])
def test_no_curve_without_two_values(history: Any) -> None:
    assert chart.objective_curve(history) is None


def test_long_histories_are_thinned_but_keep_both_ends() -> None:
    spark = chart.objective_curve({"objective": [1.0 / (1 + i) + 1 for i in range(10_000)]})
    assert spark is not None and len(spark.path.split()) <= chart.SPARK_POINTS + 1
    assert (spark.first, spark.steps) == ("2", 9_999)


def test_accuracy_lines_follow_the_summary_and_ignore_other_audits() -> None:
    cells = [
        StoredCell(key=name, kind="utility", defense=name, attack="", tensors_sha256=None, history={"acc_test": values})
        for name, values in (("a", (0.2, None, 0.6)), ("none", (0.2, 0.8, 1.0)), ("old", (0.9,)))
    ]
    lines = chart.accuracy_curves(cells, ["none", "a"])
    assert lines is not None
    assert [(line.name, line.last, len(line.path.split())) for line in lines.lines] == [("none", 1.0, 3), ("a", 0.6, 2)]
    top = float(lines.lines[0].path.split()[-1].split(",")[1])
    assert top == lines.frame.top
