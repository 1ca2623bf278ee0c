"""What a program never notices of us in a sandbox, before it enters a namespace, or beside greedy neighbours."""

from __future__ import annotations

import array
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from fake_daemon import CHANNEL_ADD, CHANNEL_DEL, LONG_S, NOTE, NOTE_UNKNOWN_DRIVER, OFFLINE, ONLINE, RUN, STOP, until
from rmkit import COMPUTE, GR0, Process

POLL, NANOSLEEP, CLOCK_NANOSLEEP = 7, 35, 230  # of x86-64
FSTAT, SENDMSG, FCNTL, NEWFSTATAT, UNSHARE = 5, 46, 72, 262, 272
EPERM, ENOSYS = 1, 38
GROUP, CHANNEL, ENGINE = 0x5C000008, 0x5C000009, 0x5C00000A


def begin(world, program: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [world.libraries.compile(program), *map(str, arguments)],
        env=world.environment(role="offline", **environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def our_threads(pid: int) -> list[Path]:
    return [task for task in Path(f"/proc/{pid}/task").iterdir() if task.name != str(pid)]


def sleeps(task: Path) -> bool:
    return (task / "stat").read_text().rsplit(")")[-1].split()[0] == "S"


def obeys(client, order: int) -> None:
    seq = client.give_order(order)
    until(lambda: client.region.order_done == seq, "obeyed")


def end(program: subprocess.Popen[str]) -> int:
    program.communicate("\n", timeout=LONG_S)
    return program.returncode


# -- seccomp --


@pytest.mark.parametrize("calls", [[POLL], [NANOSLEEP, CLOCK_NANOSLEEP], [POLL, NANOSLEEP, CLOCK_NANOSLEEP]], ids=str)
@pytest.mark.parametrize("has_valved", [True, False], ids=["linked", "alone"])
def test_a_wait_that_a_sandbox_refuses_never_takes_a_core(world, calls, has_valved):
    daemon = world.daemon(OFFLINE) if has_valved else None
    program = begin(world, "sandbox", "refuse", "after" if has_valved else "before", *calls)
    assert program.stdout.readline() == "ready\n"

    if daemon:
        client = daemon.client()
        obeys(client, STOP)
        obeys(client, RUN)
    [session] = our_threads(program.pid)
    until(lambda: sleeps(session), "it waits")
    assert end(program) == 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_trap_that_the_program_answers_never_ends_it(world, when):
    """Blocked in a thread of ours, the signal of the trap would be forced on the process, past its handler."""
    client = world.daemon(OFFLINE).client if when == "after" else None
    program = begin(world, "sandbox", "trap", when, POLL, NANOSLEEP)
    assert program.stdout.readline() == "ready\n"

    if client:
        obeys(client(), STOP)
    [session] = our_threads(program.pid)
    until(lambda: sleeps(session), "it waits")
    assert end(program) == 0


def test_a_thread_of_ours_that_a_sandbox_kills_as_it_begins_never_counts_as_linked(world):
    """valved would give its orders to nobody. The program goes on without us."""
    daemon = world.daemon(OFFLINE)
    program = begin(world, "sandbox", "kill", "before", UNSHARE)
    client = daemon.client()

    assert program.stdout.readline() == "ready\n"
    until(client.gone.is_set, "the link is closed")
    assert not our_threads(program.pid)
    assert end(program) == 0


def sandboxed(world, when, error, *calls):
    """An offline process with a channel, and valved's view of it; the filter begins before its link, or after it."""
    daemon = world.daemon(OFFLINE)
    puppet = world.puppet(role="offline")
    puppet.load()
    if when == "before":
        assert puppet.forbid(error, *calls) == 0
    process = Process.begin(puppet)
    client = daemon.client()
    if when == "after":
        assert puppet.forbid(error, *calls) == 0
    process.group(GROUP)
    process.channel(GROUP, CHANNEL)
    process.alloc(CHANNEL, ENGINE, COMPUTE)
    process.schedule(GROUP)
    return daemon, puppet, client


@pytest.mark.parametrize("error", [EPERM, ENOSYS])
@pytest.mark.parametrize(
    ("when", "calls"),
    [
        ("before", [FSTAT]),
        ("after", [FSTAT]),
        ("before", [FSTAT, NEWFSTATAT]),
        ("after", [FSTAT, NEWFSTATAT]),
        ("after", [FCNTL]),
    ],
    ids=str,
)
def test_files_that_a_sandbox_lets_nobody_ask_about_are_never_taken_for_lost(world, when, calls, error):
    """Of ours a new link would follow the other without end, each with three descriptors. Without the driver's, work
    would run unseen.
    """
    daemon, puppet, client = sandboxed(world, when, error, *calls)

    client.expect(CHANNEL_ADD, h_channel=CHANNEL)
    obeys(client, STOP)
    assert not daemon.has_another()
    files = [os.readlink(file) for file in Path(f"/proc/{puppet.process.pid}/fd").iterdir()]
    assert sum("eventfd" in file for file in files) == 2  # doorbell and order bell


class Unfiltered:
    """The puppet's commands, on a thread that is older than the filter of the first one."""

    def __init__(self, puppet):
        assert puppet.leave_table(0) == 0
        self._puppet = puppet

    def __getattr__(self, name):
        return lambda *arguments, **named: self._puppet.elsewhere(name, *arguments, **named)


@pytest.mark.parametrize("error", [EPERM, ENOSYS])
def test_files_of_a_thread_with_a_filter_of_its_own_are_never_unknown_to_the_others(world, error):
    """It cannot tell which file it opened, and they can. Their channels were in no book."""
    daemon = world.daemon(OFFLINE)
    puppet = world.puppet(role="offline")
    puppet.load()
    there = Unfiltered(puppet)
    assert puppet.forbid(error, FSTAT, NEWFSTATAT, everywhere=False) == 0
    process = Process.begin(puppet)
    client = daemon.client()

    process.puppet = there
    process.channel(process.device, CHANNEL, engine=GR0)
    process.register(CHANNEL)
    client.expect(CHANNEL_ADD, h_channel=CHANNEL)

    process.free(CHANNEL)
    client.expect(CHANNEL_DEL, h_channel=CHANNEL)


def test_a_launch_never_misses_the_bell_because_another_thread_has_a_filter(world):
    daemon = world.daemon(ONLINE)
    puppet = world.puppet(role="online")
    puppet.load()
    there = Unfiltered(puppet)
    assert puppet.forbid(EPERM, FSTAT, NEWFSTATAT, everywhere=False) == 0
    puppet.cu("cuInit", 0)
    client = daemon.client()
    client.gate(1)

    there.launch(1)

    assert client.bells() == 1
    assert not client.gone.is_set()


def test_a_process_that_may_say_nothing_any_more_never_counts_as_linked(world):
    """valved would take it for one without channels, and let it run beside a service."""
    _, _, client = sandboxed(world, "after", EPERM, SENDMSG)

    assert client.gone.wait(LONG_S)


def test_no_call_that_a_sandbox_would_have_to_allow_is_left_out(repository):
    """By shim/README.md: a filter that kills for what it does not know."""
    used: set[str] = set()
    for file in (repository / "shim/src").rglob("*.[ch]"):
        used |= set(re.findall(r"\bSYS_([a-z0-9_]+)", file.read_text()))
    [listed] = re.findall(r"<!-- calls -->(.*?)<!-- end -->", (repository / "shim/README.md").read_text(), re.S)

    assert set(re.findall(r"[a-z0-9_]+", listed)) == used


# -- namespaces --


@pytest.mark.parametrize("has_valved", [True, False], ids=["linked", "alone"])
def test_a_program_of_one_thread_is_never_kept_out_of_a_namespace(world, has_valved):
    daemon = world.daemon(OFFLINE) if has_valved else None
    client = []
    answers = []
    for environment in ({}, {"LD_PRELOAD": str(world.libraries.fakerm)}):
        program = begin(world, "alone", **environment)
        answers.append([program.stdout.readline() for _ in range(4)])
        if daemon and not client:
            client.append(daemon.client())
            obeys(client[0], STOP)  # the session is back
            assert not client[0].gone.is_set()
        assert end(program) == 0

    assert answers[0] == answers[1]


def test_threads_that_ask_for_a_namespace_at_once_never_wait_for_ever(world):
    """Nor is there another session for each of them."""
    program = begin(world, "crowd")
    assert program.stdout.readline() == "80 refused\n"

    [session] = our_threads(program.pid)
    until(lambda: sleeps(session), "it waits")
    assert end(program) == 0


# -- neighbours --


@contextmanager
def many_under_way(count: int) -> Iterator[None]:
    """So many descriptors of this user are in sockets, which nobody reads."""
    pairs = []
    while count > 0:
        pairs.append(socket.socketpair())
        pairs[-1][0].setblocking(False)
        with suppress(BlockingIOError):
            while count > 0:
                rights = array.array("i", [pairs[-1][0].fileno()] * 200)
                pairs[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                count -= len(rights)
    try:
        yield
    finally:
        for pair in pairs:
            pair[0].close()
            pair[1].close()


def test_descriptors_that_others_have_under_way_never_make_us_take_a_core(world):
    daemon = world.daemon(ONLINE)
    puppet = world.puppet(role="online")
    puppet.drop_capabilities()
    puppet.limit_fds(400)
    puppet.load()
    puppet.cu("cuInit", 0)
    client = daemon.client()
    process = Process.begin(puppet)
    [session] = our_threads(puppet.process.pid)

    with many_under_way(1000):
        process.group(GROUP)
        process.channel(GROUP, CHANNEL)
        process.alloc(CHANNEL, ENGINE, COMPUTE)
        process.schedule(GROUP)
        until(lambda: sleeps(session), "it waits for room")
        assert client.none_of(CHANNEL_ADD)

    client.expect(CHANNEL_ADD, h_channel=CHANNEL)


# -- forks, signals --

OPENS_IN_CHILD = """
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
static void open_driver(void) { (void)open("/dev/nvidiactl", O_RDWR); }
__attribute__((constructor)) static void begin(void) { pthread_atfork(NULL, NULL, open_driver); }
"""


def test_a_child_whose_own_handler_opened_the_driver_never_loses_its_link(world, tmp_path):
    """A library that was initialised before ours has handlers that run before ours."""
    source = tmp_path / "handler.c"
    source.write_text(OPENS_IN_CHILD)
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", tmp_path / "handler.so", "-lpthread"], check=True)
    daemon = world.daemon(ONLINE)
    puppet = world.puppet(LD_PRELOAD=f"{world.libraries.shim}:{world.libraries.fakerm}:{tmp_path / 'handler.so'}")

    children = []

    def has_come() -> bool:
        """One that its machine kept off for the 50 ms of its start goes on without a link, and knocks again."""
        pid = puppet.fork_idle()
        children.append(pid)
        while not daemon.clients.empty():
            client = daemon.clients.get()
            until(client.has_begun_or_gone, "the region is filled")
            if client.region.pid == pid:
                children.append(client)
                return True
        return False

    until(has_come, "a child is a client")
    client = children.pop()
    seq = client.give_order(RUN)
    until(lambda: client.region.order_done == seq or client.gone.is_set(), "it obeys")
    assert not client.gone.is_set()
    for pid in children:
        os.kill(pid, 9)


def test_a_signal_never_hides_the_drivers_version_from_us(world):
    client = world.daemon(ONLINE).client
    puppet = world.puppet(role="online", FAKERM_INTERRUPTED="3")
    puppet.load()
    puppet.cu("cuInit", 0)
    process = Process.begin(puppet)
    process.group(GROUP)
    process.channel(GROUP, CHANNEL)
    process.alloc(CHANNEL, ENGINE, COMPUTE)
    process.schedule(GROUP)

    told = client()
    told.expect(CHANNEL_ADD, h_channel=CHANNEL)
    assert all(message.code != NOTE_UNKNOWN_DRIVER for message in told.seen if message.type == NOTE)
