"""`valve replay`: exit codes, machine output, pages that stand alone, and what-if on an operator's own data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from valve_tools.replay import cluster as cluster_page
from valve_tools.replay import eviction as eviction_page
from valve_tools.replay import fleet as fleet_page
from valve_tools.replay.command import EXPERIMENTS, main
from valve_tools.replay.fleet_input import prometheus_of
from valve_tools.replay.question import Question, bounds_of, machine_of
from valve_tools.replay.report import Chart, Report, ReportTable, markdown, text, write
from valve_tools.replay.store import _key
from valve_tools.replay.svg import curves, grouped_bars, heatmap, ticks, tornado
from valve_tools.replay.whatif import SeedAnswer, WhatifTask, recommend, refusals, run_task, verdict
from valve_tools.sim.metrics import Claim, Summary, at_least, at_most
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


def test_whatif_prints_a_line_per_claim_and_answers_anew_when_its_file_changes(tmp_path, capsys):
    path, kept = requests(tmp_path), str(tmp_path / "kept")
    asked = ["whatif", "--requests", str(path), "--seeds", "1", "--jobs", "1", "--cache", kept, "--json"]
    assert main(asked) == 0
    first = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    path.write_text("t_s,in_tok,out_tok\n" + "".join(f"{i * 2.0},{1000 + i},80\n" for i in range(60)))
    main(asked)
    second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert [line["claim"] for line in first][-2:] == ["preemptions per request", "GPUs saved per GPU"]
    assert second[-1]["value"] < first[-1]["value"]


def test_whatif_keys_its_tasks_by_what_the_machine_file_says(tmp_path):
    load, card = requests(tmp_path), tmp_path / "card.json"
    kept = []
    for memory in (60, 70):
        card.write_text(json.dumps({"memory_gib": memory}))
        question = Question(requests=load, machine=card)
        bound = bounds_of(question, [1])[0]
        kept.append(_key(run_task, WhatifTask(bound=bound, settings=machine_of(question), seed=1)))

    assert kept[0] != kept[1]


def test_where_no_candidate_keeps_the_marks_nothing_is_recommended_and_the_reason_is_said():
    def answer(**mean_ttft):
        zero = dict.fromkeys(("mean", "p50", "p95", "p99"), 0.0)
        fields = dict.fromkeys(Summary.__dataclass_fields__, 0) | {
            "own_tpot_increase": zero,
            "tpot_increase": zero,
            "reclaims_by_hour": (0,),
        }
        summaries = {
            name: Summary(
                **fields | {"own_ttft_increase": zero | {"mean": value}, "ttft_increase": zero, "share_of_alone": share}
            )
            for name, (value, share) in mean_ttft.items()
        }
        return [SeedAnswer(idle_share=0.1, largest_gap_ms=1.0, requests=1, alone_ms={}, summaries=summaries)]

    assert recommend(answer(defaults=(9.0, 0.5), cautious=(4.0, 0.1))) == "cautious"
    (late,) = refusals(answer(defaults=(9.0, 0.5), cautious=(4.0, 0.1)), "cautious")
    assert "TTFT mean would rise by 4.0 %" in late
    assert verdict(answer(cautious=(4.0, 0.1)), "cautious", [late])[0].startswith("DO NOT USE VALVE HERE")
    assert recommend(answer(defaults=(2.0, 0.5), cautious=(1.0, 0.1))) == "defaults"
    assert refusals(answer(defaults=(2.0, 0.5)), "defaults") == []
    assert "leaves 10 % of it idle" in refusals(answer(defaults=(2.0, 0.01)), "defaults")[0]


@pytest.mark.parametrize("rows", [["1.0,100,100"], [f"{i / 10},100,100" for i in range(60)]])
def test_a_trace_that_says_nothing_about_a_service_never_gets_settings(tmp_path, capsys, rows):
    (tmp_path / "one.csv").write_text("\n".join(["t_s,in_tok,out_tok", *rows]) + "\n")

    assert main(["whatif", "--requests", str(tmp_path / "one.csv"), "--seeds", "1", "--fresh"]) == 2
    assert "no answer" in capsys.readouterr().err


def test_a_busy_service_is_told_not_to_use_valve(tmp_path, capsys):
    """Prompts that keep the GPU busy: before, settings were recommended at nothing saved."""
    (tmp_path / "busy.csv").write_text("t_s,in_tok,out_tok\n" + "".join(f"{i * 0.2},6000,200\n" for i in range(600)))
    main(["whatif", "--requests", str(tmp_path / "busy.csv"), "--seeds", "1", "--jobs", "1", "--fresh"])
    shown = capsys.readouterr().out

    assert "DO NOT USE VALVE HERE" in shown
    assert "Recommended settings" not in shown
    assert "on a GPU of its own" in shown


@pytest.mark.parametrize("experiment", ["eviction", "cluster", "fleet", "pairs", "machine", "all"])
def test_no_experiment_makes_up_a_load_for_a_folder_that_is_none(tmp_path, capsys, experiment):
    assert main([experiment, "--traces", str(tmp_path / "nowhere"), "--seeds", "1", "--fresh", "--json"]) == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("hours", ["0", "-1", "inf", "nan", "1e9", "soon"])
def test_hours_that_cannot_be_are_refused(hours):
    with pytest.raises(SystemExit) as refused:
        main(["pairs", "--hours", hours])
    assert refused.value.code == 2


@pytest.mark.parametrize("experiment", ["validate", "machine"])
def test_hours_are_refused_where_they_mean_nothing(experiment):
    with pytest.raises(SystemExit) as refused:
        main([experiment, "--hours", "1"])
    assert refused.value.code == 2


def test_a_folder_without_a_request_is_bad_input(tmp_path, capsys):
    (tmp_path / "empty.csv").write_text("t_s,in_tok,out_tok\n")

    assert main(["pairs", "--traces", str(tmp_path), "--seeds", "3", "--fresh", "--json"]) == 2
    assert "holds no trace with a request" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--out", "--cache"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_computed(capsys, option):
    assert main(["pairs", option, "/proc/nowhere/x", "--seeds", "3", "--json"]) == 2
    assert "/proc/nowhere" in capsys.readouterr().err


def test_an_error_of_the_lab_itself_is_not_called_bad_input(monkeypatch):
    def broken(options, progress):
        raise ValueError("a bug")

    monkeypatch.setitem(EXPERIMENTS, "pairs", broken)
    with pytest.raises(ValueError, match="a bug"):
        main(["pairs", "--seeds", "3", "--fresh", "--json"])


def test_a_smoke_run_is_small_and_says_so(tmp_path, monkeypatch):
    """A minute of the fleet experiment's six hours: its least fleet, here under two of its settings."""
    every = fleet_page.settings
    monkeypatch.setattr(fleet_page, "settings", lambda base: every(base)[:2])
    asked = ["fleet", "--hours", "0.02", "--seeds", "1", "--jobs", "1", "--fresh", "--json", "--out", str(tmp_path)]

    assert main(asked) == 0
    page = (tmp_path / "fleet.md").read_text()
    assert "SMOKE RUN at 0.00333 of the full size" in page
    assert "A week of 16 GPUs" in page


def test_smoke_plans_shrink_with_their_share_and_keep_what_is_judged():
    small, cells = cluster_page.smoke_plan(0.1), eviction_page.smoke_plan(0.1)

    assert (small.load.nodes, small.demands) == (100, (small.judged_demand,))
    assert cluster_page.smoke_plan(1e-9).load.nodes == 4
    assert len(cells.intervals_s) * len(cells.sizes) <= 6
    assert max(map(cells.cell_s, cells.intervals_s)) <= 120


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
        ('{"memory_gib": 1e9}', "at most 10000"),
        ('{"bandwidth_bytes_s": 1}', "at least 1e"),
        ('{"seq_ns": 1e30}', "at most 1e"),
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
        tables=(ReportTable(title="t", columns=("name", "value"), rows=(("<i>", 1.5),)),),
        charts=(Chart(title="c", svg=grouped_bars(["g"], {"s<": [1.0]}, unit="%")),),
    )
    write(report, tmp_path)
    page = (tmp_path / "x.html").read_text()

    assert "a &lt;b&gt; &amp; c" in page
    assert "1 of 2 claims hold" in page
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
    table = ReportTable(title="T", columns=("a", "b"), rows=(("x", 1.5),), note="n")

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
