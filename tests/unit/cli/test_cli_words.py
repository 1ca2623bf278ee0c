"""How the command line reads and writes: durations, histograms, subjects, environments."""

import argparse
import contextlib
import errno
import io
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from rich.console import Console
from valve.v1 import node_pb2

from valved.cli import (
    client,
    doctor,
    explain,
    main,
    policy,
    record,
    remap,
    run,
    status,
    stream,
    systemd,
    top,
    up,
    words,
)
from valved.cli.exits import REFUSED, USAGE, CliError
from valved.cli.tables import FittingTable
from valved.model import statuses
from valved.paths import API_SOCKET


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
    assert words.at_most(histogram, 0.5) == "-"


def test_a_quantile_beyond_the_last_bucket_never_hides_how_long_that_is():
    assert words.at_most(SimpleNamespace(bound_us=[100.0, 10_000.0], count=[0, 0, 1]), 0.99) == "> 10 ms"


@pytest.mark.parametrize("text", ["-1", "nan", "inf"])
@pytest.mark.parametrize("command", [["record", "file", "--for"], ["drain", "--timeout"]])
def test_a_time_that_is_none_is_never_taken_for_one(command, text, capsys):
    with pytest.raises(SystemExit):
        main.parser().parse_args([*command[:-1], f"{command[-1]}={text}"])

    assert f"{text} is not a time in seconds" in capsys.readouterr().err


def test_a_setting_without_a_value_is_never_called_unknown():
    with pytest.raises(CliError, match=r"^cooldown.floor_ms: no value$"):
        policy.changes(["cooldown.floor_ms"])


@pytest.mark.parametrize(("mode", "is_said"), [("observe", True), ("harvest", False)])
def test_a_mode_never_ends_offline_work_in_silence(monkeypatch, capsys, mode, is_said):
    batch = node_pb2.Service(name="batch", role=node_pb2.ROLE_OFFLINE, pids=[7])
    answer = node_pb2.Status(mode=policy.MODES[mode], services=[batch])
    stub = SimpleNamespace(SetPolicy=None)
    connection = SimpleNamespace(stub=stub, call=lambda *_: None, status=lambda: answer)
    monkeypatch.setattr(policy, "node", lambda: contextlib.nullcontext(connection))

    assert policy.mode(argparse.Namespace(mode=mode)) == 0

    assert ("asked to end: batch (7)" in capsys.readouterr().out) is is_said


def test_a_subject_of_several_words_is_never_named_otherwise_than_it_was_typed():
    with pytest.raises(CliError, match=r"^reclaim x: neither"):
        explain.subject("reclaim x")
    assert explain.subject("reclaim 120").reclaim == 120


