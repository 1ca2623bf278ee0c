"""Who a process is: from a /proc of our own making, and from the real one where a real process is the point."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from node_world import FakeReactor, FakeThawer
from scarce import left, opened
from virtual import VirtualClock

from valved.clients.exits import Exits
from valved.machine.processes import _THREADS, LinuxProcesses
from valved.machine.signals import AGAIN_NS, Delivery, Signals, with_one_more
from valved.model.ids import ProcessId


def world(root: Path, **processes: tuple[str, int, int, str]) -> LinuxProcesses:
    """A /proc: pN = (name, parent, start time, state)."""
    for key, (name, parent, start, state) in processes.items():
        folder = root / key[1:]
        (folder / "task" / key[1:]).mkdir(parents=True)
        between = " ".join(["0"] * 17)
        first = folder / "task" / key[1:] / "stat"
        first.write_text(f"{key[1:]} ({name}) {state} {parent} {between} {start} 0 0\n")
        (folder / "comm").write_text(name + "\n")
        (folder / "status").write_text(f"Name:\t{name}\nShdPnd:\t0000000000000000\n")
    return LinuxProcesses(root)


def test_only_a_process_of_our_user_that_sees_our_number_could_end_us(tmp_path: Path) -> None:
    """One in a container has our user's number, and none for us."""
    for pid, space in ((os.getpid(), "pid:[1]"), (5, "pid:[1]"), (6, "pid:[2]")):
        (tmp_path / str(pid) / "ns").mkdir(parents=True)
        (tmp_path / str(pid) / "ns" / "pid").symlink_to(space)
    processes, uid = LinuxProcesses(tmp_path), os.geteuid()

    assert processes.could_end_us(5, uid)
    assert not processes.could_end_us(5, uid + 1)
    assert not processes.could_end_us(6, uid)
    assert not processes.could_end_us(7, uid)


def test_a_process_that_a_security_module_keeps_from_us_is_never_one_that_could_end_us(tmp_path: Path) -> None:
    """A root container that sees all pids has our user and our numbers, and AppArmor forbids it to signal us."""
    profiles = {os.getpid(): "unconfined\n", 5: "unconfined\n", 6: "docker-default (enforce)\n"}
    for pid, profile in profiles.items():
        (tmp_path / str(pid) / "ns").mkdir(parents=True)
        (tmp_path / str(pid) / "ns" / "pid").symlink_to("pid:[1]")
        (tmp_path / str(pid) / "attr").mkdir()
        (tmp_path / str(pid) / "attr" / "current").write_text(profile)
    processes, uid = LinuxProcesses(tmp_path), os.geteuid()

    assert processes.could_end_us(5, uid)
    assert not processes.could_end_us(6, uid)


def test_start_time_survives_a_name_with_blanks_and_brackets(tmp_path: Path) -> None:
    processes = world(tmp_path, p5=("a) S 1 (b", 1, 777, "S"))

    assert processes.start_time(5) == 777


def test_a_process_that_is_gone_has_no_start_time_and_no_name(tmp_path: Path) -> None:
    processes = world(tmp_path)

    assert processes.start_time(5) is None
    assert processes.comm(5) == ""
    assert processes.cgroup(5) is None
    assert list(processes.ancestors(5)) == []


