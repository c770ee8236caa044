"""Coordinates of the page's charts; the templates draw them as SVG, so that names are escaped in one place."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gradveil.auditing.cost import by_seed
from gradveil.core.results import Rate
from gradveil.core.text import shorten
from gradveil.report.words import digits, percent, rate_text
from gradveil.storage.run_folder import Curve, StoredCell
from gradveil.summary import DefenseRow, Summary

DIRECT_LABELS = 6  # up to so many defenses are named at their points; beyond, they are numbered
MOST_GAINED = 20.0  # percent of accuracy, to the left of which an interval is cut
SPARK = (150, 56)
SPARK_POINTS = 60
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Frame:
    """The size of a chart and of what lies inside its axes, in pixels."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    ticks: int  # across, about


WIDE = Frame(520, 380, left=62, right=506, top=14, bottom=334, ticks=5)
NARROW = Frame(350, 340, left=56, right=342, top=14, bottom=292, ticks=3)  # a telephone shows it in its true size


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


@dataclass
class Point:
    """A defense on the privacy–utility chart, with its interval from `low` to `high`."""

    defense: DefenseRow
    number: int  # of the defense, from 1
    rate: Rate
    cost: float  # as measured; the rest is in pixels
    x: float
    y: float
    low: float
    high: float
    tip: str
    span: tuple[float, float] | None = None  # of the interval of the cost, across
    label: str = ""  # of the whole cluster, on its first point only
    label_x: float = 0.0
    label_y: float = 0.0
    anchor: str = "start"


@dataclass(frozen=True)
class Axes:
    """The frame of a chart with its ticks."""

    frame: Frame
    x_ticks: list[Tick]
    y_ticks: list[Tick]


@dataclass(frozen=True)
class CostChart(Axes):
    x_title: str
    x_note: str
    points: list[Point]
    numbered: bool
    baseline: Tick | None
    by_loss: bool
    missing: list[str]
    narrow: "CostChart | None" = None  # the same for a telephone


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover the range."""
    if high <= low:
        high = low + 1
    raw = (high - low) / count
    step = 10 ** math.floor(math.log10(raw))
    step *= next(m for m in (1, 2, 5, 10) if m * step >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def scale(domain: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    low, high = domain[0], domain[-1]
    return lambda value: round(start + (value - low) / (high - low or 1) * (end - start), 2)


def privacy_utility(summary: Summary, frame: Frame = WIDE) -> CostChart | None:
    """Leakage against cost: accuracy loss where it was measured, else how far the gradient was turned."""
    attacked = [(number, d, d.worst.identified) for number, d in enumerate(summary.defenses, 1) if d.worst]
    by_loss = any(d.loss is not None for _, d, _ in attacked if not d.control)
    cost: Callable[[DefenseRow], float | None] = (lambda d: d.loss) if by_loss else _turn
    shown = [(number, d, rate, value) for number, d, rate in attacked if (value := cost(d)) is not None]
    if not shown:
        return None
    costs = [value for *_, value in shown]
    spans = {number: span for number, d, *_ in shown if by_loss and (span := _loss_span(d)) is not None}
    ends = [0.0, *costs, *(end for span in spans.values() for end in span)]
    x_values = nice_ticks(min(ends), max(ends), frame.ticks)
    x = scale(x_values, frame.left, frame.right)
    y = scale([0.0, 1.0], frame.bottom, frame.top)
    points = []
    for number, defense, rate, value in shown:
        span = spans.get(number)
        between = f" ({digits(span[0], 1)} to {digits(span[1], 1)}%)" if span else ""
        price = f"accuracy loss {digits(defense.loss, 1)}%{between}" if by_loss else f"gradient cosine {digits(defense.cosine)}"
        tip = f"{defense.spec}: {defense.verdict}; identified {rate_text(rate)}; {price}"
        across = (x(span[0]), x(span[1])) if span else None
        points.append(Point(defense, number, rate, value, x(value), y(rate.rate), y(rate.low), y(rate.high), tip, across))
    base = summary.baseline.identified if summary.baseline else None
    chart = CostChart(
        frame,
        x_title="accuracy loss (PDM, %)" if by_loss else "gradient cosine to the undefended update",
        x_note="how much of the undefended test accuracy is lost" if by_loss else "1 = the update is unchanged",
        x_ticks=[Tick(x(t), _tick(t, x_values) if by_loss else digits(1 - t, 2)) for t in x_values],
        y_ticks=[Tick(y(t / 4), f"{25 * t}%") for t in range(5)],
        points=points,
        numbered=len(points) > DIRECT_LABELS,
        baseline=Tick(y(base.rate), f"no update at all: {percent(base.rate)}") if base else None,
        by_loss=by_loss,
        missing=[d.spec for d in summary.defenses if d not in [p.defense for p in points]],
        narrow=privacy_utility(summary, NARROW) if frame is WIDE else None,
    )
    _label(chart)
    return chart


def _loss_span(defense: DefenseRow) -> tuple[float, float] | None:
    """The interval of the measured loss; one of few seeds is cut, beyond the loss itself, so that the others stay visible."""
    measured = defense.utility
    if defense.control or measured is None or measured.low is None or measured.high is None:
        return None
    loss = defense.loss or 0.0
    return max(measured.low, min(-MOST_GAINED, loss)), min(measured.high, 100.0)


def _turn(defense: DefenseRow) -> float | None:
    """One minus the cosine, so that both kinds of chart have the cheap defenses on the left."""
    if defense.cosine is None:
        return 0.0 if defense.control else None
    return 1 - defense.cosine


def _tick(value: float, all_values: Sequence[float]) -> str:
    step = all_values[1] - all_values[0]
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}".replace("-", "−")


def _label(chart: CostChart) -> None:
    """Name every point beside it; points on one spot share a label. No label covers another or a point."""
    clusters: list[list[Point]] = []
    for point in chart.points:
        home = next((c for c in clusters if math.dist((c[0].x, c[0].y), (point.x, point.y)) < 11), [])
        if not home:
            clusters.append(home)
        home.append(point)
    frame = chart.frame
    taken = [(p.x - 6, p.y - 6, p.x + 6, p.y + 6) for p in chart.points]
    taken += [(p.x - 3, p.high, p.x + 3, p.low) for p in chart.points]
    taken += [(p.span[0], p.y - 3, p.span[1], p.y + 3) for p in chart.points if p.span]
    for cluster in clusters:
        first = cluster[0]
        first.label = ", ".join(str(p.number) if chart.numbered else shorten(p.defense.spec, 24) for p in cluster)
        width = 7.2 * len(first.label) + 4
        spots = [
            (first.x + dx, first.y + dy, anchor)
            for dy in (-8, 17, 4, -24, 33, -40, 49)  # beside the point, off its whisker and off the grid lines
            for dx, anchor in ((8, "start"), (-8, "end"))
        ]
        boxes = {spot: _box(spot, width) for spot in spots}
        inside = [spot for spot, box in boxes.items() if _contains((frame.left + 2, 0, frame.width, frame.bottom + 4), box)]
        spot = min(inside or spots, key=lambda s: sum(_overlap(boxes[s], other) for other in taken))
        first.label_x, first.label_y, first.anchor = spot
        taken.append(boxes[spot])


def _box(spot: tuple[float, float, str], width: float) -> Box:
    x, y, anchor = spot
    left = x if anchor == "start" else x - width
    return left, y - 11, left + width, y + 4


def _contains(outer: Box, inner: Box) -> bool:
    return outer[0] <= inner[0] and outer[1] <= inner[1] and inner[2] <= outer[2] and inner[3] <= outer[3]


def _overlap(a: Box, b: Box) -> float:
    """The area that two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


