"""Charts as inline SVG, written by hand: no script, no web font, values on hover and in the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

PALETTE = ("#0072b2", "#e69f00", "#56b4e9", "#d55e00", "#009e73", "#f0e442", "#333333", "#cc79a7")
"""Told apart by the colour-blind (Okabe and Ito)."""
HATCHES = ("", "M0 6L6 0", "M0 3H6", "M0 0L6 6")
"""What lies on a colour, so that a print without colours tells neighbours apart: nothing, or lines."""
DASHES = ("", "7 3", "2 3", "9 3 2 3")
BAD, INK, FAINT = "#a4161a", "#24292f", "#d8dee4"
LEGEND_COLUMNS, LEGEND_WIDTH = 3, 235
LEAST_LABELLED = 3.0
"""Pixels by which a tornado's bar must leave the centre to carry a label."""


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 11, colour: str = INK) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}>{escape(words)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = FAINT, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'


def _rect(x: float, y: float, width: float, height: float, colour: str, title: str = "", opacity: float = 1.0) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.8):.1f}" height="{max(height, 0.8):.1f}"'
    shade = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    return f'<rect {place} fill="{colour}"{shade}><title>{escape(title)}</title></rect>'


def _wrap(width: float, height: float, parts: Sequence[str], label: str) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="100%"'
    face = f'role="img" aria-label="{escape(label)}" font-family="system-ui,sans-serif"'
    hatches = "".join(
        f'<pattern id="h{i}" width="6" height="6" patternUnits="userSpaceOnUse"><path d="{path}" stroke="#fff" '
        'stroke-width="1.6"/></pattern>'
        for i, path in enumerate(HATCHES)
        if path
    )
    return f"<svg {size} {face}><defs>{hatches}</defs>{''.join(parts)}</svg>"


def picture(drawn: str) -> str:
    """A chart as a file of its own; white behind it, as readers may have dark pages."""
    head, rest = drawn.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg" style="background:#fff">{rest}\n'


