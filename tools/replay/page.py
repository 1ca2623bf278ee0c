"""One self-contained HTML page for a report: no script, nothing fetched, prints well."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from valve_tools.replay.report import Cell, Report, ReportTable, claims_table, counted, text

STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,sans-serif;color:#24292f;background:#fff;margin:0 auto;max-width:1180px;padding:24px}
h1{font-size:26px;margin:0 0 4px}
h2{font-size:18px;margin:34px 0 8px;border-bottom:1px solid #d8dee4;padding-bottom:4px}
.meta{color:#57606a;font-size:13px} .verdict{display:inline-block;border-radius:4px;padding:2px 10px;font-weight:600}
.good{background:#dff3e4;color:#1a5e31} .bad{background:#fbe3e4;color:#8c1c2b}
.scroll{overflow-x:auto} table{border-collapse:collapse;font-size:13px;margin:6px 0}
th,td{padding:3px 9px;border-bottom:1px solid #eaeef2;text-align:right;white-space:nowrap}
th{background:#f6f8fa} td.word,th.word{text-align:left} td.long{white-space:normal;min-width:260px}
td.miss{background:#fbe3e4;font-weight:600} figure{margin:14px 0 22px}
figcaption{font-weight:600;margin-bottom:6px} .note{color:#57606a;font-size:13px;max-width:900px}
svg{display:block;min-width:640px;max-width:100%;height:auto}
"""


def page(report: Report, document: Mapping[str, Any]) -> str:
    seeds = ", ".join(map(str, report.seeds)) or "none"
    meta = f"commit {document['commit']} · seeds {seeds} · {document['machine']}"
    figure = '<figure><figcaption>{}</figcaption><div class="scroll">{}</div>{}</figure>'
    body = [
        f"<h1>{escape(report.title)}</h1>",
        f'<p class="meta">{escape(meta)}</p>',
        *(f"<p>{escape(paragraph)}</p>" for paragraph in report.summary),
        _verdict(report),
    ]
    for chart in report.charts:
        note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
        body.append(figure.format(escape(chart.title), chart.svg, note))
    claims = [claims_table(report.claims)] if report.claims else []
    body += [_table(table) for table in [*claims, *report.tables]]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(report.title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _verdict(report: Report) -> str:
    if not report.claims:
        return ""
    kind = "good" if report.ok else "bad"
    return f'<p><span class="verdict {kind}">{counted(report.claims)}</span></p>'


def _table(table: ReportTable) -> str:
    head = "".join(f'<th class="{_kind(table, j)}">{escape(column)}</th>' for j, column in enumerate(table.columns))
    rows = "".join(
        "<tr>" + "".join(_cell(table, i, j, value) for j, value in enumerate(row)) + "</tr>"
        for i, row in enumerate(table.rows)
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<h2>{escape(table.title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _kind(table: ReportTable, column: int) -> str:
    return "word" if any(isinstance(row[column], str) for row in table.rows) else ""


def _cell(table: ReportTable, row: int, column: int, value: Cell) -> str:
    classes = [_kind(table, column)]
    if isinstance(value, str) and len(value) > 48:
        classes.append("long")
    if (row, column) in table.marks:
        classes.append("miss")
    names = " ".join(filter(None, classes))
    return f'<td class="{names}">{escape(text(value))}</td>' if names else f"<td>{escape(text(value))}</td>"
