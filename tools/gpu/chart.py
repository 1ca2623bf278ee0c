"""Distributions as a chart: share of samples at or below a value, the value on a logarithmic axis. SVG text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, LEGEND = 720, 320, 48, 36, 28, 220
COLOURS = ("#0b6e99", "#c2410c", "#4d7c0f", "#7e22ce", "#b91c1c", "#0f766e", "#a16207", "#475569")
POINTS = 120  # of a curve: what a screen can show


def decades(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]


def points(samples: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share at or below it), thinned. Values of zero and below have no place on the axis."""
    ordered = sorted(value for value in samples if value > 0)
    step = max(1, len(ordered) // POINTS)
    kept = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
    return [(ordered[i], (i + 1) / len(ordered)) for i in kept]


def curves(title: str, figures: Mapping[str, Sequence[float]], unit: str) -> str:
    """One curve a figure; "" where there is nothing to draw."""
    drawn = {name: line for name, samples in figures.items() if (line := points(samples))}
    if not drawn:
        return ""
    values = [value for line in drawn.values() for value, _ in line]
    ticks = decades(min(values), max(values) * 1.0001)
    span = max(1e-9, math.log10(ticks[-1] / ticks[0]))
    inner_w, inner_h = WIDTH - LEFT - LEGEND, HEIGHT - TOP - BOTTOM

    def x(value: float) -> float:
        return LEFT + inner_w * math.log10(value / ticks[0]) / span

    def y(share: float) -> float:
        return TOP + inner_h * (1 - share)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">']
    out.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/><g font-size="11" fill="#333">')
    out.append(f'<text x="{LEFT}" y="16" font-size="13">{escape(title)}</text>')
    for tick in ticks:
        out.append(f'<path d="M{x(tick):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        out.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{tick:g}</text>')
    for share in (0, 0.5, 0.9, 0.99):
        out.append(f'<path d="M{LEFT} {y(share):.1f}h{inner_w}" stroke="#eee"/>')
        out.append(f'<text x="{LEFT - 4}" y="{y(share) + 4:.1f}" text-anchor="end">{share:g}</text>')
    out.append(f'<text x="{LEFT + inner_w / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(unit)}</text>')
    for i, (name, line) in enumerate(drawn.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = "L".join(f"{x(value):.1f} {y(share):.1f}" for value, share in line)
        out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        out.append(f'<text x="{WIDTH - LEGEND + 10}" y="{TOP + 14 * i + 10}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*out, "</g></svg>", ""])
