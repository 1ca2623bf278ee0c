"""Who stands by a signal of valved is let go when valved is killed, and nobody else is touched."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from valved.machine.processes import LinuxProcesses
from valved.machine.thawer import AGAIN_S, PROGRAM, Thawer
from valved.model.ids import ProcessId

SLEEPER = [sys.executable, "-S", "-c", "import signal; signal.pause()"]


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def ignored(pid):
    return int(Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")[2].split()[0], 16)


def until(condition):
    end_s = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


@pytest.fixture
def stopped():
    """Three processes that stand."""
    children = [subprocess.Popen(SLEEPER) for _ in range(3)]
    for child in children:
        child.send_signal(signal.SIGSTOP)
        until(lambda child=child: state(child.pid) == "T")
    yield [ProcessId(pid=child.pid, start_time=LinuxProcesses().start_time(child.pid)) for child in children]
    for child in children:
        child.kill()
        child.wait()


class Loop(asyncio.SelectorEventLoop):
    """Its time passes as the test says."""

    now_s = 100.0

    def time(self):
        return self.now_s

    def turn(self):
        self.run_until_complete(asyncio.sleep(0))


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def starts(monkeypatch):
    """The helpers that were started."""
    children, start = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **more: children.append(start(*args, **more)) or children[-1]
    )
    return children


def end_of_valved(thawer):
    child, thawer._child = thawer._child, None
    thawer._loop.remove_reader(thawer._end)
    for fd in (thawer._end, thawer._pipe):
        os.close(fd)
    assert child.wait(200) == 0


def test_who_stands_is_let_go_when_valved_is_gone_and_nobody_else_is(stopped, loop):
    thawer = Thawer(loop)
    named, dropped, other = stopped
    for process in (named, dropped):
        thawer.put(process)
    thawer.put(ProcessId(pid=other.pid, start_time=other.start_time + 1))  # its number came again
    thawer.put(ProcessId(pid=2**22 + 1, start_time=1))  # has ended
    thawer.drop(dropped)
    assert state(named.pid) == "T"

    end_of_valved(thawer)

    until(lambda: state(named.pid) != "T")
    assert state(dropped.pid) == state(other.pid) == "T"


def test_a_signal_to_all_of_valved_s_processes_never_leaves_one_standing(stopped, loop):
    thawer = Thawer(loop)
    thawer.put(stopped[0])
    until(lambda: ignored(thawer._child.pid) & 0x4003 == 0x4003)  # SIGTERM, SIGINT, SIGHUP
    thawer._child.send_signal(signal.SIGTERM)

    end_of_valved(thawer)

    until(lambda: state(stopped[0].pid) != "T")


def test_a_helper_that_was_killed_is_never_missed_by_the_next_who_stands(stopped, loop):
    thawer = Thawer(loop)
    thawer.put(stopped[0])
    thawer._child.kill()
    thawer._child.wait()
    thawer.put(stopped[1])

    end_of_valved(thawer)

    until(lambda: state(stopped[0].pid) != "T" and state(stopped[1].pid) != "T")


def test_nobody_ever_stands_without_a_helper_because_it_was_killed(stopped, loop, starts):
    thawer = Thawer(loop)
    thawer.put(stopped[0])
    loop.now_s += AGAIN_S
    starts[0].kill()

    until(lambda: loop.turn() or len(starts) == 2)

    assert starts[0].returncode == -signal.SIGKILL
    end_of_valved(thawer)
    until(lambda: state(stopped[0].pid) != "T")


def test_a_helper_that_cannot_live_is_never_started_again_and_again(stopped, loop, starts, monkeypatch):
    monkeypatch.setattr("valved.machine.thawer.PROGRAM", Path("/nowhere"))
    thawer = Thawer(loop)
    thawer.put(stopped[0])
    for times in (1, 2, 3):
        until(lambda: loop.turn() or thawer._child is None)
        for _ in range(3):
            loop.turn()
        assert len(starts) == times
        loop.now_s += AGAIN_S
        until(lambda times=times: loop.turn() or len(starts) > times)
    until(lambda: loop.turn() or thawer._child is None)


@pytest.mark.parametrize("lacks", ["pipe2", "pidfd_open"])
def test_a_helper_that_could_not_be_started_is_never_given_up(stopped, loop, starts, lacks):
    thawer = Thawer(loop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, lacks, lambda *_: os.open("/nowhere", 0))
        thawer.put(stopped[0])
    assert thawer._child is None
    loop.now_s += AGAIN_S

    until(lambda: loop.turn() or thawer._child is not None)

    end_of_valved(thawer)
    until(lambda: state(stopped[0].pid) != "T")


def test_no_helper_is_started_where_nobody_stands(stopped, loop, starts):
    thawer = Thawer(loop)
    thawer.put(stopped[0])
    thawer.drop(stopped[0])
    loop.now_s += AGAIN_S
    starts[0].kill()

    until(lambda: loop.turn() or thawer._child is None)
    for _ in range(3):
        loop.turn()

    assert len(starts) == 1


def test_nobody_is_left_standing_because_the_helper_ran_out_of_descriptors(stopped):
    def few():
        resource.setrlimit(resource.RLIMIT_NOFILE, (6, 6))

    lines = "".join(f"+ {process.pid} {process.start_time}\n" for process in stopped)
    command = [sys.executable, "-I", "-S", os.fspath(PROGRAM)]
    subprocess.run(command, input=lines.encode(), check=True, preexec_fn=few)

    until(lambda: all(state(process.pid) != "T" for process in stopped))