def test_a_folder_that_cannot_be_made_is_an_error_with_a_next_step_and_never_a_traceback(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(CliError) as caught:
        up.opened(tmp_path / "file" / "run" / "valved.log")

    assert "VALVE_RUN_DIR" in caught.value.next_step


def test_settings_that_a_running_valved_does_not_read_are_never_passed_over_in_silence(tmp_path, capsys):
    options = argparse.Namespace(mode=None, config=tmp_path / "valved.toml", metrics_port=9400)

    assert up.say_running(SimpleNamespace(mode=node_pb2.MODE_HARVEST), options, tmp_path) == 0

    assert "reads --config and --metrics-port only at its start" in capsys.readouterr().out


def test_events_that_valved_refuses_to_show_are_an_error_of_valved_and_never_a_traceback(tmp_path):
    class Refused(grpc.RpcError):
        def code(self):
            return grpc.StatusCode.INVALID_ARGUMENT

        def details(self):
            return "unknown kind of event: foo"

        def trailing_metadata(self):
            return ()

    class Call:
        def initial_metadata(self):
            return ()

        def __next__(self):
            raise Refused

        def cancel(self):
            pass

    node = SimpleNamespace(folder=tmp_path, stub=SimpleNamespace(Watch=lambda *_, **__: Call()))

    for read in (stream.EventStream.kept, stream.EventStream.follow):
        with pytest.raises(CliError, match="unknown kind of event: foo"):
            list(read(stream.EventStream(node, ["foo"])))


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
        explain.subject("every thing")


def test_run_puts_our_library_first_and_keeps_what_was_preloaded(monkeypatch, tmp_path):
    monkeypatch.setenv("LD_PRELOAD", "/opt/jemalloc.so /opt/other.so")

    env = run.environment("offline", tmp_path)

    first, *others = env["LD_PRELOAD"].split(":")
    assert os.path.basename(first) == "libvalve.so"
    assert others == ["/opt/jemalloc.so", "/opt/other.so"]
    assert str(tmp_path) == env["VALVE_RUN_DIR"]


def test_run_never_puts_our_library_before_a_sanitizer(monkeypatch, tmp_path):
    monkeypatch.setenv("LD_PRELOAD", "/opt/jemalloc.so /usr/lib/gcc/x86_64-linux-gnu/12/libasan.so")
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")

    env = run.environment("online", tmp_path)

    assert [os.path.basename(entry) for entry in env["LD_PRELOAD"].split(":")] == [
        "libasan.so",
        "libvalve.so",
        "jemalloc.so",
    ]
    assert env["ASAN_OPTIONS"] == "detect_leaks=0:verify_asan_link_order=0"
    monkeypatch.setenv("ASAN_OPTIONS", "verify_asan_link_order=1")
    assert run.environment("online", tmp_path)["ASAN_OPTIONS"] == "verify_asan_link_order=1", "the user's own word"


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc and its address sanitizer")
@pytest.mark.parametrize("linked", [True, False], ids=["linked", "preloaded"])
def test_a_program_with_the_address_sanitizer_is_never_stopped_by_our_library(monkeypatch, tmp_path, linked):
    source = tmp_path / "main.c"
    source.write_text('#include <stdio.h>\nint main(void) { return puts("ran") < 0; }\n')
    flags = ["-fsanitize=address"] if linked else []
    if subprocess.run(["gcc", source, *flags, "-o", tmp_path / "main"], check=False, capture_output=True).returncode:
        pytest.skip("no address sanitizer")
    asan = subprocess.run(["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True).stdout
    monkeypatch.setenv("LD_PRELOAD", "" if linked else asan.strip())

    done = subprocess.run(
        [tmp_path / "main"], env=run.environment("online", tmp_path), capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


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
        (None, [], doctor.Grade.FINE),
        (False, [1, 1], doctor.Grade.FINE),
        (None, [4], doctor.Grade.UNKNOWN),
        (False, [1, 2], doctor.Grade.FINE),
        (False, [1, 4], doctor.Grade.NOTE),
        (True, [8], doctor.Grade.FINE),
    ],
)
def test_doctor_names_the_driver_patch_where_it_would_pay(lock, widths, verdict):
    assert doctor.judge_lock(node_pb2.Driver(device_only_lock=lock), widths).verdict is verdict


@pytest.mark.parametrize(
    ("programs", "verdict"),
    [(["bash", "python3"], doctor.Grade.FINE), (["bash", "dcgm-exporter"], doctor.Grade.NOTE)],
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


def test_a_status_of_the_driver_is_always_said_in_words(repository):
    header = (repository / "proto/abi/nvrm.h").read_text()
    known = {int(code, 16) for code in re.findall(r"NV_ERR_\w+ = (0x[0-9A-F]+)", header)}

    assert known == set(statuses.RM_WORDS)
    assert statuses.status_text(0x65) == "the GPU did not answer in time (RM status 0x65)"
    assert statuses.status_text(0x99) == "RM status 0x99"
    assert statuses.status_text(-errno.ETIMEDOUT) == "no answer in time"
    assert statuses.status_text(-errno.ESRCH) == "No such process"


def test_the_systemd_unit_names_mode_and_config(tmp_path):
    options = SimpleNamespace(mode="observe", config=tmp_path / "valve.toml")
    options.config.touch()

    unit = systemd.unit(options)

    assert f"--default-mode observe --config {tmp_path / 'valve.toml'}" in unit
    assert "KillMode=process" in unit


def test_a_machine_without_systemd_never_gets_a_unit_that_nothing_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(systemd, "BOOTED", tmp_path / "absent")
    options = SimpleNamespace(action="install", mode="observe", config=None, folder=tmp_path, no_start=False)

    with pytest.raises(CliError, match="systemd does not run this machine") as refused:
        systemd.service(options)

    assert "valve up --mode observe" in refused.value.next_step
    assert list(tmp_path.iterdir()) == []


def test_an_events_details_are_sentences_and_never_raw_nanoseconds():
    gate = {"launch_ns": "1000000", "seen_ns": "1010000", "ioctl_ns": "1020000", "done_ns": "1420000"}

    assert words.details(gate) == "stopped 420 us after the launch"
    assert words.details({**gate, "status": "-110"}) == "not stopped yet 420 us after the launch"
    assert words.details({"status": "-110", "channels": "8"}) == "channels 8"  # its reason says what it means
    assert words.details({"share_ppm": "31000", "rest_s": "600", "tau_ms": "5000"}) == (
        "rest 10 min, share 3.1 %, tau 5 s"
    )
    assert words.details({"is_reclaim": "1", "hinted": "0"}) == "hinted no, reclaim yes"
    assert words.details({"h_client": "3251634177", "handle_bytes": str(2 << 20)}) == (
        "h client 0xc1d00001, handle 2 MiB"
    )
    assert words.details({"gap_ns": "12300000", "pid": "4711"}) == "gap 12.3 ms, pid 4711"
    assert words.details({"taken_bytes": str(3 << 29)}) == "taken 1.5 GiB"
    assert words.details({"quiet_us": "24273"}) == "quiet 24.3 ms"
    assert words.details({"comm": "python"}) == "comm python"


def test_an_offline_process_that_is_not_connected_is_never_missing_from_the_status():
    """It may have claimed its role and no GPU yet, or have closed its link; a drain waits for it."""
    chat = node_pb2.Service(id=1, name="chat", role=node_pb2.ROLE_OFFLINE, pids=[7])

    noted = "\n".join(map(str, status.notes(node_pb2.Status(services=[chat], offline_pids=[7, 9075]))))
    crowd = "\n".join(map(str, status.notes(node_pb2.Status(offline_pids=range(1, 1000)))))

    assert "offline and not connected: process 9075" in noted
    assert crowd.endswith("20, ...")
    assert status.notes(node_pb2.Status(services=[chat], offline_pids=[7])) == []


def test_small_pools_are_never_shown_as_nothing():
    assert words.gib(64 << 20) == "64 MiB"


STATUS_ROWS = [("1", "chat-with-a-long-name", "online", "0,1", "12", "3.1 ms", "-", "4711,4712", "busy: open requests")]
STATUS_COLUMNS = ("id", "name", "role", "gpus", "stops", "delay", "harvested", "pids", "state")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_table_never_breaks_a_word_at_any_width(width):
    table = FittingTable("Services", STATUS_COLUMNS, spare=("pids", "delay", "gpus", "harvested", "id", "stops"))
    for row in STATUS_ROWS:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=width).print(table)

    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    assert len(lines) == 4  # title, head, rule, one row: nothing was folded
    assert all(len(line) <= width for line in lines)
    assert "chat-with-a-long-name" in lines[-1]
    assert "busy: open requests" in lines[-1]


def test_a_long_sentence_never_hides_whose_it_is():
    """At 80 columns id and role of all services went, because one of them was alone."""
    service = {"role": node_pb2.ROLE_ONLINE, "state": "alone: there is no offline work on its GPUs"}
    services = [node_pb2.Service(id=number, name="a-service-of-a-name-" + 40 * "x", **service) for number in (1, 2)]
    out = io.StringIO()
    Console(file=out, width=80).print(status.services(node_pb2.Status(services=services)))

    said = out.getvalue()
    assert all(len(line) <= 80 for line in said.splitlines())
    assert {"id", "name", "role", "state"} <= set(said.split())
    assert "…" not in said.replace("a-service-of-a-…" + 16 * "x", "")
    assert " ".join(said.split()).count("no offline work") == 2


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("state", ["memory was taken within tau", "its hook cannot recompute: valved takes no memory"])
def test_an_engines_row_never_hides_a_part_of_a_word(width, state):
    answer = node_pb2.Status()
    answer.memory.engines.add(service=3, name="demo-online", role=node_pb2.ROLE_ONLINE, blocks=51200, state=state)
    out = io.StringIO()
    Console(file=out, width=width).print(status.memory(answer)[-1])

    assert "…" not in (said := out.getvalue())
    assert {"engine", "blocks", "state", "demo-online"} | {*state.split()} <= {*said.split()}
    assert all(len(line) <= width for line in said.splitlines())


@pytest.mark.parametrize("name", [30 * "服务", "team/" + 30 * "服", 30 * "a服", 40 * "e\u0301"])
def test_a_name_of_wide_characters_never_hides_whose_line_it_is(name):
    service = node_pb2.Service(id=7, name=name, role=node_pb2.ROLE_ONLINE, state="alone: there is no offline work")
    out = io.StringIO()
    Console(file=out, width=80).print(status.services(node_pb2.Status(services=[service])))

    assert {"id", "name", "role", "state"} <= set(out.getvalue().split())
    assert words.short(name)[0] == name[0]
    assert words.short(name)[-1] == name[-1]
    assert "…\u0301" not in words.short(name), "an accent of a letter that is not there"


def test_a_wide_terminal_shows_every_column():
    table = FittingTable("Services", STATUS_COLUMNS, spare=("pids",))
    table.add_row(*STATUS_ROWS[0])

    assert table.columns_for(Console(), 200) == list(STATUS_COLUMNS)


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("cooldown.start_ms=inf", "cooldown.start_ms"),
        ("cooldown.factor=-1", "cooldown.factor"),
        ("cooldown.factor=two", "cooldown.factor"),
        ("lease_ms=1", "lease_ms"),
        ("cooldown.start_ms", "cooldown.start_ms"),
    ],
)
def test_a_policy_word_that_makes_no_sense_never_reaches_valved(word, named):
    with pytest.raises(CliError, match=re.escape(named)) as refused:
        policy.changes([word])

    assert refused.value.code == USAGE


