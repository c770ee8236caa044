"""A table as an SVG: rows as lines across its columns, or two rows against each other point by point."""

from collections.abc import Sequence
from statistics import linear_regression
from xml.sax.saxutils import escape

from gradveil.recipes.recipe import Recipe
from gradveil.recipes.result import RecipeResult
from gradveil.report.chart import nice_ticks, scale

WIDTH, HEIGHT, LEFT, BOTTOM, GAP = 250, 240, 44, 44, 12  # of a panel
WIDE, LEGEND = 460, 170  # of a chart of lines, and of the names beside it
INK, FAINT = "#333", "#ddd"
COLOURS = ("#2a6fb0", "#d1622b", "#3a8f4d", "#8a4fa3", "#b03a5b", "#7a7a7a")


def chart(recipe: Recipe, result: RecipeResult) -> str | None:
    """The chart that the recipe asks for, if the result has the numbers for it."""
    if recipe.scatter and result.scatter:
        panels = [
            _scatter(i * WIDTH, column, *points, recipe.scatter.across)
            for i, (column, points) in enumerate(result.scatter.items())
        ]
        return _svg(WIDTH * len(panels), panels)
    entries = {row: [columns[c] for c in recipe.lines] for row, columns in result.rows.items()}
    numbers = {row: [e[0] for e in values if not isinstance(e, str)] for row, values in entries.items()}
    complete = {row: values for row, values in numbers.items() if len(values) == len(recipe.lines) > 0}
    return _svg(WIDE + LEGEND, [_lines(complete, recipe.lines)]) if complete else None


def _svg(width: int, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="{INK}"><rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def _grid(ruler: Sequence[float], start: float, end: float, top: float, bottom: float) -> list[str]:
    """Lines across, with their numbers on the left."""
    y = scale(ruler, bottom, top)
    lines = [f'<path d="M{start} {y(tick)}H{end}" stroke="{FAINT}"/>' for tick in ruler]
    return lines + [_text(start - 6, y(tick) + 4, f"{tick:.3g}", "end") for tick in ruler]


def _scatter(left: float, up: str, xs: Sequence[float], ys: Sequence[float], across: str) -> str:
    start, end, top, bottom = left + LEFT, left + WIDTH - GAP, GAP + 12, HEIGHT - BOTTOM
    rulers = [nice_ticks(min(values), max(values), 4) for values in (xs, ys)]
    x, y = scale(rulers[0], start, end), scale(rulers[1], bottom, top)
    parts = [_text(start, GAP, up, more=' font-weight="bold"'), *_grid(rulers[1], start, end, top, bottom)]
    parts += [_text(x(tick), bottom + 15, f"{tick:.3g}", "middle") for tick in rulers[0]]
    parts.append(_text((start + end) / 2, HEIGHT - GAP, across, "middle"))
    parts += [
        f'<circle cx="{x(a)}" cy="{y(b)}" r="2.5" fill="{COLOURS[0]}" fill-opacity="0.6"/>' for a, b in zip(xs, ys, strict=True)
    ]
    if len(set(xs)) > 1:
        slope, at_zero = linear_regression(xs, ys)
        (x1, y1), (x2, y2) = [(x(value), y(at_zero + slope * value)) for value in (min(xs), max(xs))]
        parts.append(f'<path d="M{x1} {y1}L{x2} {y2}" stroke="{INK}" stroke-width="1.2" stroke-dasharray="4 3"/>')
    return "\n".join(parts)


def _lines(rows: dict[str, list[float]], columns: Sequence[str]) -> str:
    start, end, top, bottom = LEFT, WIDE - GAP, GAP, HEIGHT - BOTTOM
    every = [value for values in rows.values() for value in values]
    ruler = nice_ticks(min(every), max(every), 4)
    x, y = scale((0, len(columns) - 1), start + 2 * GAP, end - 2 * GAP), scale(ruler, bottom, top)
    parts = _grid(ruler, start, end, top, bottom)
    parts += [_text(x(i), bottom + 15, column, "middle") for i, column in enumerate(columns)]
    for number, (row, values) in enumerate(rows.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = "L".join(f"{x(i)} {y(value)}" for i, value in enumerate(values))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts += [f'<circle cx="{x(i)}" cy="{y(value)}" r="2.5" fill="{colour}"/>' for i, value in enumerate(values)]
        height = top + 6 + 18 * number
        parts.append(f'<path d="M{WIDE} {height}h18" stroke="{colour}" stroke-width="1.8"/>')
        parts.append(_text(WIDE + 24, height + 4, row))
    return "\n".join(parts)
