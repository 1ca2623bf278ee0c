"""Lays the findings out as one HTML page without anything from elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from valve_scheduler.report.worth import Candidate, Findings, PoolWorth, Price, SlaWorth

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:.5rem 0 1.5rem}td,th{padding:.25rem .8rem;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child{text-align:left}.note{color:#666}"
)
SETS = (
    "The same for jobs of that many GPUs, one kind at a time. Two GPUs serve one job only where they are busy at the "
    "same times; how far they are is taken from each node's last report for all the hours."
)
PRICE_HEAD = ("pod", "busy h", "preemptions", "delay s", "share of busy time")


def html(found: Findings) -> str:
    saved = "Whole GPUs of batch work, on average. A job of that SLA is placed where the product's forecast reaches it"
    saved += " and gets what the hour then brought; kept is how often that was at least the SLA."
    paid = (
        f"One preemption for each time a service let go of its GPUs, {found.stop_ms:.2f} ms each ({found.stop_source})."
    )
    paid += " A service whose share is above 0.025 is better left alone."
    parts = [
        "<!doctype html><meta charset=utf-8><title>Valve report</title>",
        f"<style>{STYLE}</style><h1>Valve report</h1>",
        f"<p>{escape(headline(found))}</p>",
        *_section("What would have been saved", saved, _pool_head(found), map(_pool_row, found.pools)),
        *_section("Jobs over several GPUs of a node", SETS, _set_head(found), _set_rows(found)),
        *_section("What online services would have paid, at most", paid, PRICE_HEAD, map(_price_row, found.prices)),
        *_section("Who could be offline work", "", ["owner", "pods", "why"], map(_candidate_row, found.candidates)),
        *(f"<p class=note>{escape(note)}</p>" for note in found.notes),
    ]
    return "\n".join(parts) + "\n"


def _section(title: str, note: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    said = [f"<p class=note>{escape(note)}</p>"] if note else []
    return [f"<h2>{escape(title)}</h2>", *said, _table(head, rows)]


def _price_row(one: Price) -> list[str]:
    hours, times = f"{one.busy_s / 3600:.1f}", f"{one.preemptions:.0f}"
    return [f"{one.namespace}/{one.pod}", hours, times, f"{one.delay_s:.2f}", f"{one.share:.4f}"]


def _candidate_row(one: Candidate) -> list[str]:
    return [f"{one.namespace}/{one.owner}", str(one.pods), one.why]


def headline(found: Findings) -> str:
    """One sentence for the decision."""
    if not found.pools:
        return (
            f"No GPU has figures for the last {found.hours} hours ({found.source}): is the daemon running and scraped?"
        )
    whole = found.pools[0]
    worth = ", ".join(f"{level.gpus_saved:.1f} at SLA {level.sla:g}" for level in whole.levels)
    text = f"In {found.hours} hours {whole.gpus} GPUs on {whole.nodes} nodes would have saved {worth} ({found.source})."
    if found.uninjected:
        text += f" {found.uninjected:.0f} online containers run without the shim; their GPUs would not be harvested."
    return text


def _pool_head(found: Findings) -> list[str]:
    levels = found.pools[0].levels if found.pools else ()
    return ["pool", "nodes", "GPUs", "hours", "idle", *(f"SLA {level.sla:g}: GPUs (kept)" for level in levels)]


def _set_head(found: Findings) -> list[str]:
    levels = found.pools[0].levels if found.pools else ()
    return ["pool", "GPUs of a job", *(f"SLA {level.sla:g}: GPUs (kept)" for level in levels)]


def _set_rows(found: Findings) -> Iterator[list[str]]:
    for pool in found.pools:
        for one in pool.sets:
            yield [pool.pool, str(one.size), *map(_level_cell, one.levels)]


def _level_cell(level: SlaWorth) -> str:
    return f"{level.gpus_saved:.1f} ({'-' if level.kept_share is None else f'{level.kept_share:.0%}'})"


def _pool_row(pool: PoolWorth) -> list[str]:
    cells = map(_level_cell, pool.levels)
    return [pool.pool, str(pool.nodes), str(pool.gpus), str(pool.hours), f"{pool.idle:.2f}", *cells]


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(tag: str, cells: Iterable[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [line("td", row) for row in rows]
    return "<table>" + line("th", head) + "".join(lines) + "</table>" if lines else "<p>Nothing.</p>"