def test_policy_words_become_fields_of_the_api_in_its_units():
    assert policy.changes(["cooldown.start_ms=20", "cooldown.factor=2.5"]) == {
        "cooldown_start_ns": 20_000_000,
        "cooldown_factor": 2.5,
    }


def test_explain_takes_the_name_of_a_service_and_says_which_there_are():
    status = SimpleNamespace(
        services=[
            SimpleNamespace(id=3, name="chat"),
            SimpleNamespace(id=9, name="chat"),
            SimpleNamespace(id=4, name="b"),
        ]
    )

    ended = [SimpleNamespace(service=n, detail={"name": name}) for n, name in ((11, "chat"), (12, "old"), (13, "old"))]

    assert explain.service_named("chat", status, ended).service == 9, "one that is here comes first"
    assert explain.service_named("old", status, ended).service == 13
    with pytest.raises(CliError) as refused:
        explain.service_named("chta", status, ended)
    assert "b, chat" in refused.value.next_step


def test_a_socket_of_another_user_is_never_called_a_daemon_that_does_not_run(tmp_path, monkeypatch):
    (tmp_path / API_SOCKET).touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    error = SimpleNamespace(code=lambda: grpc.StatusCode.UNAVAILABLE, trailing_metadata=lambda: (), details=lambda: "")

    found = client.explain_error(error, tmp_path)

    assert found.code == REFUSED
    assert "you may not use" in str(found)