def look_of(series: int) -> tuple[str, int]:
    """Colour and hatch of a series: no two of the first 32 have both alike."""
    return PALETTE[series % len(PALETTE)], (series + series // len(PALETTE)) % len(HATCHES)


def _filled(x: float, y: float, width: float, height: float, series: int, title: str = "") -> list[str]:
    colour, hatch = look_of(series)
    parts = [_rect(x, y, width, height, colour, title)]
    return [*parts, _rect(x, y, width, height, f"url(#h{hatch})", title)] if hatch else parts


def _legend(names: Sequence[str], left: float) -> tuple[list[str], float]:
    """The legend and the height that it takes."""
    parts = []
    for i, name in enumerate(names):
        x, y = left + (i % LEGEND_COLUMNS) * LEGEND_WIDTH, 12 + 16 * (i // LEGEND_COLUMNS)
        parts += [*_filled(x, y - 9, 12, 10, i, name), _text(x + 17, y, name)]
    return parts, 26 + 16 * math.ceil(len(names) / LEGEND_COLUMNS)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers inside [low, high]."""
    span = (high - low) or 1.0
    step = 10 ** math.floor(math.log10(span / wanted))
    step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= wanted)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """What fits on a bar."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return "0" if abs(value) < 0.005 else f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"


def figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _levels(values: Sequence[float], at: Callable[[float], float], left: float, right: float) -> list[str]:
    """A line across and a figure beside it for each value of the upright axis."""
    lines = [_line(left, at(value), right, at(value)) for value in values]
    return lines + [_text(left - 5, at(value) + 3, figure(value), "end", 10) for value in values]


def grouped_bars(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    unit: str,
    bound: float | None = None,
    cap: float | None = None,
    halves: Mapping[str, Sequence[float | None]] | None = None,
) -> str:
    """Bars side by side for every group, each with its value; one that exceeds `cap` is cut. `halves`: half the
    interval of each bar."""
    finite = [value for values in series.values() for value in values if value is not None]
    top = max([*finite, bound or 0.0, 1e-9])
    top = 1.16 * (min(top, cap) if cap is not None else top)
    low = max(min([0.0, *finite]), -top)
    bar, gap, left, plot, margin = 13.0, 16, 52, 220, 76
    least = LEGEND_COLUMNS * LEGEND_WIDTH - margin
    fill = min(max(1.0, least / ((bar * len(series) + gap) * max(len(groups), 1))), 4.0)
    bar, gap = bar * fill, round(gap * fill)  # few groups fill the page, too
    group_width = bar * len(series) + gap
    parts, base = _legend(list(series), left)
    right = left + group_width * len(groups)
    width = max(right, left + least) + margin

    def at(value: float) -> float:
        return base + plot * (1 - (min(max(value, low), top) - low) / (top - low))

    parts.append(_text(4, base - 6, unit, size=10))
    parts += _levels(ticks(low, top), at, left, right)
    for g, group in enumerate(groups):
        x0 = left + g * group_width + gap / 2
        parts.append(_text(x0 + bar * len(series) / 2, base + plot + 16, group, "middle"))
        for s, (name, values) in enumerate(series.items()):
            value = values[g]
            if value is None:
                continue
            x, title = x0 + s * bar, f"{group}, {name}: {value:.4g} {unit}"
            y = min(at(value), at(0))
            parts += _filled(x, y, bar - 2, abs(at(value) - at(0)), s, title)
            half = halves[name][g] if halves else None
            if half and value <= top:
                middle, up, down = x + bar / 2 - 1, at(value + half), at(value - half)
                parts += [_line(middle, up, middle, down, INK)]
                parts += [_line(middle - 2, end, middle + 2, end, INK) for end in (up, down) if base < end]
            head = min(at(value + (half or 0.0)), at(0)) if value <= top else base + 34
            turn = f'transform="translate({x + bar - 3:.1f} {head - 3:.1f}) rotate(-90)"'
            halo = 'paint-order="stroke" stroke="#fff" stroke-width="2.5"'
            parts.append(f'<text {turn} font-size="9" fill="{INK}" {halo}>{short(value)}</text>')
    parts.append(_line(left, at(0), right, at(0), INK))
    if bound is not None:
        parts.append(_line(left, at(bound), right, at(bound), BAD, "5 3"))
        parts.append(_text(right + 4, at(bound) + 3, f"bound {figure(bound)}", "start", 10, BAD))
    return _wrap(width, base + plot + 30, parts, unit)


def curves(
    series: Mapping[str, Sequence[tuple[float, float]]], *, x_unit: str, y_unit: str, log_x: bool = False
) -> str:
    """Curves over one axis."""
    left, plot_w, plot = 60, 640, 230
    parts, base = _legend(list(series), left)
    points = [point for values in series.values() for point in values]
    scale = math.log10 if log_x else float
    x_low, x_high = min(scale(x) for x, _ in points), max(scale(x) for x, _ in points)
    y_low, y_high = min(0.0, *(y for _, y in points)), max(1e-9, *(y for _, y in points)) * 1.05

    def px(x: float) -> float:
        return left + plot_w * (scale(x) - x_low) / ((x_high - x_low) or 1.0)

    def py(y: float) -> float:
        return base + plot * (1 - (y - y_low) / (y_high - y_low))

    parts.append(_text(4, base - 6, y_unit, size=10))
    parts += _levels(ticks(y_low, y_high), py, left, left + plot_w)
    distinct = sorted({x for x, _ in points})
    for tick in distinct if log_x or len(distinct) <= 8 else ticks(x_low, x_high, 8):
        parts.append(_text(px(tick), base + plot + 15, figure(tick), "middle", 10))
    parts.append(_text(left + plot_w, base + plot + 30, x_unit, "end", 10))
    for s, values in enumerate(series.values()):
        colour, dash = PALETTE[s % len(PALETTE)], DASHES[look_of(s)[1]]
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in values)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        if len(values) <= 24:
            parts += [f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="2.6" fill="{colour}"/>' for x, y in values]
    return _wrap(left + plot_w + 60, base + plot + 36, parts, f"{y_unit} over {x_unit}")


def points(series: Mapping[str, Sequence[tuple[float, float]]], *, x_unit: str, y_unit: str) -> str:
    """Points by name, numbered where they lie: two may be too close for colours."""
    left, plot_w, plot, base = 60, 520, 300, 26
    every = [point for values in series.values() for point in values]
    xs, ys = [x for x, _ in every], [y for _, y in every]
    x_low, x_high = min(0.0, *xs), max(1e-9, *xs) * 1.05
    y_low, y_high = min(ys) - 0.05 * (max(ys) - min(ys) or 1.0), max(ys) + 0.05 * (max(ys) - min(ys) or 1.0)

    def px(x: float) -> float:
        return left + plot_w * (x - x_low) / (x_high - x_low)

    def py(y: float) -> float:
        return base + plot * (1 - (y - y_low) / (y_high - y_low))

    parts = [_text(4, base - 10, y_unit, size=10), _text(left + plot_w, base + plot + 30, x_unit, "end", 10)]
    parts += _levels(ticks(y_low, y_high), py, left, left + plot_w)
    parts += [_text(px(tick), base + plot + 15, figure(tick), "middle", 10) for tick in ticks(x_low, x_high)]
    for number, (name, values) in enumerate(series.items(), start=1):
        colour = PALETTE[(number - 1) % len(PALETTE)]
        for x, y in values:
            circle = f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3.5" fill="{colour}">'
            parts.append(f"{circle}<title>{escape(name)}: {figure(x)}, {figure(y)}</title></circle>")
            parts.append(_text(px(x) + 6, py(y) - 3, str(number), size=10, colour=colour))
        parts.append(_text(left + plot_w + 16, base + 16 * number, f"{number} {name}", colour=colour))
    return _wrap(left + plot_w + 260, base + plot + 36, parts, f"{y_unit} over {x_unit}")


def tornado(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, centre: float, unit: str) -> str:
    """How far a figure moves from `centre`: for every parameter its settings and the figure at each.

    Colour says the side alone; of several settings on one side the bars lie on each other, the longest at the
    back, and the label names them from the longest to the shortest.
    """
    values = [centre, *(value for _, settings in rows for _, value in settings)]
    pad = (max(values) - min(values)) * 0.2 or abs(centre) * 0.1 or 1.0
    low, high = min(values) - pad, max(values) + pad
    left, plot_w, step, base = 190, 560, 26, 16

    def px(value: float) -> float:
        return left + plot_w * (value - low) / (high - low)

    def reach(row: tuple[str, Sequence[tuple[str, float]]]) -> float:
        return max(abs(value - centre) for _, value in row[1])

    bottom = base + step * len(rows)
    parts = []
    for tick in ticks(low, high, 6):
        parts += [_line(px(tick), base, px(tick), bottom), _text(px(tick), bottom + 15, figure(tick), "middle", 10)]
    for i, (name, settings) in enumerate(sorted(rows, key=reach, reverse=True)):
        y = base + i * step + 5
        parts.append(_text(left - 8, y + 12, name, "end"))
        for side in (-1, 1):
            mine = [one for one in settings if (1 if one[1] >= centre else -1) == side]
            parts += _side(name, mine, side, px, px(centre), y, unit)
    parts.append(_line(px(centre), base - 4, px(centre), bottom, INK))
    parts.append(_text(left + plot_w, bottom + 29, unit, "end", 10))
    return _wrap(left + plot_w + 50, bottom + 36, parts, f"tornado of {unit}")


def _side(
    name: str,
    settings: Sequence[tuple[str, float]],
    side: int,
    px: Callable[[float], float],
    centre: float,
    y: float,
    unit: str,
) -> list[str]:
    """One side of a row: bars from the longest to the shortest, named in that order at the end of the longest."""
    ordered = sorted(settings, key=lambda one: -abs(px(one[1]) - centre))
    parts = [
        _rect(min(centre, px(value)), y, abs(px(value) - centre), 15, PALETTE[0 if side > 0 else 1],
              f"{name} = {label}: {value:.4g} {unit}", 0.45)
        for label, value in ordered
    ]  # fmt: skip
    seen = [label for label, value in ordered if abs(px(value) - centre) > LEAST_LABELLED]
    if seen:
        end = px(ordered[0][1]) + 4 * side
        parts.append(_text(end, y + 11, " · ".join(seen), "start" if side > 0 else "end", 10))
    return parts


def heatmap(rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], *, unit: str) -> str:
    """A grid of figures, darker for larger."""
    cell_w, cell_h, left, base = 78, 26, 110, 24
    finite = [value for row in values for value in row if value is not None]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    parts = [_text(left + (j + 0.5) * cell_w, base - 7, name, "middle", 10) for j, name in enumerate(columns)]
    for i, name in enumerate(rows):
        y = base + i * cell_h
        parts.append(_text(left - 8, y + 17, name, "end"))
        for j, value in enumerate(values[i]):
            if value is None:
                continue
            share = (value - low) / ((high - low) or 1.0)
            colour = "#fff" if share > 0.55 else INK
            parts.append(_rect(left + j * cell_w, y, cell_w - 2, cell_h - 2, PALETTE[0], "", 0.08 + 0.8 * share))
            parts.append(_text(left + (j + 0.5) * cell_w - 1, y + 17, figure(value), "middle", 11, colour))
    parts.append(_text(left, base + len(rows) * cell_h + 14, unit, size=10))
    return _wrap(left + cell_w * len(columns) + 10, base + cell_h * len(rows) + 22, parts, unit)