def test_a_process_never_has_another_start_time_for_an_observer_in_a_time_namespace(tmp_path: Path) -> None:
    """A command and valved, or valved and its successor, name a process by it; the kernel shifts what it shows."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "timens_offsets").write_text(
        "monotonic          -3         0\nboottime          -2 500000000\n"
    )
    processes = world(tmp_path, p5=("x", 1, 777 - 150, "S"))
    known = ProcessId(pid=5, start_time=777)

    assert processes.start_time(5) == 777
    assert list(processes.ancestors(5)) == [known]
    assert not processes.is_gone(known)
    assert not processes.is_ending(5, 777)


def test_a_zombie_counts_as_gone(tmp_path: Path) -> None:
    assert world(tmp_path, p5=("x", 1, 777, "Z")).start_time(5) is None


def thread(root: Path, pid: int, tid: int, state: str, flags: int) -> None:
    folder = root / str(pid) / "task" / str(tid)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(f"{tid} (x) {state} 1 0 0 0 0 {flags} 0 0 0 0 0 0 0 0 0 0 0 0 777 0 0\n")


@pytest.mark.parametrize(
    ("threads", "is_ending"),
    [
        ([("S", 0x400000)], False),
        ([("Z", 0x40844C)], True),
        ([("R", 0x40044C)], True),  # killed: its files are closed before it is a zombie
        ([("D", 0x40044C), ("X", 0x40844C)], True),
        ([("Z", 0x40844C), ("S", 0x400040)], False),  # only its first thread has ended
    ],
)
def test_a_process_ends_when_none_of_its_threads_runs_code_of_its_own(
    tmp_path: Path, threads: list[tuple[str, int]], is_ending: bool
) -> None:
    processes = world(tmp_path, p5=("x", 1, 777, threads[0][0]))
    for number, (state, flags) in enumerate(threads):
        thread(tmp_path, 5, 5 + number, state, flags)

    assert processes.is_ending(5, 777) is is_ending
    assert processes.is_ending(5, 778)
    assert processes.is_ending(6, 777)


@pytest.mark.parametrize("leader", ["T", "Z"])  # Z: its other thread is in a call of the driver
@pytest.mark.parametrize(("waiting", "is_ending"), [(signal.SIGKILL, True), (signal.SIGTERM, False)])
def test_no_process_lives_on_for_anybody_between_its_kill_and_the_first_line_of_its_end(
    tmp_path: Path, waiting: signal.Signals, is_ending: bool, leader: str
) -> None:
    processes = world(tmp_path, p5=("x", 1, 777, leader))
    thread(tmp_path, 5, 6, "D", 0x400040)
    status = f"Name:\tx\nSigPnd:\t0000000000000000\nShdPnd:\t{1 << waiting - 1:016x}\nSigBlk:\t0000000000000000\n"
    (tmp_path / "5" / "status").write_text(status)

    assert processes.is_ending(5, 777) is is_ending


@pytest.mark.parametrize("leader", ["t", "Z"])
def test_no_process_whose_exit_a_tracer_holds_is_taken_for_one_that_ends(tmp_path: Path, leader: str) -> None:
    """PTRACE_O_TRACEEXIT: its files are open, and what it gave the GPU runs on."""
    processes = world(tmp_path, p5=("x", 1, 777, leader))
    thread(tmp_path, 5, 6, "t", 0x400448)
    (tmp_path / "5" / "status").write_text(f"Name:\tx\nShdPnd:\t{1 << signal.SIGKILL - 1:016x}\n")
    assert not processes.is_ending(5, 777)

    for held in (5, 6):
        thread(tmp_path, 5, held, "Z", 0x40844C)
    assert processes.is_ending(5, 777)


def test_a_real_process_ends_from_its_kill_on() -> None:
    processes = LinuxProcesses()
    for _ in range(20):
        with subprocess.Popen(["sleep", "1000"]) as child:
            started = processes.start_time(child.pid)
            assert started is not None
            child.send_signal(signal.SIGSTOP)
            assert not processes.is_ending(child.pid, started)
            child.kill()
            assert processes.is_ending(child.pid, started)


@pytest.mark.parametrize(
    ("states", "is_stopped"), [("T", True), ("TtDZ", True), ("TS", False), ("R", False), ("", True)]
)
def test_a_process_is_stopped_when_none_of_its_threads_runs_before_it_is_continued(
    tmp_path: Path, states: str, is_stopped: bool
) -> None:
    for number, state in enumerate(states):
        thread(tmp_path, 5, 5 + number, state, 0x400000)

    assert LinuxProcesses(tmp_path).is_stopped(5) is is_stopped


def test_a_process_never_counts_as_running_for_how_many_threads_of_it_stand(tmp_path: Path) -> None:
    """Regression: with more than 512 it did. One look at all of them would keep the loop."""
    for number in range(2 * _THREADS + 1):
        thread(tmp_path, 5, 5 + number, "T", 0x400000)
    processes, stood = Opened(tmp_path), set[str]()

    assert [processes.is_stopped(5, stood) for _ in range(3)] == [None, None, True]
    assert processes.reads == 2 * _THREADS + 1
    thread(tmp_path, 5, 4, "R", 0x400000)
    assert processes.is_stopped(5, stood) is False


class Opened(LinuxProcesses):
    """Counts what it reads, and fails from the nth file on."""

    def __init__(self, root: Path, fails_at: int = 1 << 30) -> None:
        super().__init__(root)
        self.reads = 0
        self._fails_at = fails_at

    def _read(self, pid: int | str, name: str) -> str | None:
        self.reads += 1
        if self.reads >= self._fails_at:
            raise OSError(errno.EMFILE, "too many open files")
        return super()._read(pid, name)


def test_no_thread_is_read_when_the_first_says_that_its_process_lives(tmp_path: Path) -> None:
    """An engine has thousands, and the loop waits."""
    world(tmp_path, p5=("x", 1, 777, "S"))
    for number in range(50):
        thread(tmp_path, 5, 5 + number, "S", 0x400000)
    processes = Opened(tmp_path)

    assert not processes.is_ending(5, 777)
    assert processes.reads == 2, "its stat, and the signals that wait for it"


def test_no_more_threads_are_read_than_up_to_one_that_runs(tmp_path: Path) -> None:
    world(tmp_path, p5=("x", 1, 777, "Z"))
    for number in range(1, 51):
        thread(tmp_path, 5, 5 + number, "S", 0x400000)
    processes = Opened(tmp_path)

    assert not processes.is_ending(5, 777)
    assert processes.reads <= 3


@pytest.mark.parametrize(
    "look",
    [
        lambda processes: processes.start_time(5),
        lambda processes: processes.ancestors(5),
        lambda processes: not processes.is_ending(5, 777),
        lambda processes: not processes.is_stopped(5),
    ],
)
def test_threads_that_a_tracer_keeps_after_their_end_never_keep_the_loop(
    tmp_path: Path, look: Callable[[LinuxProcesses], object]
) -> None:
    """Any process may have tens of thousands of them. It counts as one that lives, as it could."""
    world(tmp_path, p5=("x", 1, 777, "Z"))
    (tmp_path / "5/task/5/stat").write_text(f"5 (x) Z 1 {'0 ' * 15}{2 * _THREADS} 0 777 0 0\n")
    for number in range(1, 2 * _THREADS):
        thread(tmp_path, 5, 5 + number, "Z", 0x40044C)
    processes = Opened(tmp_path)

    assert look(processes)
    assert processes.reads <= _THREADS + 2


def test_no_file_is_ever_read_for_which_the_kernel_walks_all_threads_of_a_process(tmp_path: Path) -> None:
    """/proc/PID/stat sums up their times: 4.5 ms of 20,000 threads. There is none here."""
    processes = world(tmp_path, p5=("x", 1, 777, "S"))

    assert processes.start_time(5) == 777
    assert processes.ancestors(5) == [ProcessId(pid=5, start_time=777)]
    assert not processes.is_ending(5, 777)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_no_lack_of_descriptors_keeps_a_client_from_being_taken_out_of_the_books(tmp_path: Path, fails_at: int) -> None:
    """It would raise in the middle of a client's leaving."""
    world(tmp_path, p5=("x", 1, 777, "Z"))
    thread(tmp_path, 5, 6, "Z", 0x40044C)

    assert not Opened(tmp_path, fails_at).is_ending(5, 777)


