"""Two rows of a table against each other, point by point: a panel for every column, as one SVG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import linear_regression
from xml.sax.saxutils import escape

from gradveil.files import write_text
from gradveil.recipes.claims import Value
from gradveil.report.chart import nice_ticks, scale

WIDTH, HEIGHT, LEFT, BOTTOM, GAP = 250, 240, 44, 44, 12  # of a panel
INK, FAINT, DOT = "#333", "#ddd", "#2a6fb0"


def write(file: Path, panels: Mapping[str, tuple[Value, Value]], across: str) -> None:
    """A panel has the name of what goes up. Values know their single numbers (`each`), in the same order."""
    drawn = [_panel(i * WIDTH, up, x.each, y.each, across) for i, (up, (x, y)) in enumerate(panels.items())]
    width = WIDTH * len(panels)
    write_text(
        file,
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="{INK}"><rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n",
    )


def _panel(left: float, up: str, xs: tuple[float, ...], ys: tuple[float, ...], across: str) -> str:
    start, end, top, bottom = left + LEFT, left + WIDTH - GAP, GAP + 12, HEIGHT - BOTTOM
    rulers = [nice_ticks(min(values), max(values), 4) for values in (xs, ys)]
    x, y = scale(rulers[0], start, end), scale(rulers[1], bottom, top)
    parts = [f'<text x="{start}" y="{GAP}" font-weight="bold">{escape(up)}</text>']
    for tick in rulers[0]:
        parts.append(f'<text x="{x(tick)}" y="{bottom + 15}" text-anchor="middle">{tick:.3g}</text>')
    for tick in rulers[1]:
        parts.append(f'<path d="M{start} {y(tick)}H{end}" stroke="{FAINT}"/>')
        parts.append(f'<text x="{start - 6}" y="{y(tick) + 4}" text-anchor="end">{tick:.3g}</text>')
    middle = (start + end) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - GAP}" text-anchor="middle">{escape(across)}</text>')
    parts += [
        f'<circle cx="{x(a)}" cy="{y(b)}" r="2.5" fill="{DOT}" fill-opacity="0.6"/>'
        for a, b in zip(xs, ys, strict=True)
    ]
    if len(set(xs)) > 1:
        slope, at_zero = linear_regression(xs, ys)
        (x1, y1), (x2, y2) = [(x(value), y(at_zero + slope * value)) for value in (min(xs), max(xs))]
        parts.append(f'<path d="M{x1} {y1}L{x2} {y2}" stroke="{INK}" stroke-width="1.2" stroke-dasharray="4 3"/>')
    return "\n".join(parts)
