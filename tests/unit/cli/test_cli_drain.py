"""`valve drain` says what it waits for, how long at most, and by its exit code how it ended."""

from __future__ import annotations

import argparse
import contextlib
import os
from types import SimpleNamespace

import pytest
from valve.v1 import node_pb2

from valved.cli import drain
from valved.cli.exits import FAILED, NOT_RUNNING, REFUSED, STILL_THERE, CliError

SECOND = 1_000_000_000
GONE = CliError("no valved answers", NOT_RUNNING, "start it: valve up", is_silence=True)


def leaver(pid, waits_for="it was asked to end", until_s=60.0):
    return node_pb2.Leaver(pid=pid, waits_for=waits_for, until_ns=round((100 + until_s) * SECOND) if until_s else 0)


def status(*leavers, draining=True, now_s=0.0, valved=1):
    batch = [node_pb2.Service(name="batch", role=node_pb2.ROLE_OFFLINE, pids=[one.pid for one in leavers])]
    return node_pb2.Status(
        draining=draining,
        pid=valved,
        services=batch if leavers else [],
        leavers=leavers,
        offline_pids=[one.pid for one in leavers],
        monotonic_ns=round((100 + now_s) * SECOND),
    )


@pytest.fixture
def run(monkeypatch):
    """`valve drain` beside a valved that answers one after another."""

    def run(*answers, stop=False, timeout=120.0):
        left = list(answers)

        def answer(*_):
            told = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(told, BaseException):
                raise told
            return told

        connection = SimpleNamespace(stub=SimpleNamespace(Drain=None), call=answer, status=answer)
        monkeypatch.setattr(drain, "node", lambda: contextlib.nullcontext(connection))
        monkeypatch.setattr(drain, "LOOK_S", 0.0)
        return drain.drain(argparse.Namespace(stop=stop, timeout=timeout))

    return run


def test_a_drain_that_is_interrupted_never_goes_on_without_a_word(run, capsys):
    with pytest.raises(KeyboardInterrupt):
        run(status(leaver(7)), KeyboardInterrupt())

    assert capsys.readouterr().err.endswith("goes on and ends offline processes; undo it: valve resume\n")


def test_a_drain_never_waits_without_saying_for_whom_and_how_long_at_most(run, capsys):
    assert run(status(leaver(7), leaver(8, until_s=59.5)), status()) == 0

    told = capsys.readouterr().err
    assert "2 of its processes must end, 60 s at most" in told
    assert "process 7 (batch): it was asked to end, killed in 60 s" in told
    assert "process 8 (batch): it was asked to end, killed in 60 s" in told


def test_a_drain_never_names_a_bound_that_nobody_keeps(run, capsys):
    run(status(leaver(7), leaver(8, "the controller evicts its pod", until_s=0)), status())

    told = capsys.readouterr().err
    assert "nobody can say how long" in told
    assert "process 8 (batch): the controller evicts its pod\n" in told


def test_what_a_drain_waits_for_is_told_when_it_changes_and_never_again_while_it_does_not(run, capsys):
    asked = [status(leaver(7), now_s=at) for at in range(5)]
    killed = [status(leaver(7, "it was killed", until_s=0), now_s=at) for at in range(60, 65)]

    run(*asked, *killed, status())

    told = capsys.readouterr().err
    assert [told.count(one) for one in ("asked to end", "it was killed")] == [1, 1]


def test_a_drain_whose_time_is_over_never_ends_like_one_that_failed(run):
    with pytest.raises(CliError, match=r"still there after 0 s: batch \(7\)") as caught:
        run(status(leaver(7)), timeout=0.0)

    assert caught.value.code == STILL_THERE


def test_a_drain_that_was_taken_back_is_never_waited_for(run):
    with pytest.raises(CliError, match="taken back") as caught:
        run(status(leaver(7)), status(leaver(7), draining=False))

    assert caught.value.code == REFUSED


def test_a_drain_that_was_taken_back_before_its_answer_is_never_called_done(run):
    """By another operator, while its file was slow."""
    with pytest.raises(CliError, match="taken back"):
        run(status(draining=False))


def test_a_valved_that_was_killed_is_never_taken_for_one_that_has_drained(run):
    with pytest.raises(CliError, match=f"before the offline processes {os.getpid()}") as caught:
        run(status(leaver(os.getpid())), GONE, stop=True)

    assert caught.value.code == FAILED
    assert run(status(leaver(2**22 + 1)), GONE, stop=True) == 0


def test_who_is_left_of_very_many_is_never_a_wall_of_text(run, capsys):
    run(status(*map(leaver, range(1, 101))), status())

    assert "and 92 more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "ends"), [(FAILED, False), (FAILED, True), (NOT_RUNNING, False)], ids=["busy", "busy, to end", "restarted"]
)
def test_a_valved_that_is_silent_for_once_never_ends_a_drain(code, ends):
    before = status(leaver(7))

    def silent():
        raise CliError("does not answer", code, is_silence=True)

    assert drain.look(SimpleNamespace(status=silent), before, drain.Unanswered(ends=ends)) is before


@pytest.mark.parametrize("code", [NOT_RUNNING, FAILED], ids=["dead", "hung"])
def test_a_drain_whose_valved_is_silent_never_waits_without_saying_so(run, capsys, code):
    """Once, and again when it answers."""
    gone = CliError("no answer", code, "start it: valve up", is_silence=True)

    assert run(status(leaver(7)), gone, gone, gone, status(leaver(7)), status()) == 0

    told = capsys.readouterr().err
    assert told.count("no answer: offline work is not ended meanwhile, and may run again; start it: valve up") == 1
    assert told.count("valved answers again") == 1


def test_a_drain_whose_valved_does_not_come_back_never_ends_like_one_that_waits_for_processes(run, monkeypatch):
    monkeypatch.setattr(drain, "AWAY_S", 0.0)

    with pytest.raises(CliError, match="not known which processes are left") as caught:
        run(status(leaver(7)), GONE)

    assert (caught.value.code, caught.value.next_step) == (NOT_RUNNING, "start it: valve up; then drain again")


def test_a_drain_that_ends_valved_is_never_said_to_go_on_in_the_next_one(run, capsys):
    """No file tells it: valved was to end when none is left. It was killed beside processes that are here yet."""
    hung = CliError("no answer", FAILED, "restart it", is_silence=True)

    with pytest.raises(CliError, match="valved 1 ended, and 2 does not drain: offline work goes on") as caught:
        run(status(leaver(7)), hung, status(leaver(7), draining=False, valved=2), stop=True)

    assert (caught.value.code, caught.value.next_step) == (FAILED, "drain again: valve drain --stop")
    assert "restart it. One that is started anew does not drain\n" in capsys.readouterr().err


def test_a_drain_that_no_file_took_is_never_said_to_go_on_in_the_next_one(run, capsys):
    held = status(leaver(7))
    held.unwritten.add(path="/run/valve/drain", error="Read-only file system")

    with pytest.raises(CliError, match="valved 1 ended, and 2 does not drain: offline work goes on") as caught:
        run(held, held, GONE, status(leaver(7), draining=False, valved=2))

    assert caught.value.next_step == "drain again: valve drain"
    assert "One that is started anew does not drain\n" in capsys.readouterr().err