def test_a_daemon_that_hangs_is_never_called_absent(tmp_path):
    error = SimpleNamespace(
        code=lambda: grpc.StatusCode.DEADLINE_EXCEEDED, trailing_metadata=lambda: (), details=lambda: ""
    )

    found = client.explain_error(error, tmp_path)

    assert "does not answer" in str(found)
    assert "valve up" not in found.next_step


@pytest.mark.parametrize("text", ["-1", "0", "nan", "1e9"])
def test_top_refuses_an_interval_that_makes_no_sense(text):
    with pytest.raises(argparse.ArgumentTypeError):
        top.interval(text)


def test_a_recording_never_overwrites_a_file_unasked(tmp_path):
    path = tmp_path / "old"
    path.write_text("kept")

    with pytest.raises(CliError, match="exists"):
        record.record(argparse.Namespace(file=path, force=False, seconds=0.0))

    assert path.read_text() == "kept"


def test_a_recording_in_a_folder_that_is_not_there_is_an_error_with_its_reason(tmp_path):
    with pytest.raises(CliError, match="No such file"):
        record.open_file(tmp_path / "nowhere" / "file")


def test_a_recorded_line_is_on_disk_before_the_recorder_ends(tmp_path):
    out = record.open_file(tmp_path / "events")
    out.write("{}\n")

    assert (tmp_path / "events").read_text() == "{}\n"
    out.close()


