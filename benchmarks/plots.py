"""Small plots as SVG text: bars of ratios around 1, and lines on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#1b6ca8", "#d1603d", "#5b8c5a", "#8d6a9f", "#b8952f", "#555555")
FONT = 'font-family="sans-serif" font-size="12"'


def ratio_bars(title: str, rows: Mapping[str, Mapping[str, float]], *, below: str, above: str) -> str:
    """Bars on a logarithmic axis, from 1 to the right or to the left; one colour a series.

    Args:
        title: over the plot.
        rows: for each row its positive values by series.
        below: what a bar to the left says.
        above: what a bar to the right says.
    """
    series = list(dict.fromkeys(name for row in rows.values() for name in row))
    values = [value for row in rows.values() for value in row.values()]
    reach = max([math.log10(2), *(abs(math.log10(value)) for value in values)])
    left, middle, half, bar = 300, 560, 210, 14
    parts, y = [text(10, 20, title, weight="bold")], 64
    parts += [text(middle - 8, 44, f"← {below}", anchor="end"), text(middle + 8, 44, f"{above} →")]
    for label, row in rows.items():
        parts.append(text(left, y + bar * len(row) / 2 + 4, label, anchor="end"))
        for name, value in row.items():
            length = math.log10(value) / reach * half
            colour = COLOURS[series.index(name) % len(COLOURS)]
            parts.append(rectangle(min(middle, middle + length), y, max(1.0, abs(length)), bar - 2, colour))
            side = 6 if length >= 0 else -6
            parts.append(
                text(middle + length + side, y + 10, f"{value:.3g}", anchor="start" if side > 0 else "end")
            )
            y += bar
        y += 10
    parts.append(line(middle, 52, middle, y))
    parts += legend(series, y + 18)
    return svg(840, y + 34, parts)


def log_lines(
    title: str, x_label: str, y_label: str, series: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """Lines through points on two logarithmic axes.

    Args:
        title: over the plot.
        x_label: of the horizontal axis.
        y_label: of the vertical axis.
        series: positive (x, y) points by name.
    """
    points = [point for each in series.values() for point in each]
    xs, ys = Axis([x for x, _ in points], 80, 600), Axis([y for _, y in points], 300, 50)
    parts = [
        text(10, 20, title, weight="bold"),
        text(340, 345, x_label, anchor="middle"),
        text(10, 42, y_label),
    ]
    for tick in xs.ticks:
        parts += [
            line(xs.at(tick), 50, xs.at(tick), 300, "#dddddd"),
            text(xs.at(tick), 318, label(tick), "middle"),
        ]
    for tick in ys.ticks:
        parts += [
            line(80, ys.at(tick), 600, ys.at(tick), "#dddddd"),
            text(74, ys.at(tick) + 4, label(tick), "end"),
        ]
    for index, each in enumerate(series.values()):
        colour = COLOURS[index % len(COLOURS)]
        places = [(xs.at(x), ys.at(y)) for x, y in each]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    parts += legend(list(series), 368)
    return svg(640, 384, parts)


class Axis:
    """A logarithmic axis.

    Args:
        values: that must lie on it; all positive.
        start: where the least stands.
        stop: where the greatest stands.
    """

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        logs = [math.log10(value) for value in values]
        self._least, self._most = min(logs), max(logs)
        if self._most - self._least < 0.3:
            self._least, self._most = self._least - 0.15, self._most + 0.15
        self._start, self._stop = start, stop

    def at(self, value: float) -> float:
        """The place of a value."""
        share = (math.log10(value) - self._least) / (self._most - self._least)
        return self._start + share * (self._stop - self._start)

    @property
    def ticks(self) -> list[float]:
        """Round values on the axis: powers of ten, with 2 and 5 between where few are there."""
        powers = range(math.floor(self._least), math.ceil(self._most) + 1)
        few = self._most - self._least < 2
        steps = (1, 2, 5) if few else (1,)
        candidates = [step * 10.0**power for power in powers for step in steps]
        return [each for each in candidates if self._least - 1e-9 <= math.log10(each) <= self._most + 1e-9]


def label(value: float) -> str:
    """A tick as text."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def legend(series: Sequence[str], y: float) -> list[str]:
    """Names of the series in their colours, in a row."""
    parts, x = [], 80.0
    for index, name in enumerate(series):
        parts += [rectangle(x, y - 9, 10, 10, COLOURS[index % len(COLOURS)]), text(x + 14, y, name)]
        x += 30 + 7 * len(name)
    return parts


def text(x: float, y: float, words: str, anchor: str = "start", *, weight: str = "normal") -> str:
    """Words at a place."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" {FONT} text-anchor="{anchor}" font-weight="{weight}" fill="#222222">'
        f"{escape(words)}</text>"
    )


def rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A filled rectangle."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = "#222222") -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    """A whole file on a white ground."""
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">\n'
        f"{rectangle(0, 0, width, height, '#ffffff')}\n{inside}\n</svg>\n"
    )
