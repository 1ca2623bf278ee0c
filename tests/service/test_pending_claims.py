"""An online process that starts while valved does not answer: it is not kept waiting, and is claimed later."""

from __future__ import annotations

import errno
import os
import socket
from types import SimpleNamespace

import pytest
from node_world import World
from scarce import left

from valved.cli import run as cli_run
from valved.cli.client import NodeClient
from valved.model.ids import Role
from valved.state import pending

UNSAID = {"slo": "", "grant": None, "share_weights": None}


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    pending.make_folder(tmp_path)
    return world


def test_a_process_that_started_while_valved_was_silent_is_never_refused_its_role(world, tmp_path):
    world.processes.add(700)
    assert pending.leave(tmp_path, pending.PendingClaim(pid=700, start_time=7000, name="chat"))

    client = world.hello(700, wanted=Role.ONLINE).client

    assert world.books.clients[client].role is Role.ONLINE
    assert not list((tmp_path / "claims").iterdir())


@pytest.mark.parametrize("data", [b"", b"{", b'{"pid": "x"}', b'{"pid":700,"start_time":1,"name":"x"}', bytes(9000)])
def test_a_claim_without_sense_never_claims_anything_and_never_stays(world, tmp_path, data):
    world.processes.add(700)
    (tmp_path / "claims" / "700-1").write_bytes(data)

    world.hello(700, wanted=Role.ONLINE)

    assert not world.books.claims
    assert not list((tmp_path / "claims").iterdir())


def test_a_claim_is_never_thrown_away_because_it_cannot_be_read_now(world, tmp_path, monkeypatch):
    world.processes.add(700)
    assert pending.leave(tmp_path, pending.PendingClaim(pid=700, start_time=7000, name="chat"))

    def cannot_open(*_, **__):
        raise OSError(errno.EMFILE, "too many open files")

    with left(0):
        assert not pending.read(tmp_path)
    with monkeypatch.context() as scarce:
        scarce.setattr(os, "open", cannot_open)
        assert not pending.read(tmp_path)

    assert world.hello(700, wanted=Role.ONLINE).client is not None


def test_a_claim_is_never_thrown_away_because_its_process_cannot_be_looked_at_now(world, tmp_path):
    world.processes.add(700)
    assert pending.leave(tmp_path, pending.PendingClaim(pid=700, start_time=7000, name="chat"))

    def cannot_look(pid):
        raise OSError(errno.EMFILE, "too many open files")

    world.processes.start_time, found = cannot_look, world.processes.start_time
    world.register.listener.someone_knocks()
    world.processes.start_time = found

    assert world.hello(700, wanted=Role.ONLINE).client is not None


def test_a_claim_that_fails_by_a_defect_never_keeps_everybody_from_joining(world, tmp_path, monkeypatch):
    world.processes.add(700)
    assert pending.leave(tmp_path, pending.PendingClaim(pid=700, start_time=7000, name="chat"))
    monkeypatch.setattr(world.node, "launch", lambda *_: 1 / 0)

    assert world.offline(pid=701, claimed=False) is not None
    assert not list((tmp_path / "claims").iterdir())


def test_a_valved_that_does_not_answer_never_keeps_an_online_process_from_starting(tmp_path, monkeypatch):
    """A socket that takes connections and never says a word."""
    pending.make_folder(tmp_path)
    monkeypatch.setenv("VALVE_RUN_DIR", str(tmp_path))
    became, deadlines = [], []
    monkeypatch.setattr(cli_run, "become", lambda argv, env: became.append(env) or 0)
    call = NodeClient.call

    def timed(self, method, request, *, deadline_s=10.0):
        deadlines.append(deadline_s)
        return call(self, method, request, deadline_s=deadline_s)

    monkeypatch.setattr(NodeClient, "call", timed)
    options = SimpleNamespace(argv=["true"], online=True, name="chat", ungated=False, **UNSAID)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "valved.sock"))
        silent.listen()
        assert cli_run.run(options) == 0

    assert deadlines == [0.2]
    assert "LD_PRELOAD" in became[0]
    [(_, claim)] = pending.read(tmp_path)
    assert (claim.pid, claim.name) == (os.getpid(), "chat")


def test_without_any_valved_here_an_online_process_runs_untouched(tmp_path, monkeypatch):
    monkeypatch.setenv("VALVE_RUN_DIR", str(tmp_path))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    became = []
    monkeypatch.setattr(cli_run, "become", lambda argv, env: became.append(env) or 0)

    assert cli_run.run(SimpleNamespace(argv=["true"], online=True, name="", ungated=False, **UNSAID)) == 0

    assert "LD_PRELOAD" not in became[0]


def test_an_offline_job_that_runs_ungated_is_never_claimed_as_online(tmp_path, monkeypatch):
    """Nothing but online claims waits in files: an offline job's would make it a service that stops all others."""
    pending.make_folder(tmp_path)
    monkeypatch.setenv("VALVE_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(cli_run, "become", lambda argv, env: 0)

    assert cli_run.run(SimpleNamespace(argv=["job"], online=False, name="", ungated=True, **UNSAID)) == 0

    assert not list((tmp_path / "claims").iterdir())


def test_a_link_or_a_pipe_among_the_claims_is_never_followed_and_never_waited_for(tmp_path):
    """The folder may be a group's: whoever writes there could aim root at any file, or hang the daemon."""
    pending.make_folder(tmp_path)
    folder, victim = tmp_path / pending.FOLDER, tmp_path / "victim"
    victim.write_text("untouched")
    (folder / ".7-8").symlink_to(victim)
    os.mkfifo(folder / "1-2")
    (folder / "3-4").symlink_to(victim)

    assert pending.leave(tmp_path, pending.PendingClaim(pid=7, start_time=8, name="chat"))
    found = pending.read(tmp_path)

    assert [claim.pid for _, claim in found] == [7]
    assert victim.read_text() == "untouched"