@dataclass(frozen=True)
class AccuracyLine:
    name: str
    path: str  # the `points` of an SVG polyline
    last: float


@dataclass(frozen=True)
class AccuracyChart(Axes):
    """Accuracy over rounds, one line per defense."""

    lines: list[AccuracyLine]


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean over seeds, where all were measured."""
    rounds = [[value for value in values if value is not None] for values in zip(*curves, strict=False)]
    return tuple(sum(values) / len(values) if len(values) == len(curves) else None for values in rounds)


def accuracy_curves(cells: Iterable[StoredCell], defenses: Iterable[str]) -> AccuracyChart | None:
    """Of these defenses, in their order; a folder may hold cells of other audits too."""
    histories = {cell.defense: _mean_curve(by_seed(cell, "acc_test")) for cell in cells if cell.kind == "utility"}
    curves = {
        defense: curve
        for defense in defenses
        if (curve := [(i, v) for i, v in enumerate(histories.get(defense, ()), 1) if v is not None])
    }
    if not curves:
        return None
    rounds = max(curve[-1][0] for curve in curves.values())
    x_values = [t for t in nice_ticks(1, max(rounds, 2)) if t == int(t)]
    levels = [v for curve in curves.values() for _, v in curve]
    y_values = nice_ticks(min(levels), max(levels))
    x, y = scale(x_values, WIDE.left, WIDE.right), scale(y_values, WIDE.bottom, WIDE.top)
    lines = [AccuracyLine(name, " ".join(f"{x(i)},{y(v)}" for i, v in curve), curve[-1][1]) for name, curve in curves.items()]
    places = 0 if y_values[1] - y_values[0] >= 0.0099 else 1
    x_ticks, y_ticks = [Tick(x(t), str(int(t))) for t in x_values], [Tick(y(t), percent(t, places)) for t in y_values]
    return AccuracyChart(WIDE, x_ticks, y_ticks, lines)


@dataclass(frozen=True)
class Spark:
    """The objective of one attack over its iterations, small."""

    path: str
    first: str
    last: str
    steps: int
    log: bool
    width: int = SPARK[0]
    height: int = SPARK[1]


def objective_curve(history: Mapping[str, Sequence[float | None]]) -> Spark | None:
    """Logarithmic when the objective falls by more than a hundredfold."""
    values = history.get("objective", ())
    steps = history.get("step") or range(len(values))
    curve = [(s, v) for s, v in zip(steps, values, strict=False) if s is not None and v is not None]
    if len(curve) < 2:
        return None
    thin = max(1, math.ceil(len(curve) / SPARK_POINTS))
    curve = curve[:-1:thin] + curve[-1:]
    lowest, highest = min(v for _, v in curve), max(v for _, v in curve)
    log = lowest > 0 and highest / lowest > 100
    level = math.log10 if log else float
    x = scale([curve[0][0], curve[-1][0]], 2, SPARK[0] - 2)
    y = scale([level(lowest), level(highest)], SPARK[1] - 3, 3)
    path = " ".join(f"{x(s)},{y(level(v))}" for s, v in curve)
    return Spark(path, f"{curve[0][1]:.3g}", f"{curve[-1][1]:.3g}", int(curve[-1][0]), log)
