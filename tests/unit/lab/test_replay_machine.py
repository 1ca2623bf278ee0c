"""`valve replay machine`: the machine model against tables of layer times made by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from valve_tools.replay import machine
from valve_tools.sim.machine import H100, MODEL_ERROR, MODELS, Settings, timing
from valve_tools.sim.traces import TraceError

TRUE = replace(H100, stream_efficiency=0.75, linear_efficiency=0.5, layer_ns=30_000.0, seq_ns=4_000.0)
HEAD = ",".join(machine.COLUMNS)


def table(gpu, model, tp):
    params, layers = machine.SHAPES[model]
    tokens = np.array([1.0, 8.0, 64.0, 256.0, 512.0, 1024.0, 4096.0])
    one = machine.Layers(gpu="H100", model=model, tp=tp, params=params, layers=layers, tokens=tokens, ms=tokens)
    return replace(one, ms=machine.predicted_ms(gpu, one))


def test_one_token_of_a_model_reads_all_its_weights_once():
    """13.48 GB at 0.85 of 3.35 TB/s, and a sequence of 11 us."""
    one = table(H100, "7b", 1)

    assert machine.predicted_ms(H100, one)[0] == pytest.approx(2 * 6.74 / (0.85 * 3.35) + 0.011)


def test_the_time_of_a_layer_is_part_of_an_iteration_in_the_simulator_too():
    now = timing(MODELS["8B"], 1, Settings(), budget_tokens=2048, max_seqs=256)
    slower = timing(MODELS["8B"], 1, Settings(gpu=TRUE), budget_tokens=2048, max_seqs=256)

    assert slower.fixed_ns - now.fixed_ns == pytest.approx(32 * 30_000)


def test_a_refit_finds_the_card_that_made_the_tables():
    tables = [table(TRUE, model, tp) for model in ("7b", "70b") for tp in (1, 4)]
    found = machine.refit(H100, tables)

    assert found.stream_efficiency == pytest.approx(0.75, rel=0.03)
    assert found.linear_efficiency == pytest.approx(0.5, rel=0.03)
    assert max(np.abs(machine.errors(found, one)).max() for one in tables) < 0.05


def test_tables_are_found_by_their_columns_and_unknown_models_left_out(tmp_path: Path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "x.csv").write_text(f"{HEAD}\nh100,Llama-2-7b-hf,2,8,0.1,0.01\nh100,Nobody,1,8,1,1\n")
    (tmp_path / "requests.csv").write_text("t_s,in_tok,out_tok\n0,1,1\n")

    (found,) = machine.measured(tmp_path)

    assert (found.gpu, found.tp, found.layers) == ("H100", 2, 32)
    assert found.ms.tolist() == pytest.approx([32 * 0.11])


def test_a_folder_without_layer_times_and_a_malformed_row_are_refused(tmp_path: Path):
    with pytest.raises(TraceError, match="no table of layer times"):
        machine.measured(tmp_path)

    (tmp_path / "x.csv").write_text(f"{HEAD}\nh100,Llama-2-7b-hf,2,eight,0.1,0.01\n")
    with pytest.raises(TraceError, match=r"x\.csv:2: .*eight"):
        machine.measured(tmp_path)


def test_the_error_on_every_page_is_the_one_that_was_measured():
    page = Path(__file__).resolve().parents[3] / "docs" / "results" / "replay" / "machine.md"
    cells = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| H100 | ")]
    rows = [row for row in cells if len(row) == 11]
    decoding = {gpus: [float(row[5]) for row in rows if row[2] == gpus] for gpus in ("1", "8")}
    prompts = {gpus: [float(row[7]) for row in rows if row[2] == gpus] for gpus in ("1", "8")}
    found = [
        round(-max(decoding["1"])),
        round(-min(decoding["1"])),
        round(-min(decoding["8"])),
        round(max(prompts["1"])),
        round(-min(prompts["8"])),
    ]

    assert [int(word) for word in re.findall(r"(\d+)(?= to | % )", MODEL_ERROR)] == found