def test_a_run_folder_in_the_file_is_never_beaten_by_a_default(tmp_path, monkeypatch):
    file = tmp_path / "valve.toml"
    file.write_text(f'run_dir = "{tmp_path}/mine"\nmode = "observe"\n')
    monkeypatch.delenv("VALVE_RUN_DIR", raising=False)
    options = argparse.Namespace(config=file, mode=None, metrics_port=None)
    folder = up.folder_of(file)
    assert folder == tmp_path / "mine"
    argv = up.arguments(options, folder)
    assert argv[argv.index("--run-dir") + 1] == f"{tmp_path}/mine"
    assert "--mode" not in argv
    assert "--run-dir" not in systemd.unit(options)
    monkeypatch.setenv("VALVE_RUN_DIR", "/elsewhere")
    assert str(up.folder_of(file)) == "/elsewhere"


PASSED = {"pid": 7, "gpu": 0, "rung": "sparse", "outcome": "passed", "took_ns": 24_000}
HUNG = {"pid": 8, "gpu": 1, "rung": "cooperative", "outcome": "hung", "reason": "it took longer than 1 s"}


@pytest.mark.parametrize(
    ("setting", "trials", "verdict", "words"),
    [
        ("auto", [], doctor.Grade.FINE, "no offline process has been tried yet"),
        ("auto", [PASSED], doctor.Grade.FINE, "1 processes passed the trial of sparse, the slowest call took 24 us"),
        ("auto", [PASSED, HUNG], doctor.Grade.NOTE, "pid 8 on GPU 1: trial hung (it took longer than 1 s)"),
        ("helper", [], doctor.Grade.FINE, "memory.remap = helper: nothing is tried"),
    ],
)
def test_doctor_says_what_trials_have_shown(setting, trials, verdict, words):
    memory = node_pb2.Memory(remap=setting, trials=[node_pb2.Trial(**one) for one in trials])

    finding = doctor.judge_remap(memory)

    assert finding.verdict is verdict
    assert words in finding.what


def test_status_says_how_memory_is_taken_from_each_process_and_what_was_let_run():
    trials = [node_pb2.Trial(**one) for one in (PASSED, HUNG)]
    memory = node_pb2.Memory(remap="auto", trials=trials, lets=3, lets_again=1, let_ns=90_000_000)

    assert remap.lines(memory) == [
        "taken by: cooperative from 1, sparse from 1",
        "GPU 1, pid 8, cooperative: trial hung (it took longer than 1 s)",
        "offline steps let end beside a waiting request: 3, in 90 ms, 1 of them once more for the same need",
        remap.price("cooperative"),
        remap.price("sparse"),
    ]


def test_the_prices_that_status_shows_are_those_of_the_page():
    page = (Path(__file__).parents[3] / "docs" / "memory.md").read_text()
    for rung, prices in remap.PRICES.items():
        cells = " | ".join(f"{at:+.1f} % ({low:+.1f} to {high:+.1f})" for at, low, high in prices)

        assert f"| `{rung}` | {cells} |" in page


def test_a_mode_that_does_not_come_into_force_is_never_a_success(monkeypatch, tmp_path):
    monkeypatch.setenv("VALVE_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(up, "ask", lambda folder: node_pb2.Status(mode=node_pb2.MODE_HARVEST))
    options = argparse.Namespace(config=None, mode="observe", foreground=False, metrics_port=None)

    with pytest.raises(CliError, match="in mode harvest") as refused:
        up.up(options)

    assert (refused.value.code, refused.value.next_step) == (REFUSED, "valve mode observe")
    options.mode = "harvest"
    assert up.up(options) == 0


def test_a_machine_without_a_gpu_never_looks_like_one_that_waits_for_work():
    console = Console(file=io.StringIO(), width=80)
    console.print(status.render(node_pb2.Status(mode=node_pb2.MODE_HARVEST)))

    assert "valved found none" in console.file.getvalue()


def test_a_failed_start_never_shows_what_an_older_one_wrote(tmp_path):
    log = tmp_path / "valved.log"
    log.write_text("an old failure\n")
    began = log.stat().st_size
    child = subprocess.Popen(["sh", "-c", f"echo the new one >> {log}; exit 1"])
    child.wait()

    with pytest.raises(CliError, match="the new one") as refused:
        up.wait_until_up(child, tmp_path, log, began)

    assert "an old failure" not in str(refused.value)
