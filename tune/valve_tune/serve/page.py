"""training.html: the loss curve and a strip of when the job ran. One file, no scripts, nothing loaded."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Sequence
from typing import Any

from valve_tune.train.spec import JobSpec

WIDTH, HEIGHT, LEFT, BOTTOM = 900, 320, 60, 30
POINTS = 1500  # more than the page has pixels: thinned, and the extremes of what is left out are kept
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:940px;margin:2em auto;padding:0 1em;color:#1b1b1b}"
    "svg{width:100%;height:auto}td{padding:.1em 1.2em .1em 0}text{font:12px system-ui,sans-serif;fill:#555}"
)
Line = dict[str, Any]


def thinned(steps: Sequence[Line]) -> list[Line]:
    """The lowest and highest loss of each group of neighbours."""
    size = max(1, -(-2 * len(steps) // POINTS))
    kept = []
    for start in range(0, len(steps), size):
        group = sorted(steps[start : start + size], key=lambda line: float(line["loss"]))
        kept += sorted(
            {line["step"]: line for line in (group[0], group[-1])}.values(), key=lambda line: int(line["step"])
        )
    return kept


def finite(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if math.isfinite(line.get("loss", math.nan))]


def curve(steps: Sequence[Line], evaluated: Sequence[Line] = ()) -> str:
    points, judged = thinned(finite(steps)), thinned(finite(evaluated))
    if not points:
        return "<p>No step is done yet.</p>"
    losses = [line["loss"] for line in (*points, *judged)]
    low, high = min(losses), max(losses)
    room = (high - low) or 1.0
    first, last = points[0]["step"], points[-1]["step"]

    def place(line: Line) -> str:
        across = LEFT + (WIDTH - LEFT - 10) * (line["step"] - first) / max(1, last - first)
        down = 10 + (HEIGHT - BOTTOM - 10) * (high - line["loss"]) / room
        return f"{across:.1f},{down:.1f}"

    held_out = [place(line) for line in judged if first <= line["step"] <= last]
    dots = "".join(
        f'<circle r="3" fill="#b5460f" cx="{x}" cy="{y}"/>' for x, y in (each.split(",") for each in held_out)
    )
    if held_out:
        dots += f'<polyline fill="none" stroke="#b5460f" stroke-width="1.5" points="{" ".join(held_out)}"/>'
        dots += f'<text x="{WIDTH - 150}" y="24" style="fill:#b5460f">held-out data</text>'

    marks = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        down = 10 + (HEIGHT - BOTTOM - 10) * share
        marks.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{down:.1f}" y2="{down:.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{down + 4:.1f}" text-anchor="end">{high - room * share:.3f}</text>'
        )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="loss by step">{"".join(marks)}'
        f'<polyline fill="none" stroke="#0b6e99" stroke-width="1.5" points="{" ".join(map(place, points))}"/>{dots}'
        f'<text x="{LEFT}" y="{HEIGHT - 8}">step {first}</text>'
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 8}" text-anchor="end">step {last}</text></svg>'
    )


def ran(steps: Sequence[Line], join_s: float = 0.5) -> list[tuple[float, float]]:
    """Stretches of time in which steps were worked on: (begin, end), near ones joined."""
    stretches: list[tuple[float, float]] = []
    for begin, end in sorted((line["time"] - line.get("seconds", 0.0), line["time"]) for line in steps):
        if stretches and begin <= stretches[-1][1] + join_s:
            stretches[-1] = stretches[-1][0], max(end, stretches[-1][1])
        else:
            stretches.append((begin, end))
    return stretches


def strip(steps: Sequence[Line]) -> str:
    stretches = ran(steps)
    if not stretches:
        return ""
    begin, end = stretches[0][0], stretches[-1][1]
    whole = (end - begin) or 1.0
    bars = "".join(
        f'<rect x="{WIDTH * (low - begin) / whole:.1f}" y="0" height="28" fill="#0b6e99" '
        f'width="{max(0.5, WIDTH * (high - low) / whole):.1f}"/>'
        for low, high in stretches
    )
    share = sum(high - low for low, high in stretches) / whole
    return (
        f"<h2>When it ran</h2><p>{share:.0%} of {whole:,.0f} s, from {_at(begin)} to {_at(end)}.</p>"
        f'<svg viewBox="0 0 {WIDTH} 28" role="img" aria-label="when it ran"><rect width="{WIDTH}" height="28" '
        f'fill="#eee"/>{bars}</svg>'
    )


def _at(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def best(evaluated: Sequence[Line]) -> str:
    lines = finite(evaluated)
    if not lines:
        return "none yet"
    least = min(lines, key=lambda line: (line["loss"], line["step"]))
    return f"{len(lines)}; the best has loss {least['loss']:.4f}, at step {least['step']}"


def render(spec: JobSpec, state: str, steps: Sequence[Line], evaluated: Sequence[Line] = ()) -> str:
    rows = {
        "state": state,
        "step": f"{steps[-1]['step'] if steps else 0} of {spec.max_steps}",
        "base": spec.model,
        "data": spec.data,
        "adapter": f"rank {spec.lora_r}, alpha {spec.lora_alpha:g}, on {', '.join(spec.target_modules)}",
        **({"evaluations": best(evaluated)} if spec.eval_data else {}),
        "tokens trained": f"{sum(line.get('tokens', 0) for line in steps):,}",
    }
    table = "".join(f"<tr><td>{name}</td><td>{html.escape(str(value))}</td></tr>" for name, value in rows.items())
    title = html.escape(spec.out.rstrip("/").rpartition("/")[2])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}: training</title><style>{STYLE}</style>'
        f"<h1>{title}</h1><table>{table}</table><h2>Loss</h2>{curve(steps, evaluated)}{strip(steps)}</html>\n"
    )