def hide(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, "no look")

    monkeypatch.setattr(os, "open", fail)


def answer_signals(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def kill(pid: int, sent: int) -> None:
        assert (pid, sent) == (5, 0)
        if number:
            raise OSError(number, "no signal")

    monkeypatch.setattr(os, "kill", kill)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ESRCH])
def test_a_number_that_a_hidden_process_of_another_user_has_by_now_is_never_taken_for_who_had_it_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    hide(monkeypatch, errno.EPERM)
    answer_signals(monkeypatch, number)

    assert LinuxProcesses(tmp_path).is_gone(ProcessId(pid=5, start_time=777))
    assert LinuxProcesses(tmp_path).is_ending(5, 777)


@pytest.mark.parametrize("answer", [0, errno.ESRCH])
def test_no_process_is_taken_for_gone_because_proc_has_no_folder_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    """hidepid=2 hides the folder, too: a process of our user that is not dumpable any more, or may more than we."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mounts").write_text(f"proc {tmp_path} proc rw,relatime,hidepid=invisible 0 0\n")
    processes = world(tmp_path, p6=("x", 1, 777, "S"))
    answer_signals(monkeypatch, answer)
    shown, hidden = ProcessId(pid=6, start_time=777), ProcessId(pid=5, start_time=777)

    assert processes.is_gone(hidden) is (answer == errno.ESRCH)
    assert processes.is_ending(5, 777) is (answer == errno.ESRCH)
    assert processes.is_stopped(5) is (answer == errno.ESRCH)  # one that is gone runs no more
    assert not processes.is_gone(shown)


@pytest.mark.parametrize("answer", [0, errno.EACCES])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM])
def test_no_process_is_taken_for_gone_because_it_cannot_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, answer: int
) -> None:
    processes = world(tmp_path, p5=("x", 1, 777, "S"))
    hide(monkeypatch, number)
    answer_signals(monkeypatch, answer)

    assert not processes.is_gone(ProcessId(pid=5, start_time=777))
    assert not processes.is_ending(5, 777)
    with pytest.raises(OSError, match="no look"):
        processes.start_time(5)


def test_no_process_that_cannot_be_looked_at_is_taken_for_stopped(tmp_path: Path) -> None:
    thread(tmp_path, 5, 5, "R", 0)

    assert not Opened(tmp_path, fails_at=1).is_stopped(5)


def test_a_signal_that_cannot_be_sent_for_want_of_a_descriptor_is_never_lost() -> None:
    """A process that is not continued stands for ever; one that is not killed runs on with its channels on."""
    processes, clock = LinuxProcesses(), VirtualClock()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = processes.start_time(child.pid)
    assert start is not None
    process, signals = ProcessId(pid=child.pid, start_time=start), Signals(processes, clock, FakeThawer())
    assert signals.send(process, signal.SIGSTOP) is Delivery.DONE
    before = opened()
    for count in range(2):
        with left(count):
            assert signals.send(process, signal.SIGCONT) is Delivery.WAITS
            assert signals.send(process, signal.SIGTERM) is Delivery.WAITS
            assert signals.waiting(signal.SIGCONT) == signals.waiting(signal.SIGTERM) == {process}
            clock.advance(10 * AGAIN_NS)
            assert clock.waiting == 1, "one timer, however many signals wait and however often"

        assert not opened() - before
        assert child.poll() is None

    clock.advance(AGAIN_NS)

    assert child.wait() == -signal.SIGTERM, "it stood: without the other one it would stand for ever"
    assert not signals.waiting(signal.SIGCONT, signal.SIGTERM)
    assert signals.send(process, signal.SIGCONT) is Delivery.FAILED
    assert clock.waiting == 0


STOP, CONT, TERM, KILL = signal.SIGSTOP, signal.SIGCONT, signal.SIGTERM, signal.SIGKILL


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ((CONT, TERM), (CONT, TERM)),
        ((TERM, STOP), (TERM, STOP)),
        ((STOP, CONT), (CONT,)),
        ((CONT, STOP, STOP), (STOP,)),
        ((STOP, TERM, CONT), (TERM, CONT)),
        ((STOP, TERM, KILL), (KILL,)),
        ((KILL, STOP, CONT, TERM), (KILL,)),
    ],
)
def test_no_signal_that_waits_is_dropped_for_one_that_does_not_say_the_opposite(
    asked: tuple[signal.Signals, ...], sent: tuple[signal.Signals, ...]
) -> None:
    queue: tuple[signal.Signals, ...] = ()
    for number in asked:
        queue = with_one_more(queue, number)

    assert queue == sent


def test_a_real_process_is_ending_when_its_files_are_closed_and_not_before() -> None:
    """An end of file that comes from a kill is told from one that comes from a close."""
    processes = LinuxProcesses()
    script = "import os, sys; block = bytearray(1 << 28); os.close(1); input()"
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe)
    start = processes.start_time(child.pid)
    assert start is not None
    assert child.stdout is not None
    assert child.stderr is not None

    assert child.stdout.read() == b""
    assert not processes.is_ending(child.pid, start)
    child.kill()
    assert child.stderr.read() == b""
    assert processes.is_ending(child.pid, start)
    child.communicate()


def test_ancestors_lead_up_to_one(tmp_path: Path) -> None:
    processes = world(tmp_path, p1=("init", 0, 1, "S"), p5=("sh", 1, 5, "S"), p9=("vllm", 5, 9, "S"))

    assert [process.pid for process in processes.ancestors(9)] == [9, 5, 1]
    assert [process.start_time for process in processes.ancestors(9, 2)] == [9, 5]


def test_ancestors_of_a_torn_tree_end(tmp_path: Path) -> None:
    processes = world(tmp_path, p5=("a", 9, 5, "S"), p9=("b", 5, 9, "S"))

    assert len(processes.ancestors(9)) <= 64


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("0::/kubepods/pod1/c\n", "/kubepods/pod1/c"),
        ("3:cpu:/old\n0::/new\n", "/new"),
        ("3:cpu:/\n2:pids:/kubepods/pod1/c\n0::/\n", "/kubepods/pod1/c"),
        ("3:cpu:/\n0::/\n", "/"),
        ("3:cpu:/old:odd\n", "/old:odd"),
        ("nonsense\n", None),
    ],
)
def test_cgroup_is_the_unified_path_where_there_is_one(tmp_path: Path, text: str, path: str | None) -> None:
    processes = world(tmp_path, p5=("a", 1, 5, "S"))
    (tmp_path / "5/cgroup").write_text(text)

    assert processes.cgroup(5) == path


def test_a_real_process_is_known_until_it_is_killed() -> None:
    processes = LinuxProcesses()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = processes.open_pidfd(child.pid)

    assert processes.start_time(child.pid) is not None
    assert [process.pid for process in processes.ancestors(child.pid, 2)] == [child.pid, os.getpid()]

    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    child.communicate()

    assert processes.start_time(child.pid) is None
    assert processes.open_pidfd(child.pid) == -1
    os.close(pidfd)


def test_no_process_has_ended_while_a_thread_of_it_runs() -> None:
    """/proc shows the state of the first thread alone: a zombie here, while the other reads."""
    processes = LinuxProcesses()
    script = (
        "import ctypes, sys, threading; threading.Thread(target=sys.stdin.read).start(); ctypes.CDLL(None).syscall(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    exits = Exits(FakeReactor(), processes, VirtualClock())
    assert exits.watch("it", child.pid, lambda: None)
    start = processes.start_time(child.pid)
    assert start is not None
    process = ProcessId(pid=child.pid, start_time=start)
    while ") Z " not in Path(f"/proc/{child.pid}/stat").read_text():
        time.sleep(0.001)

    assert not exits.has_ended("it")
    assert not processes.is_gone(process)

    assert Signals(processes, VirtualClock(), FakeThawer()).send(process, signal.SIGKILL) is Delivery.DONE
    child.communicate()
    assert exits.has_ended("it")
    assert processes.is_gone(process)
    exits.close()


def test_a_process_that_is_watched_is_never_given_up_because_it_is_asked_for_again() -> None:
    """Its number may mean another by then, and there may be no descriptor."""
    processes = LinuxProcesses()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = ProcessId(pid=child.pid, start_time=processes.start_time(child.pid) or 0)
    exits, gone = Exits(FakeReactor(), processes, VirtualClock()), list[str]()
    exits.await_end(process, lambda: gone.append("told"))

    with left(0):
        exits.await_end(process, lambda: gone.append("told"))
    child.communicate()

    assert exits.has_ended(process)
    exits.await_end(process, lambda: gone.append("told"))
    assert gone == ["told"]
    exits.close()
