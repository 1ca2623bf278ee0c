"""What an experiment hands over: claims, tables, charts and raw figures; written as JSON, text and one HTML page."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from valve_tools.bench.command import commit, machine
from valve_tools.replay.provenance import LINE, made_with
from valve_tools.replay.svg import picture
from valve_tools.sim.machine import MODEL_ERROR
from valve_tools.sim.metrics import Claim, Interval

OF_NO_GPU = ("machine", "validate")
"""Experiments whose page says more of the machine model than a line could, or that use none of a real GPU."""
Cell = str | float | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    marks: frozenset[tuple[int, int]] = frozenset()
    """(row, column) of cells that miss a pass mark."""
    is_detail: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    svg: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    name: str
    title: str
    summary: tuple[str, ...]
    claims: tuple[Claim, ...] = ()
    tables: tuple[ReportTable, ...] = ()
    charts: tuple[Chart, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    input: Mapping[str, Any] = field(default_factory=dict)
    """What was read, what was ignored and what was skipped."""
    has_pictures: bool = False
    """Its Markdown page shows the charts, as files beside it."""
    is_small: bool = False
    """Its Markdown page has claims as a grid, and no details; the HTML page that is built beside it has all."""

    @property
    def ok(self) -> bool:
        return all(claim.ok for claim in self.claims)

    def document(self) -> dict[str, Any]:
        return {
            "experiment": self.name,
            "commit": commit(),
            "machine": machine(),
            "made_with": made_with(self.name),
            "seeds": list(self.seeds),
            "summary": list(self.summary),
            "claims": [asdict(claim) for claim in self.claims],
            "input": self.input,
            "data": self.data,
        }


def text(value: Cell) -> str:
    """A figure as the tables show it: about three significant digits."""
    if isinstance(value, str):
        return value
    if value is None or math.isnan(value):
        return "–"
    if isinstance(value, int) or value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    places = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.9995 else 3
    return f"{value:.{places}f}"


def plus_minus(found: Interval | None, scale: float = 1.0) -> Cell:
    """A mean with half its 95 % interval over the seeds."""
    if found is None:
        return None
    mean = text(scale * found.mean)
    return f"{mean} ± {text(scale * found.half)}" if found.n > 1 else mean


def markdown(tables: Sequence[ReportTable]) -> str:
    """The tables as plain text that reads in a terminal and on a code host."""
    parts = []
    for table in tables:
        parts.append(f"## {table.title}\n")
        parts.append("| " + " | ".join(table.columns) + " |")
        parts.append("|" + "---|" * len(table.columns))
        parts += ["| " + " | ".join(text(cell) for cell in row) + " |" for row in table.rows]
        parts.append(f"\n{table.note}\n" if table.note else "")
    return "\n".join(parts)


def claims_table(claims: Sequence[Claim]) -> ReportTable:
    rows = tuple((claim.claim, claim.pair, claim.value, claim.bound, _word(claim), claim.note) for claim in claims)
    return ReportTable(
        title="Claims",
        columns=("claim", "pair", "worse end", "bound", "verdict", "note"),
        rows=rows,
        note=_verdict(claims),
        marks=frozenset((i, 4) for i, claim in enumerate(claims) if not claim.ok),
    )


def claims_grid(claims: Sequence[Claim]) -> ReportTable:
    """A row for each kind of claim, a column for each pair; what is missed is bold, and its cause stands below."""
    names, pairs = list(dict.fromkeys(one.claim for one in claims)), list(dict.fromkeys(one.pair for one in claims))
    found = {(one.claim, one.pair): one for one in claims}

    def cell(name: str, pair: str) -> str:
        one = found.get((name, pair))
        if one is None or one.value is None:
            return "" if one is None else _word(one)
        return text(one.value) if one.ok else f"**{text(one.value)}**"

    bounds = {name: next(one.bound for one in claims if one.claim == name) for name in names}
    return ReportTable(
        title="Claims, worse ends; bold: missed",
        columns=("claim", "bound", *pairs),
        rows=tuple((name, text(bounds[name]), *(cell(name, pair) for pair in pairs)) for name in names),
        note=_verdict(claims),
    )


def _word(claim: Claim) -> str:
    if claim.value is None:
        return "n/a" if claim.ok else "VOID"
    return "holds" if claim.ok else "MISSED"


def counted(claims: Sequence[Claim]) -> str:
    judged = [claim for claim in claims if claim.value is not None]
    voids = sum(claim.value is None and not claim.ok for claim in claims)
    rest = len(claims) - len(judged) - voids
    words = [f"{sum(claim.ok for claim in judged)} of {len(judged)} claims hold"]
    words += [f"{voids} void"] if voids else []
    words += [f"{rest} n/a"] if rest else []
    return ", ".join(words)


def _verdict(claims: Sequence[Claim]) -> str:
    """How many hold, and each that does not with what is known of it."""
    missed = [
        f"{claim.claim}, {claim.pair}: {text(claim.value)} against {text(claim.bound)}"
        + (f" ({claim.note})" if claim.note else "")
        for claim in claims
        if not claim.ok and claim.value is not None
    ]
    return f"{counted(claims)}." + (f" Missed: {'; '.join(missed)}." if missed else "")


def figures_line(name: str, content: str) -> str:
    """Which figures a page shows: the tree keeps the page, not its JSON."""
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return f"Figures: `{name}`, sha256 `{digest}`; `valve replay` builds it, the tree does not keep it.\n"


def write(report: Report, folder: Path, origin: Mapping[str, Any] | None = None) -> list[Path]:
    """NAME.json, NAME.md and NAME.html in `folder`; `origin` says where and with which commit it was computed."""
    from valve_tools.replay.page import page

    folder.mkdir(parents=True, exist_ok=True)
    document = report.document() | dict(origin or {})
    head = [f"# {report.title}\n", *(f"{paragraph}\n" for paragraph in report.summary)]
    claims = [claims_grid(report.claims) if report.is_small else claims_table(report.claims)] if report.claims else []
    tables = [*claims, *(table for table in report.tables if not (report.is_small and table.is_detail))]
    figures = json.dumps(document, indent=1, sort_keys=True) + "\n"
    foot = "\n".join(
        (
            f"Commit {document['commit']}, seeds {', '.join(map(str, report.seeds)) or 'none'}.\n",
            LINE.format(document["made_with"]),
            *([f"{MODEL_ERROR}\n"] if report.name not in OF_NO_GPU else []),
            figures_line(f"{report.name}.json", figures),
        )
    )
    pictures = {f"{report.name}-{i}.svg": chart for i, chart in enumerate(report.charts)} if report.has_pictures else {}
    shown = [f"![{chart.title}]({name})\n" for name, chart in pictures.items()]
    written = {
        f"{report.name}.json": figures,
        f"{report.name}.md": "\n".join([*head, *shown, markdown(tables), foot]),
        f"{report.name}.html": page(report, document),
        **{name: picture(chart.svg) for name, chart in pictures.items()},
    }
    for name, content in written.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in written]
