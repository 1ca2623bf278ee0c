"""Settings are chosen on one half of the traces and judged on the other; the hash of a file says which is which."""

from __future__ import annotations

import hashlib

import pytest
from valve_tools.replay import pairs, rivals
from valve_tools.replay.command import main
from valve_tools.replay.report import Report
from valve_tools.sim.generator import generate
from valve_tools.sim.traces import Half, TraceError, half_of, read_folder


def write_traces(folder, count=16):
    for i in range(count):
        (folder / f"t{i}.csv").write_text(f"t_s,in_tok,out_tok\n0,{i + 1},2\n5,{i + 1},2\n")
    return folder


def test_no_trace_is_both_tuned_on_and_judged_on(tmp_path):
    folder = read_folder(write_traces(tmp_path))
    tuning = {trace.name for trace in folder.half(Half.TUNING).traces}
    claims = {trace.name for trace in folder.half(Half.CLAIMS).traces}

    assert tuning
    assert claims
    assert not tuning & claims
    assert tuning | claims == {trace.name for trace in folder.traces}


def test_the_files_content_decides_and_neither_its_name_nor_its_neighbours(tmp_path):
    folder = write_traces(tmp_path)
    before = {trace.digest: half_of(trace.digest) for trace in read_folder(folder).traces}
    (folder / "t3.csv").rename(folder / "a.csv")
    (folder / "t5.csv").unlink()
    after = {trace.digest: half_of(trace.digest) for trace in read_folder(folder).traces}

    assert before.items() >= after.items()
    digest = hashlib.sha256((folder / "a.csv").read_bytes()).hexdigest()
    assert half_of(digest) is (Half.TUNING if digest[0] in "01234567" else Half.CLAIMS)


def test_a_thinned_or_cut_trace_stays_in_its_half(tmp_path):
    for trace in read_folder(write_traces(tmp_path)).traces:
        assert trace.thinned(2).first(4.0).digest == trace.digest


def test_what_was_drawn_was_never_tuned_on():
    assert {half_of(trace.digest) for trace in generate(1).traces} == {Half.CLAIMS}


def test_a_half_without_a_trace_is_refused_by_name(tmp_path):
    folder = read_folder(write_traces(tmp_path))
    with pytest.raises(TraceError, match="the half for tuning"):
        folder.half(Half.CLAIMS).half(Half.TUNING)


@pytest.mark.parametrize("half", [Half.TUNING, Half.CLAIMS])
@pytest.mark.parametrize(("name", "module"), [("rivals", rivals), ("pairs", pairs)])
def test_an_experiment_never_sees_a_trace_of_the_other_half(tmp_path, monkeypatch, name, module, half):
    seen = []
    monkeypatch.setattr(
        module, "run", lambda folder, *_: seen.append(folder) or Report(name=name, title="", summary=())
    )
    command = [name, "--traces", str(write_traces(tmp_path)), "--half", half.value, "--fresh", "--seeds", "3"]

    assert main(command) == 0
    assert {half_of(trace.digest) for trace in seen[0].traces} == {half}
