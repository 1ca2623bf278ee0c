"""`valve replay`: exit codes, machine output, pages that stand alone, and what-if on an operator's own data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from valve_tools.replay.command import main
from valve_tools.replay.fleet_input import prometheus_of
from valve_tools.replay.report import Chart, Claim, Report, Table, at_least, at_most, markdown, text, write
from valve_tools.replay.svg import curves, grouped_bars, heatmap, ticks, tornado
from valve_tools.replay.whatif import Question, machine_of
from valve_tools.sim.traces import TraceError

from valved.config import Config

REQUESTS = "t_s,in_tok,out_tok\n" + "".join(f"{i * 2.0},{100 + i},8\n" for i in range(60))


def requests(folder: Path) -> Path:
    path = folder / "mine.csv"
    path.write_text(REQUESTS)
    return path


def export(folder: Path, **series: list[list[object]]) -> Path:
    path = folder / "export.json"
    result = [{"metric": {"__name__": name}, "values": values} for name, values in series.items()]
    path.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}))
    return path


def rates(requests_s: float, prompt_s: float, answer_s: float, steps: int = 10) -> dict[str, list[list[object]]]:
    def values(rate: float) -> list[list[object]]:
        return [[1000 + 60 * i, str(rate)] for i in range(steps)]

    return {"requests": values(requests_s), "prompt_tokens": values(prompt_s), "generation_tokens": values(answer_s)}


def test_pairs_prints_one_line_per_claim_and_says_by_its_exit_code_whether_all_hold(tmp_path, capsys):
    requests(tmp_path)
    code = main(
        ["pairs", "--traces", str(tmp_path), "--seeds", "1", "--jobs", "1", "--fresh", "--json", "--out", str(tmp_path)]
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert {"claim", "pair", "value", "bound", "ok"} == set(lines[0])
    assert {f"P{i}" for i in range(1, 11)} == {line["pair"] for line in lines}
    assert (0 if all(line["ok"] for line in lines) else 3) == code
    assert {"pairs.json", "pairs.md", "pairs.html"} <= {path.name for path in tmp_path.iterdir()}


def test_a_folder_that_is_none_is_bad_input(tmp_path, capsys):
    assert main(["pairs", "--traces", str(tmp_path / "nowhere"), "--seeds", "1", "--json"]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_a_malformed_trace_is_bad_input_with_its_line(tmp_path, capsys):
    (tmp_path / "bad.csv").write_text("t_s,in_tok,out_tok\n0,1,1\n1,one,1\n")

    assert main(["pairs", "--traces", str(tmp_path), "--seeds", "1", "--json"]) == 2
    assert "bad.csv:3: in_tok is 'one'" in capsys.readouterr().err


def test_whatif_answers_from_a_csv_with_an_estimate_and_settings(tmp_path, capsys):
    path = requests(tmp_path)
    code = main(["whatif", "--requests", str(path), "--seeds", "2", "--jobs", "1", "--fresh", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    document = json.loads((tmp_path / "whatif.json").read_text())

    assert code == 0
    advised = re.findall(r"(?:memory|cooldown)\.\w+", shown)
    known = {
        f"{table}.{field}" for table in ("memory", "cooldown") for field in getattr(Config(), table).__struct_fields__
    }
    assert {"memory.target_per_hour", "memory.headroom_max_mib", "cooldown.start_ms"} <= set(advised) <= known
    assert document["data"]["recommended"] in document["data"]["answers"][0]["summaries"]


def test_whatif_needs_exactly_one_load(tmp_path, capsys):
    assert main(["whatif", "--seeds", "1"]) == 2
    assert "pass one of --requests" in capsys.readouterr().err


def test_models_that_leave_no_memory_are_refused_with_the_way_out(tmp_path, capsys):
    path = requests(tmp_path)

    assert main(["whatif", "--requests", str(path), "--online", "32B", "--seeds", "1"]) == 2
    assert "take a smaller offline model or more GPUs" in capsys.readouterr().err


def test_an_unknown_field_of_a_machine_is_refused_by_name(tmp_path, capsys):
    machine = tmp_path / "card.json"
    machine.write_text('{"memory": 80}')

    assert main(["whatif", "--requests", str(requests(tmp_path)), "--machine", str(machine), "--seeds", "1"]) == 2
    assert "unknown field 'memory'" in capsys.readouterr().err


def test_rates_of_an_export_become_requests_with_the_mean_lengths_that_they_imply(tmp_path):
    trace = prometheus_of(export(tmp_path, **rates(5.0, 5000.0, 500.0, steps=60)), seed=1)

    assert pytest.approx(trace.requests, rel=0.05) == 5.0 * 3600
    assert pytest.approx(trace.in_tok.mean(), rel=0.05) == 1000
    assert pytest.approx(trace.out_tok.mean(), rel=0.05) == 100


def test_an_export_without_prompt_tokens_is_refused(tmp_path):
    series = rates(5.0, 1.0, 1.0)
    del series["prompt_tokens"]

    with pytest.raises(TraceError, match="no series of prompt per second"):
        prometheus_of(export(tmp_path, **series), seed=1)


def test_a_missing_sample_of_an_export_is_skipped(tmp_path):
    series = rates(5.0, 5000.0, 500.0)
    series["requests"][3][1] = "NaN"

    assert pytest.approx(prometheus_of(export(tmp_path, **series), seed=1).requests, rel=0.1) == 5.0 * 540


def test_a_hole_in_an_export_is_no_idle_time(tmp_path):
    series = rates(5.0, 5000.0, 500.0, steps=60)
    for values in series.values():
        del values[10:40]

    assert prometheus_of(export(tmp_path, **series), seed=1).arrive_ns[-1] == pytest.approx(30 * 60e9, rel=0.02)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"status": "error", "error": "parse error"}, "answered with an error: parse error"),
        ({"data": {"resultType": "matrix", "result": [{"metric": None, "values": []}]}}, "without metric or values"),
        ({"data": {"resultType": "matrix", "result": [{"metric": {}, "values": None}]}}, "without metric or values"),
        ({"data": {"resultType": "vector", "result": []}}, "not the answer of /api/v1/query_range"),
    ],
)
def test_what_is_no_range_of_rates_is_refused_with_the_reason(tmp_path, document, words):
    path = tmp_path / "export.json"
    path.write_text(json.dumps(document))

    with pytest.raises(TraceError, match=words):
        prometheus_of(path, seed=1)


def test_an_export_of_more_requests_than_can_be_drawn_is_refused(tmp_path):
    with pytest.raises(TraceError, match="export a shorter range"):
        prometheus_of(export(tmp_path, **rates(1e6, 1e9, 1e8, steps=60)), seed=1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "not a JSON object"),
        ('{"name": 5}', "it must be a word"),
        ('{"linear_efficiency": 7}', "at most 1"),
        ('{"flops": Infinity}', "above zero"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(tmp_path, content, words):
    path = tmp_path / "card.json"
    path.write_text(content)

    with pytest.raises(TraceError, match=words):
        machine_of(Question(machine=path))


def test_a_page_stands_alone_and_escapes_what_it_shows(tmp_path):
    report = Report(
        name="x",
        title="a <b> & c",
        summary=("words",),
        claims=(at_most("low", "P1", 1.0, 2.0), at_least("high", "P1", 1.0, 2.0)),
        tables=(Table(title="t", columns=("name", "value"), rows=(("<i>", 1.5),)),),
        charts=(Chart(title="c", svg=grouped_bars(["g"], {"s<": [1.0]}, unit="%")),),
    )
    write(report, tmp_path)
    page = (tmp_path / "x.html").read_text()

    assert "a &lt;b&gt; &amp; c" in page
    assert "1 of 2 claims missed" in page
    assert not re.search(r"(src|href)=", page)
    assert "<i>" not in page


def test_figures_are_shown_with_three_digits():
    assert [text(value) for value in (1234.4, 123.4, 12.34, 1.234, 0.0123, None, 0.0, 7)] == [
        "1,234",
        "123",
        "12.3",
        "1.23",
        "0.012",
        "–",
        "0",
        "7",
    ]


def test_a_table_becomes_markdown():
    table = Table(title="T", columns=("a", "b"), rows=(("x", 1.5),), note="n")

    assert markdown([table]) == "## T\n\n| a | b |\n|---|---|\n| x | 1.50 |\n\nn\n"


def test_a_claim_prints_the_five_keys():
    claim = Claim(claim="c", pair="P1", value=1.23456, bound=2, ok=True, note="left out")

    assert json.loads(claim.line()) == {"claim": "c", "pair": "P1", "value": 1.2346, "bound": 2, "ok": True}


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.0, 7.0), (0.0, 1234.0), (0.0, 0.003)])
def test_ticks_are_round_and_inside(low, high):
    found = ticks(low, high)

    assert 2 <= len(found) <= 7
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)


def test_charts_draw_extremes_without_leaving_their_frame():
    bars = grouped_bars(["a", "b"], {"s": [1e6, None], "t": [-5.0, 0.0]}, unit="%", bound=2.5, cap=50.0)

    assert "1,000,000" in bars
    assert "bound 2.5" in bars
    assert curves({"s": [(1.0, 2.0), (10.0, 3.0)]}, x_unit="x", y_unit="y", log_x=True).count("<circle") == 2
    assert tornado([("p", [("low", 0.5), ("high", 2.0)])], centre=1.0, unit="u").count("<rect") == 2
    assert heatmap(["r"], ["c"], [[1.0]], unit="u").count("<rect") == 1
