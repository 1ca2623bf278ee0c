"""`valve tune run` and its relatives, over a trainer that only counts: progress, files, pause, kill and resume."""

from __future__ import annotations

import os
import re
import signal

import pytest
import tiny
from command import Command, until
from valve_tune.serve import cli, metrics
from valve_tune.serve.folder import JobFolder
from valve_tune.train.spec import JobSpec


@pytest.fixture
def job(tmp_path):
    """A command, its usual arguments, and its folder."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"vocab_size": 64}')
    (base / "tokenizer.json").write_text("{}")
    data = tiny.conversations(tmp_path / "train.jsonl")
    said = ["--model", base, "--data", data, "--out", tmp_path / "mine", "--max-length", "32"]
    return Command(tmp_path), ["run", *said], JobFolder(tmp_path / "mine")


def losses(folder: JobFolder) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in metrics.steps(folder.metrics)]


def test_a_run_shows_its_steps_and_leaves_adapter_metrics_and_page(job):
    command, run, folder = job
    said = command.run(*run, "--max-steps", "30", "--learning_rate", "1e-3")
    assert "24 examples" in said
    assert "step 30/30  loss 0.3" in said
    assert all(word in said for word in ("tokens/s", "harvested", "left"))
    assert [step for step, _ in losses(folder)] == list(range(1, 31))
    assert folder.status().state == "succeeded"
    page = folder.page.read_text()
    assert all(word in page for word in ("<polyline", "When it ran", "succeeded"))
    assert all(word in command.run("ls") for word in ("mine", "succeeded", "30/30"))
    assert "succeeded at step 30" in command.run("watch", "mine")
    assert folder.checkpoints()[-1][0] == 30
    assert "checkpoint-30" in command.run("checkpoints", "mine")


def test_held_out_data_is_shown_in_the_lines_and_on_the_page(job, tmp_path):
    command, run, folder = job
    more = ["--eval-file", tiny.conversations(tmp_path / "held.jsonl", 4), "--eval_steps", "10", "--max-steps", "30"]
    said = command.run(*run, *more)
    assert [f"evaluated: loss {step}" in said for step in (10, 20, 30)] == [True] * 3
    page = folder.page.read_text()
    assert all(word in page for word in ("held-out data", "3; the best has loss 10.0000, at step 10"))
    assert len(losses(folder)) == 30


def test_a_job_is_never_resumed_over_other_held_out_data(job, tmp_path):
    command, run, _ = job
    held_out = tiny.conversations(tmp_path / "held.jsonl", 4)
    run = [*run, "--eval-data", held_out, "--max-steps", "6"]
    command.run(*run)
    tiny.conversations(held_out, 5)
    assert "changed since this job began" in command.run(*run, code=2)


def test_passes_over_the_data_decide_the_steps_where_nothing_else_does(job):
    command, run, folder = job
    command.run(*run, "--num-train-epochs", "2", "--no-packing")
    assert folder.spec().max_steps == 48


@pytest.mark.parametrize("moment", [1, 7, 12])
def test_a_killed_job_goes_on_with_the_same_command_and_says_the_same_losses(job, tmp_path, moment):
    command, run, folder = job
    run = [*run, "--max-steps", "16", "--save-steps", "3"]
    process = command.start(*run, FAKE_WAITS_AT=str(moment))
    until(lambda: len(losses(folder)) >= moment, f"step {moment}")
    process.kill()
    process.communicate()
    assert "dead" in command.run("ls")
    assert "dead" in command.run("watch", "mine", code=1)
    with folder.metrics.open("a") as file:
        file.write('{"kind": "step", "st')  # as a crash in the middle of a line leaves it
    command.run(*run)
    whole = JobFolder(tmp_path / "whole")
    run[run.index("--out") + 1] = whole.path
    command.run(*run)
    assert losses(folder) == losses(whole)


def test_a_paused_job_takes_no_step_and_goes_on_where_it_was(job):
    command, run, folder = job
    process = command.start(*run, "--max-steps", "1000000", FAKE_TILE_S="0.002")
    until(lambda: losses(folder), "a step")
    command.run("pause", "mine")
    until(lambda: folder.status().state == "paused", "paused")
    before = losses(folder)
    assert "paused" in command.run("ls")
    assert losses(folder) == before
    command.run("resume", "mine")
    until(lambda: len(losses(folder)) > len(before), "the next step")
    command.run("cancel", "mine")
    process.communicate()
    assert folder.status().state == "cancelled"
    command.run("cancel", "mine", code=2)


def test_ctrl_c_ends_between_two_tiles_and_resume_takes_it_up(job):
    command, run, folder = job
    process = command.start(*run, "--max-steps", "40", "--save-steps", "2", FAKE_WAITS_AT="5")
    until(lambda: len(losses(folder)) >= 5, "five steps")
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130
    assert "the same command goes on" in out
    assert folder.status().state == "stopped"
    assert "resumed" in command.run("resume", "mine")
    assert [step for step, _ in losses(folder)] == list(range(1, 41))


def test_another_job_never_takes_a_folder_that_has_one(job):
    command, run, folder = job
    command.run(*run, "--max-steps", "2")
    said = command.run(*run, "--max-steps", "3", "--lora-r", "4", code=2)
    assert "max_steps (2 there, 3 here)" in said
    assert "lora_r (16 there, 4 here)" in said
    assert "seed" not in said
    assert folder.spec().max_steps == 2


def test_what_does_not_change_the_adapter_never_makes_it_another_job(job, tmp_path):
    """ "Ask for more" was the advice, "holds another job" the answer to it."""
    command, run, folder = job
    command.run(*run, "--max-steps", "4", "--save-steps", "2")
    held_out = tiny.conversations(tmp_path / "held.jsonl", 4)

    said = command.run(*run, "--max-steps", "4", "--save-steps", "3", "--eval-data", held_out)

    assert "succeeded" in said or folder.status().state == "succeeded"
    assert (folder.spec().save_steps, folder.spec().eval_data) == (3, str(held_out))
    said = command.run(*run, "--max-steps", "4", "--early-stopping-patience", "2", "--eval-data", held_out, code=2)
    assert "early_stopping_patience" in said


def test_a_job_whose_data_changed_is_never_resumed_on_other_batches(job):
    command, run, folder = job
    command.run(*run, "--max-steps", "2")
    tiny.conversations(folder.path.parent / "train.jsonl", 30)
    assert "data or its tokenizer changed" in command.run(*run, "--max-steps", "2", code=2)


def test_two_processes_never_work_on_one_job(job):
    command, run, folder = job
    process = command.start(*run, "--max-steps", "1000000", FAKE_TILE_S="0.01")
    until(lambda: losses(folder), "a step")
    assert f"process {process.pid} works on this job" in command.run(*run, "--max-steps", "1000000", code=2)
    process.kill()
    process.communicate()


def test_an_adapter_of_somebody_else_is_never_written_over(job):
    command, run, folder = job
    folder.path.mkdir()
    (folder.path / "adapter_config.json").write_text("{}")
    assert "an adapter that is not of this command" in command.run(*run, "--max-steps", "2", code=2)
    assert (folder.path / "adapter_config.json").read_text() == "{}"


def test_a_failure_says_where_and_what_is_whole(job):
    command, run, folder = job
    said = command.run(*run, "--max-steps", "9", "--save-steps", "2", FAKE_FAILS_AT="5", code=1)
    assert "failed at step 5: FloatingPointError: loss is NaN at step 5" in said
    assert "checkpoint-4 is whole" in said
    assert folder.status().state == "failed"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--lora-r", "0"], "lora_r: must be from 1 to 512"),
        (["--learning-rate", "nan"], "learning_rate: must be finite"),
        (["--lora_r", "many"], "'many' is no number"),
        (["--model", "/etc"], "/etc holds no config.json"),
        (["--use_dora"], "use_dora: vLLM rejects DoRA"),
        (["--load-in-4bit", "true"], "load_in_4bit: QLoRA is not offered"),
        (["--no-such-thing"], "unrecognized arguments"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name_before_anything_runs(job, more, said):
    command, run, folder = job
    assert said in command.run(*run, *more, code=2)
    assert not folder.path.exists()


def test_a_bad_line_is_named_before_anything_runs(job):
    command, run, folder = job
    with (folder.path.parent / "train.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "user"}]}\n')
    assert "line 25, messages[0].content" in command.run(*run, "--max-steps", "2", code=2)
    assert not folder.path.exists()


def test_help_shows_one_form_of_each_flag_and_what_its_value_is(job):
    command, _, _ = job
    said = command.run("run", "--help")
    assert not re.search(r"--\w+_\w+", said)
    assert not re.search(r"--[\w-]+ (str|int|float)\b", said)
    assert "--dtype {float32,bfloat16}" in said


def test_a_base_without_tokenizer_is_a_clear_end(job, tmp_path):
    command, run, _ = job
    (tmp_path / "base" / "tokenizer.json").unlink()
    assert "no tokenizer that loads" in command.run(*run, "--max-steps", "2", code=2)


def test_metrics_that_cannot_be_written_cost_the_job_nothing(job):
    command, run, folder = job
    folder.metrics.mkdir(parents=True)
    said = command.run(*run, "--max-steps", "3")
    assert "metrics are lost, the job goes on" in said
    assert folder.status().state == "succeeded"


def test_a_folder_that_cannot_be_made_is_a_clear_end_and_never_a_traceback(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    spec = JobSpec(model="m", data="d", out=str(out), max_steps=1)
    monkeypatch.setattr("valve_tune.serve.jobs.rows_of", lambda values, passes: (spec, None))
    assert cli.main(["run", "--model", "m", "--data", "d", "--out", str(out), "--max-steps", "1"]) == 1
    assert capsys.readouterr().err == f"valve tune: {out}: Not a directory\n"
