"""A signal that a job does not handle ends it only once valved has its channels on; and nothing else about signals
changes for the program."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import threading
from pathlib import Path

import pytest
from fake_daemon import CHANNEL_ADD, ENDING, FEATURE_ENDING, LONG_S, OFFLINE, ONLINE, mask, until
from rmkit import GR0, Process

FIRST = 0x5C000008
NUMBERS = [signal.SIGTERM, signal.SIGHUP]  # Python handles SIGINT
TERM = signal.SIGTERM
REFUSED_DRAINING = 4
PTRACE_SYSCALL, PTRACE_SEIZE = 24, 0x4206
POLL, SIGACTION, SIGPROCMASK, SENDMSG, GETTID, TGKILL = 7, 13, 14, 46, 186, 234  # system calls of x86-64


def has_channel(puppet, client):
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)
    return process


def job(world, more=FEATURE_ENDING, on_message=None):
    """An offline process with a channel, about which valved is to be asked."""
    puppet, client = world.offline(world.daemon(OFFLINE, more, on_message))
    has_channel(puppet, client)
    pid = puppet.process.pid  # one after another, and one of them may be ignored
    until(lambda: {*NUMBERS} <= mask(pid, "SigCgt") | mask(pid, "SigIgn"), "they are watched")
    return puppet, client


def let_go(client):
    client.link.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_job_never_dies_by_a_signal_before_valved_has_let_it(world, number):
    puppet, client = job(world)

    puppet.process.send_signal(number)

    assert client.expect(ENDING).signal == number
    let_go(client)
    assert puppet.process.wait() == -number


def test_a_job_that_runs_is_let_die_with_its_link(world):
    puppet, _ = job(world, on_message=lambda client, message: message.type == ENDING and client.ack(message) is None)

    puppet.process.send_signal(TERM)

    assert puppet.process.wait() == -TERM


def signal_and_hold(number, pid):
    """The first thread alone stands still, by a debugger's calls, as it begins to wait for the answer of valved: it has
    let go of the lock under which it told it. Its system calls from the signal on are waited for: it gives up soon."""
    ptrace, met = ctypes.CDLL(None, use_errno=True).ptrace, []
    if ptrace(PTRACE_SEIZE, pid, None, None):
        pytest.skip(f"no ptrace here: {os.strerror(ctypes.get_errno())}")
    os.kill(pid, number)
    while SENDMSG not in met or met[-1] != POLL:
        stop = os.WSTOPSIG(os.waitpid(pid, 0)[1])
        met.append(int(Path(f"/proc/{pid}/syscall").read_text().split()[0]))
        if met[-1] != POLL or SENDMSG not in met:
            assert not ptrace(PTRACE_SYSCALL, pid, None, 0 if stop == signal.SIGTRAP else stop)


def test_a_job_that_runs_is_never_left_running_once_valved_has_answered(world):
    """Online work that comes then switches channels off that an ending process leaves. The thread that the signal met
    looks only now and then."""
    puppet, client = job(world)
    signal_and_hold(TERM, puppet.process.pid)

    client.ack(client.expect(ENDING))

    assert puppet.process.wait(LONG_S) == -TERM


def test_a_valved_that_hangs_keeps_no_job_from_dying(world):
    puppet, client = job(world)

    puppet.process.send_signal(TERM)

    assert puppet.process.wait() == -TERM
    client.expect(ENDING)


@pytest.mark.parametrize("end", [lambda client: None, let_go], ids=["hangs", "dies"])
def test_a_job_never_dies_with_channels_off_because_the_valved_that_it_told_does_not_answer(world, end):
    puppet, client = job(world)

    puppet.process.send_signal(TERM)
    client.expect(ENDING)
    end(client)

    assert puppet.process.wait() == -TERM
    assert [line.split()[0] for line in world.gate_calls()] == ["enable"]


def test_a_job_without_valved_dies_as_ever(world):
    puppet, client = job(world)
    world.daemons[0].close()
    until(client.gone.is_set)

    puppet.process.send_signal(TERM)

    assert puppet.process.wait() == -TERM


def test_a_job_never_dies_with_channels_that_a_valved_left_off_that_has_just_gone(world):
    """Before its lease is over it does not stop itself."""
    puppet, client = job(world)
    daemon, has_knocked = world.daemons[0], threading.Event()
    daemon.refusal, daemon.on_hello = REFUSED_DRAINING, lambda *_: has_knocked.set()
    let_go(client)
    has_knocked.wait()

    puppet.process.send_signal(TERM)

    assert puppet.process.wait() == -TERM
    assert [line.split()[0] for line in world.gate_calls()] == ["enable"]


@pytest.mark.parametrize("call", [SIGACTION, SIGPROCMASK, GETTID, TGKILL])
def test_a_sandbox_never_keeps_a_job_alive_that_a_signal_ends(world, call):
    puppet, client = job(world)
    assert puppet.forbid(errno.EPERM, call) == 0

    puppet.process.send_signal(TERM)

    client.expect(ENDING)
    let_go(client)
    assert puppet.process.wait(LONG_S) in (-TERM, 128 + TERM)


def test_a_second_signal_never_ends_it_sooner_and_is_not_told(world):
    puppet, client = job(world)

    for number in (TERM, TERM, signal.SIGHUP, TERM):
        puppet.process.send_signal(number)

    client.expect(ENDING)
    let_go(client)
    assert -puppet.process.wait() in NUMBERS
    until(client.gone.is_set)
    client.none_of(ENDING)
    assert [message.type for message in client.seen].count(ENDING) == 1


def test_a_thread_that_raises_its_end_never_runs_another_line(world):
    """Programs that clean up and then die by the same signal count on it."""
    puppet, client = job(world)

    puppet.process.stdin.write('["raise_signal", [15], {}]\n')
    puppet.process.stdin.flush()
    client.expect(ENDING)
    let_go(client)

    assert puppet.process.stdout.read() == ""
    assert puppet.process.wait() == -TERM


# -- what programs see --


def test_python_finds_the_default_before_and_after(world):
    puppet, _ = world.offline(world.daemon(OFFLINE, FEATURE_ENDING))
    assert puppet.handled(TERM) == "SIG_DFL"
    has_channel(puppet, world.daemons[0].alive[0])
    until(lambda: TERM in mask(puppet.process.pid, "SigCgt"), "it is watched")

    assert puppet.handled(TERM) == "SIG_DFL"
    assert puppet.handle(TERM, "handler") == "SIG_DFL"


def test_a_handler_of_the_programs_own_is_never_replaced(world):
    puppet, client = job(world)
    puppet.handle(TERM, "handler")

    puppet.process.send_signal(TERM)

    until(lambda: puppet.has_heard() == [TERM], "its own handler runs")
    assert client.none_of(ENDING)
    puppet.handle(TERM, "default")
    until(lambda: TERM in mask(puppet.process.pid, "SigCgt"), "it is watched again")
    puppet.process.send_signal(TERM)
    client.expect(ENDING)


def test_a_handler_that_hands_on_to_the_one_before_never_ends_the_job_by_it(world):
    """Without Valve there is none before it. So do tokio's signals, and those of torch's C++."""
    puppet, client = job(world)
    assert puppet.handle_in_c(str(world.libraries.compile("handon", "-shared", "-fPIC")), TERM) == 0

    puppet.process.send_signal(TERM)

    until(lambda: puppet.heard_in_c() == 1, "it goes on after its own handler")
    assert client.none_of(ENDING)
    puppet.handle(TERM, "default")
    until(lambda: TERM in mask(puppet.process.pid, "SigCgt"), "it is watched again")
    puppet.process.send_signal(TERM)
    client.expect(ENDING)


def test_a_handler_that_was_there_first_is_never_replaced(world):
    daemon = world.daemon(OFFLINE, FEATURE_ENDING)
    puppet, client = world.offline(daemon)
    puppet.handle(TERM, "handler")
    has_channel(puppet, client)
    until(lambda: signal.SIGHUP in mask(puppet.process.pid, "SigCgt"), "the other one is watched")

    puppet.process.send_signal(TERM)

    until(lambda: puppet.has_heard() == [TERM], "its own handler runs")


def test_a_signal_that_is_ignored_stays_so(world):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        puppet, client = job(world)
    finally:
        signal.signal(signal.SIGHUP, before)

    puppet.process.send_signal(signal.SIGHUP)

    assert puppet.handled(TERM) == "SIG_DFL"
    assert signal.SIGHUP in mask(puppet.process.pid, "SigIgn")
    assert client.none_of(ENDING)


def test_a_program_that_waits_for_its_signals_gets_them(world):
    """Its threads block them: those of ours do, too."""
    puppet, client = world.offline(world.daemon(OFFLINE, FEATURE_ENDING))
    has_channel(puppet, client)
    until(lambda: TERM in mask(puppet.process.pid, "SigCgt"), "it is watched")
    puppet.process.stdin.write('["block_and_wait_for", [15], {}]\n')
    puppet.process.stdin.flush()
    assert puppet.process.stdout.readline() == '"blocked"\n'

    puppet.process.send_signal(TERM)

    assert puppet.process.stdout.readline() == "15\n"
    assert client.none_of(ENDING)


def unwatched(world, role, more, channel):
    puppet, client = (world.offline if role == OFFLINE else world.online)(world.daemon(role, more))
    if channel:
        has_channel(puppet, client)
    return puppet, client


@pytest.mark.parametrize(
    ("role", "more", "channel"),
    [(ONLINE, FEATURE_ENDING, True), (OFFLINE, 0, True), (OFFLINE, FEATURE_ENDING, False)],
    ids=["online", "old valved", "no channel"],
)
def test_no_other_process_gets_a_handler(world, role, more, channel):
    """Nor does a valved hear a word that it does not know."""
    puppet, client = unwatched(world, role, more, channel)
    client.give_order(0)
    until(lambda: role == ONLINE or client.region.order_done, "the session has had a turn")

    assert not mask(puppet.process.pid, "SigCgt") & set(NUMBERS)
    puppet.process.send_signal(TERM)
    assert puppet.process.wait() == -TERM
    assert client.none_of(ENDING)


def test_the_first_process_of_a_namespace_gets_no_handler(world):
    """Such signals do not end it where it has none."""
    world.prefix = ("unshare", "--pid", "--fork", "--kill-child")
    puppet, client = world.offline(world.daemon(OFFLINE, FEATURE_ENDING))
    has_channel(puppet, client)
    client.give_order(0)
    until(lambda: client.region.order_done, "the session has had a turn")
    [inside] = Path(f"/proc/{puppet.process.pid}/task/{puppet.process.pid}/children").read_text().split()

    os.kill(int(inside), TERM)

    assert not mask(inside, "SigCgt") & set(NUMBERS)
    assert puppet.handled(TERM) == "SIG_DFL"


# -- children --


def ended_by(pid):
    """/proc shows a zombie's status to nobody else: its parent waits."""
    return lambda: "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1]


@pytest.mark.parametrize("how", ["fork", "system call"])
def test_a_forked_child_never_asks_for_its_parent(world, how):
    """A bare clone runs no hook of ours before the signal comes."""
    puppet, client = job(world)
    pid = puppet.fork_idle(how)

    os.kill(pid, TERM)

    until(ended_by(pid), "it is gone at once")
    assert puppet.wait_for(pid) == -TERM
    assert client.none_of(ENDING)
    assert puppet.process.poll() is None


@pytest.mark.parametrize("way", ["posix_spawn", "vfork", "fork"])
def test_another_program_begins_with_the_default(world, way):
    puppet, client = job(world)
    pid = puppet.spawn_idle(way)
    until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")

    assert not mask(pid, "SigCgt") & set(NUMBERS)
    os.kill(pid, TERM)

    assert puppet.wait_for(pid) == -TERM
    assert client.none_of(ENDING)
