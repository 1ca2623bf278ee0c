"""A small line chart as SVG, without a plotting library: a few series over the same x values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 70, 20, 50, 55
COLOURS = ("#c0392b", "#2471a3", "#1e8449", "#7d3c98")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchChart:
    title: str
    x_label: str
    y_label: str
    xs: Sequence[float]
    series: Mapping[str, Sequence[float]]


def _steps(top: float) -> list[float]:
    """Round numbers from 0 to just above top."""
    size = 10 ** (len(str(int(top))) - 1)
    step = next(size * factor for factor in (0.2, 0.5, 1, 2, 5) if top / (size * factor) <= 6)
    return [step * count for count in range(int(top / step) + 2)]


def draw(chart: BenchChart) -> str:
    ticks = _steps(max(max(values) for values in chart.series.values()))
    low, high = min(chart.xs), max(chart.xs)

    def x_at(value: float) -> float:
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y_at(value: float) -> float:
        return HEIGHT - BOTTOM - value / ticks[-1] * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="26" font-size="16">{escape(chart.title)}</text>',
        f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(chart.x_label)}</text>',
        f'<text transform="translate(18 {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>",
    ]
    for tick in ticks:
        y = y_at(tick)
        out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    out += [f'<text x="{x_at(x):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{x:g}</text>' for x in chart.xs]
    for colour, (name, values) in zip(COLOURS, chart.series.items(), strict=False):
        points = [f"{x_at(x):.1f} {y_at(value):.1f}" for x, value in zip(chart.xs, values, strict=True)]
        out.append(f'<path d="M{"L".join(points)}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        out += [f'<circle cx="{point.split()[0]}" cy="{point.split()[1]}" r="4" fill="{colour}"/>' for point in points]
        last = y_at(values[-1])
        out.append(
            f'<text x="{WIDTH - RIGHT - 6}" y="{last - 10:.1f}" text-anchor="end" fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join([*out, "</svg>", ""])
