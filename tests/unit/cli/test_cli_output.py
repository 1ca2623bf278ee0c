"""What the commands print: into pipes that close, full disks and old terminals, and names that strangers chose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from valve.v1 import node_pb2, node_pb2_grpc

from valved.cli import events, pause, record, systemd
from valved.cli.client import NodeClient
from valved.cli.exits import FAILED, UNREAD, USAGE, CliError
from valved.paths import grpc_address

SHOW = [str(Path(sys.executable).parent / "valve"), "service", "show"]


def printed(command, stdout, **more):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | more
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=env, text=True, check=False)


@pytest.mark.parametrize("command", [["service", "show"], ["doctor"]], ids=["plain", "in colours"])
def test_a_reader_that_has_enough_is_never_a_failure(command):
    read, write = os.pipe()
    os.close(read)
    try:
        done = printed([SHOW[0], *command], write)
    finally:
        os.close(write)

    assert (done.returncode, done.stderr) == (UNREAD, "")


def test_grpc_never_writes_lines_of_its_own_and_the_command_has_the_environment_of_before(tmp_path):
    """A thread of gRPC that met the exec said "pthread_create failed" in the log of the service."""
    more = {"VALVE_RUN_DIR": str(tmp_path), "GRPC_TRACE": "nonsense"}  # which it would complain of

    done = printed([SHOW[0], "run", "--online", "--", "env"], subprocess.PIPE, **more)

    assert [line for line in done.stderr.splitlines() if not line.startswith("valve: ")] == []
    assert "GRPC_VERBOSITY" not in done.stdout


def test_output_that_a_full_disk_did_not_take_is_never_called_done():
    with open("/dev/full", "w") as full:
        done = printed(SHOW, full)

    assert done.returncode == FAILED
    assert done.stderr == "valve: service: No space left on device\n"


def test_a_character_that_the_terminal_does_not_know_is_never_a_traceback(tmp_path):
    config = tmp_path / "größe.toml"
    config.touch()

    done = printed([*SHOW, "--config", str(config)], subprocess.PIPE, PYTHONIOENCODING="ascii")

    assert done.returncode == 0, done.stderr
    assert r"gr\xf6\xdfe.toml" in done.stdout


@pytest.mark.parametrize("name", ["²", "--5", "-", "007", "1" * 5000, "+3", "1_000", " 4"])
def test_a_name_that_looks_like_a_number_never_breaks_what_an_operator_reads(name):
    """Anybody may give a process such a name, and valved tells of it when it refuses the process."""
    event = node_pb2.Event(
        seq=1, t_ns=1, kind="refused", reason="no", detail={"comm": name, "gap_ns": name, "pid": "7"}
    )

    assert name in str(events.line(event, 10))
    assert record.as_record(event)["detail"] == {"comm": name, "gap_ns": name, "pid": 7}


def test_a_timeline_is_never_written_over_one_that_is_there(tmp_path):
    file = tmp_path / "day"
    timeline = tmp_path / "day.perfetto.json"
    timeline.write_text("an hour of work")

    with pytest.raises(CliError) as caught:
        record.record(SimpleNamespace(file=file, force=False, seconds=1.0))

    assert caught.value.code == USAGE
    assert str(timeline) in str(caught.value)


def test_a_process_that_rests_never_fills_the_memory_of_who_records():
    last = {}
    clients = [node_pb2.Client(id=1, pid=7, comm="idle", submitted=5), node_pb2.Client(id=2, pid=8, comm="works")]
    found = []
    for look in range(100):
        clients[1].submitted += 10 * look
        found.append([*record.tracks(node_pb2.Status(monotonic_ns=look * 10**9, clients=clients), last)])

    assert len(found[0]) == 4
    assert {one["name"] for one in found[-1]} == {"works 8: launches/s"}
    assert [one["args"]["launches/s"] for one in found[-1]] == [990]


def test_the_brake_never_fails_because_of_how_its_user_is_called(tmp_path, monkeypatch):
    monkeypatch.setenv("VALVE_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "mall\udcffory\n\x1b[2J")

    assert pause.pause(None) == 0

    assert (tmp_path / "pause").read_text() == "mall?ory??[2J\n"


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/etc/valve.toml", "/etc/valve.toml"),
        ("/etc/my valve.toml", '"/etc/my valve.toml"'),
        ("/etc/100%.toml", '"/etc/100%%.toml"'),
        ('/etc/$HOME"\\.toml', '"/etc/$$HOME\\"\\\\.toml"'),
    ],
)
def test_a_path_never_becomes_other_words_in_the_unit(path, word):
    unit = systemd.unit(SimpleNamespace(config=None, mode=None)).replace("\n", f" --config {word}\n")

    assert systemd.quoted(Path(path)) == word
    assert f"--config {word}" in unit


class Crowded(node_pb2_grpc.NodeServicer):
    def GetStatus(self, request, context):
        client = node_pb2.Client(comm="x" * 100, notes=["y" * 1000])
        return node_pb2.Status(clients=[client] * 10_000)


def test_a_node_full_of_processes_is_never_one_whose_status_cannot_be_read(tmp_path):
    server = grpc.server(futures.ThreadPoolExecutor(1))
    node_pb2_grpc.add_NodeServicer_to_server(Crowded(), server)
    server.add_insecure_port(grpc_address(tmp_path / "valved.sock"))
    server.start()
    connection = NodeClient(tmp_path)
    try:
        assert len(connection.status().clients) == 10_000
    finally:
        connection.close()
        server.stop(None)


def test_json_lines_of_strange_names_are_never_unreadable():
    event = node_pb2.Event(seq=1, t_ns=1, kind="refused", reason='a"b\\', detail={"comm": "²\u202e"})

    assert json.loads(json.dumps(record.as_record(event)))["detail"]["comm"] == "²\u202e"
