"""How the command line reads and writes: durations, histograms, subjects, environments."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from valve.v1 import node_pb2

from valved.cli import doctor, explain, run, systemd, words
from valved.cli.exits import CliError


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(850, "850 ns"), (12_300, "12.3 us"), (4_560_000, "4.56 ms"), (7_890_000_000, "7.89 s"), (7.4e12, "2 h 03 min")],
)
def test_a_duration_gets_the_unit_that_fits(nanoseconds, text):
    assert text == words.duration(nanoseconds)


def test_a_quantile_of_a_histogram_is_the_bound_of_its_bucket():
    histogram = SimpleNamespace(bound_us=[100.0, 200.0, 400.0], count=[98, 1, 1, 0])

    assert words.quantile_us(histogram, 0.5) == 100.0
    assert words.quantile_us(histogram, 0.99) == 200.0
    assert words.quantile_us(histogram, 1.0) == 400.0


def test_an_empty_histogram_has_no_quantile():
    histogram = SimpleNamespace(bound_us=[100.0], count=[0, 0])

    assert words.quantile_us(histogram, 0.5) is None
    assert words.at_most(None) == "-"


def test_a_sparkline_has_one_character_per_share_and_stays_in_range():
    assert words.sparkline([0.0, 0.5, 1.0]) == " ▄█"
    assert words.sparkline([7.0, -1.0]) == "█ "


@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [("0", "gpu", 0), ("gpu3", "gpu", 3), ("4711", "pid", 4711), ("pid:7", "pid", 7), ("service2", "service", 2)],
)
def test_explain_understands_gpus_pids_and_services(text, kind, number):
    request = explain.subject(text)

    assert kind == request.WhichOneof("subject")
    assert number == getattr(request, kind)


def test_explain_refuses_what_is_neither():
    with pytest.raises(CliError, match="neither a GPU nor a process"):
        explain.subject("everything")


def test_run_puts_our_library_first_and_keeps_what_was_preloaded(monkeypatch, tmp_path):
    monkeypatch.setenv("LD_PRELOAD", "/opt/jemalloc.so /opt/other.so")

    env = run.environment("offline", tmp_path)

    first, *others = env["LD_PRELOAD"].split(":")
    assert os.path.basename(first) == "libvalve.so"
    assert others == ["/opt/jemalloc.so", "/opt/other.so"]
    assert str(tmp_path) == env["VALVE_RUN_DIR"]


def test_run_twice_does_not_preload_twice(monkeypatch, tmp_path):
    monkeypatch.setenv("LD_PRELOAD", run.environment("online", tmp_path)["LD_PRELOAD"])

    env = run.environment("online", tmp_path)

    assert env["LD_PRELOAD"].count("libvalve.so") == 1


def test_run_lengthens_engine_timeouts_for_offline_work_only_and_keeps_the_users_own(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_RPC_TIMEOUT", "7")

    offline, online = run.environment("offline", tmp_path), run.environment("online", tmp_path)

    assert offline["VLLM_RPC_TIMEOUT"] == "7"
    assert offline["VLLM_ENGINE_ITERATION_TIMEOUT_S"] == "86400"
    assert "VLLM_ENGINE_ITERATION_TIMEOUT_S" not in online


def test_the_start_time_of_a_process_survives_brackets_in_its_name(tmp_path):
    with open(f"/proc/{os.getpid()}/comm", "w", encoding="utf-8") as comm:
        comm.write("a) b (c")
    stat = Path(f"/proc/{os.getpid()}/stat").read_text(encoding="utf-8")

    assert int(stat.rpartition(")")[2].split()[19]) == run.start_time(os.getpid())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build",
            ("580.159.04", True),
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.120  Fri Sep 13", ("550.120", False)),
        ("something else", None),
    ],
)
def test_doctor_reads_version_and_flavour_of_the_driver(text, expected):
    assert expected == doctor.driver_version(text)


@pytest.mark.parametrize(
    ("lock", "widths", "verdict"),
    [
        (None, [], doctor.Verdict.FINE),
        (False, [1, 1], doctor.Verdict.FINE),
        (None, [4], doctor.Verdict.UNKNOWN),
        (False, [1, 2], doctor.Verdict.FINE),
        (False, [1, 4], doctor.Verdict.NOTE),
        (True, [8], doctor.Verdict.FINE),
    ],
)
def test_doctor_names_the_driver_patch_where_it_would_pay(lock, widths, verdict):
    assert doctor.judge_lock(node_pb2.Driver(device_only_lock=lock), widths).verdict is verdict


@pytest.mark.parametrize(
    ("programs", "verdict"),
    [(["bash", "python3"], doctor.Verdict.FINE), (["bash", "dcgm-exporter"], doctor.Verdict.NOTE)],
)
def test_doctor_warns_of_a_meter_that_cannot_tell_offline_work_apart(tmp_path, programs, verdict):
    for pid, comm in enumerate(programs, start=1):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(f"{comm}\n")

    assert doctor.check_dcgm(tmp_path).verdict is verdict


def test_doctor_knows_the_same_driver_branches_as_the_abi_header(repository):
    header = (repository / "proto/abi/nvrm.h").read_text()

    assert f"#define NV_BRANCH_FIRST {doctor.FIRST_BRANCH}u" in " ".join(header.split())
    assert f"#define NV_BRANCH_LAST {doctor.LAST_BRANCH}u" in " ".join(header.split())


def test_the_systemd_unit_names_mode_and_config(tmp_path):
    options = SimpleNamespace(mode="observe", config=tmp_path / "valve.toml")

    unit = systemd.unit(options)

    assert f"--mode observe --config {tmp_path / 'valve.toml'}" in unit
    assert "KillMode=process" in unit
