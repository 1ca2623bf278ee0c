"""The link: a valved that is missing, slow, hostile, killed or replaced never harms the process."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from itertools import count

import pytest
from fake_daemon import (
    CHANNEL_ADD,
    CHANNEL_DEL,
    CONTROL_BYTES,
    F_ADD_SEALS,
    F_SEAL_SHRINK,
    OFFLINE,
    ONLINE,
    REGION_BYTES,
    SCHEDULE_WAIT,
    WELCOME,
    until,
)
from rmkit import GR0, Process

FIRST, SECOND = 0x5C000008, 0x5C00000A
REFUSED_VERSION, REFUSED_ROLE, REFUSED_QUOTA, REFUSED_DRAINING, REFUSED_MODE = range(1, 6)
EXIT_NO_DAEMON = 69


def test_without_a_daemon_everything_works_and_nothing_is_shared(world):
    puppet = world.puppet()
    puppet.load()

    assert puppet.cu("cuInit", 0) == 0
    puppet.launch(5)

    assert puppet.stub("launches") == 5


def test_a_daemon_that_comes_later_learns_everything(world):
    puppet = world.puppet()
    puppet.load()
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    puppet.launch(3)

    client = world.daemon(ONLINE).client()

    client.expect(CHANNEL_ADD, h_channel=FIRST)
    assert client.submitted() == 3


def test_a_daemon_that_never_answers_delays_the_start_of_online_work_only(world):
    world.daemon().silent = True
    puppet = world.puppet(role="online")

    puppet.load()
    puppet.cu("cuInit", 0)
    puppet.launch(1)

    assert puppet.stub("launches") == 1


def test_a_process_of_another_version_is_left_alone_for_good(world):
    world.daemon().refusal = REFUSED_VERSION
    puppet = world.puppet()
    puppet.load()

    puppet.cu("cuInit", 0)
    puppet.launch(2)

    assert puppet.stub("launches") == 2
    until(lambda: puppet.threads() == 1, "nobody asks again; a machine too slow for the start's 50 ms asks twice")


def test_a_daemon_that_is_leaving_is_asked_again(world):
    daemon = world.daemon()
    daemon.refusal = REFUSED_DRAINING
    puppet = world.puppet()
    puppet.load()
    puppet.cu("cuInit", 0)

    daemon.refusal = None

    assert daemon.client().hello is not None


@pytest.mark.parametrize("refusal", [REFUSED_ROLE, REFUSED_QUOTA])
def test_a_refusal_is_never_for_life(world, refusal):
    """A full quota or a claim that comes late must not leave an online service unprotected until it is restarted."""
    daemon = world.daemon()
    daemon.refusal = refusal
    puppet = world.puppet()
    puppet.load()
    puppet.cu("cuInit", 0)
    puppet.launch(2)

    daemon.refusal = None

    client = daemon.client()
    assert (client.submitted(), puppet.stub("launches")) == (2, 2)


@pytest.mark.parametrize("refused", [False, True], ids=["no-daemon", "refused"])
def test_an_offline_process_that_requires_a_daemon_says_so_and_exits(world, refused):
    if refused:
        world.daemon(OFFLINE).refusal = REFUSED_ROLE
    program = world.libraries.compile("errno", f"-L{world.libraries.cuda}", "-l:libcuda.so.1")

    done = subprocess.run(
        [program],
        env=world.environment(role="offline", VALVE_REQUIRE="1"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert (done.returncode, done.stdout) == (EXIT_NO_DAEMON, "")
    assert "valve up" in done.stderr


def test_an_online_process_never_requires_a_daemon(world):
    puppet = world.puppet(role="online", VALVE_REQUIRE="1")
    puppet.load()

    assert puppet.cu("cuInit", 0) == 0


# -- answers that make no sense --


def _memfd(size, seal=F_SEAL_SHRINK):
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, F_ADD_SEALS, seal)
    return fd


def _welcome(**changes):
    values = {"abi": 1, "role": ONLINE, "control": CONTROL_BYTES, "region": REGION_BYTES} | changes
    return struct.pack("<HHIQQII", values["abi"], values["role"], 0, 7, 1, values["control"], values["region"])


def _no_fds(client, hello):
    client.send(WELCOME, hello.seq, _welcome())


def _two_fds(client, hello):
    client.send(WELCOME, hello.seq, _welcome(), client.make_pages()[:2])


def _many_fds(client, hello):
    client.send(WELCOME, hello.seq, _welcome(abi=9), client.make_pages() * 6)


def _short_files(client, hello):
    client.send(WELCOME, hello.seq, _welcome(), [_memfd(10), _memfd(10), *client.make_pages()[2:]])


def _files_that_may_shrink(client, hello):
    client.send(WELCOME, hello.seq, _welcome(), [_memfd(1 << 16, 0), _memfd(1 << 16, 0), *client.make_pages()[2:]])


def _empty_pages(client, hello):
    client.send(WELCOME, hello.seq, _welcome(), [_memfd(1 << 16), _memfd(1 << 16), *client.make_pages()[2:]])


def _no_files_at_all(client, hello):
    client.send(WELCOME, hello.seq, _welcome(), [os.open("/dev/null", os.O_RDWR)] * 4)


def _other_abi(client, hello):
    client.send(WELCOME, hello.seq, _welcome(abi=2), client.make_pages())


def _strange_role(client, hello):
    client.send(WELCOME, hello.seq, _welcome(role=3), client.make_pages())


def _other_sizes(client, hello):
    client.send(WELCOME, hello.seq, _welcome(control=8192), client.make_pages())


def _truncated(client, hello):
    client.link.send(b"VLNK")


def _too_long(client, hello):
    client.link.send(b"V" * 4000)


def _nothing(client, hello):
    client.link.shutdown(2)


@pytest.mark.parametrize(
    "answer",
    [
        _no_fds,
        _two_fds,
        _many_fds,
        _short_files,
        _files_that_may_shrink,
        _empty_pages,
        _no_files_at_all,
        _other_abi,
        _strange_role,
        _other_sizes,
        _truncated,
        _too_long,
        _nothing,
    ],
)
def test_a_hostile_welcome_is_no_welcome(world, answer):
    daemon = world.daemon()
    daemon.on_hello = lambda client, hello: answer(client, hello) is None
    puppet = world.puppet()
    puppet.load()
    before = set(puppet.fds())

    puppet.cu("cuInit", 0)
    puppet.launch(3)

    assert puppet.stub("launches") == 3
    until(lambda: len(set(puppet.fds()) - before) <= 2, "nvidiactl, and perhaps the next try's socket: nothing leaked")
    daemon.on_hello = None
    assert daemon.client().submitted() == 3


@pytest.mark.parametrize("packet", [b"", b"junk", b"VLNK" + bytes(20), bytes(512), bytes(513)])
def test_a_hostile_answer_ends_the_conversation_and_a_new_one_begins(world, packet):
    puppet, client = world.online()
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)

    if packet:
        client.link.send(packet)
    else:
        client.link.shutdown(2)

    world.daemons[0].client().expect(CHANNEL_ADD, h_channel=FIRST)


def test_a_socket_that_nobody_reads_blocks_no_online_call(world):
    daemon = world.daemon()
    asleep = []
    daemon.on_message = lambda client, message: bool(asleep.append(message)) or until(lambda: not daemon.silent) is None
    puppet, client = world.online(daemon)
    process = Process.begin(puppet)
    daemon.silent = True  # the first message puts the reader to sleep

    handles = list(range(0x5C001000, 0x5C001000 + 600))
    for handle in handles:
        process.channel(process.device, handle, engine=GR0)
        process.register(handle)
    puppet.launch(1)

    assert puppet.stub("launches") == 1
    daemon.on_message, daemon.silent = None, False
    told = {client.expect(CHANNEL_ADD).h_channel for _ in handles}
    assert told == set(handles)


# -- death and return --


def test_an_online_process_forgets_the_gate_of_a_dead_daemon(world):
    puppet, client = world.online()
    client.gate(1)

    world.daemons[0].close()
    client.gone.wait()
    puppet.launch(10)

    assert puppet.stub("launches") == 10


def test_a_new_daemon_finds_the_counts_and_the_channels(world):
    puppet, client = world.online()
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    puppet.launch(4)
    client.expect(CHANNEL_ADD, h_channel=FIRST)

    world.daemons[0].close()
    heir = world.daemon(ONLINE).client()

    heir.expect(CHANNEL_ADD, h_channel=FIRST)
    puppet.launch(1)
    assert heir.submitted() == 5
    heir.gate(1)
    puppet.launch(1)
    assert (heir.bells(), heir.region.busy) == (1, 1)


def test_a_daemon_that_comes_to_a_process_amid_its_work_hears_of_it_at_once(world):
    """Its launches read no gate word of this daemon: one may be running now, and no other may follow for seconds."""
    puppet, client = world.online()
    puppet.launch(4)
    world.daemons[0].close()
    client.gone.wait()
    puppet.launch(1)

    heir = world.daemon(ONLINE, gate_epoch=3).client()

    until(heir.bells, "it rings")
    assert (heir.region.busy, heir.region.rung_epoch, heir.submitted()) == (1, 3, 5)


def test_open_requests_are_never_open_to_nobody_after_a_restart(world):
    """The watcher would tell of them with its next beat: until then offline work might run beside them."""
    puppet, client = world.online()
    puppet.launch(1)
    puppet.hint(2)
    said_ns = client.region.hint_ns
    assert said_ns
    world.daemons[0].close()
    client.gone.wait()

    heir = world.daemon(ONLINE).client()

    assert (heir.region.open_requests, heir.region.hint_ns >= said_ns) == (2, True)


def test_a_process_that_never_launched_has_nothing_to_say_to_a_new_daemon(world):
    puppet, client = world.online()
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)
    world.daemons[0].close()
    client.gone.wait()

    heir = world.daemon(ONLINE, gate_epoch=3).client()

    heir.expect(CHANNEL_ADD, h_channel=FIRST)  # told after the bell would have rung
    assert (heir.bells(), heir.region.rings, heir.submitted()) == (0, 0, 0)


def test_a_setting_that_changes_later_is_never_read(world, tmp_path):
    """The session's thread may not call getenv(): the application's setenv() would free what it reads."""
    puppet, client = world.online()
    puppet.setenv("VALVE_RUN_DIR", str(tmp_path / "elsewhere"))

    world.daemons[0].close()
    client.gone.wait()

    assert world.daemon(ONLINE).client().hello.wanted_role == ONLINE


def test_many_deaths_leak_no_descriptor_and_no_thread(world):
    puppet, _ = world.online()
    before, threads = len(puppet.fds()), puppet.threads()

    for _ in range(8):
        world.daemons[-1].close()
        world.daemon(ONLINE).client()

    until(lambda: (len(puppet.fds()), puppet.threads()) == (before, threads), "nothing is leaked")


# -- offline: orders and the lease --


@pytest.fixture
def offline(world):
    puppet, client = world.offline()
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)
    return puppet, process, client


def call(process, word, *handles):
    listed = "".join(f" {handle:x}" for handle in handles)
    return f"{word} client={process.client:x} object={process.subdevice:x} n={len(handles)}{listed}"


def test_an_order_to_stop_is_carried_out_and_answered(world, offline):
    _, process, client = offline

    seq = client.give_order(1)
    until(lambda: client.region.order_done == seq, "answered")
    seq = client.give_order(0)
    until(lambda: client.region.order_done == seq, "answered")

    assert world.gate_calls() == [call(process, "disable", FIRST), call(process, "enable", FIRST)]
    assert client.region.order_status == 0


def test_a_process_that_may_open_no_file_any_more_never_stays_deaf(offline):
    """Below two descriptors the kernel refuses to wait for ours."""
    puppet, _, client = offline
    puppet.limit_fds(0)

    for order in (1, 0):
        seq = client.give_order(order)
        until(lambda seq=seq: client.region.order_done == seq, "answered")


def test_channels_that_join_a_stopped_process_are_stopped_too(world, offline):
    _, process, client = offline
    seq = client.give_order(1)
    until(lambda: client.region.order_done == seq, "answered")

    process.channel(process.device, SECOND, engine=GR0)
    process.register(SECOND)

    assert world.gate_calls()[-1] == call(process, "disable", FIRST, SECOND)


def test_an_applications_own_disable_is_never_undone(world, offline):
    from rmkit import DISABLE, disable_params

    _, process, client = offline
    process.control(process.subdevice, DISABLE, disable_params(True, [(process.client, FIRST)]))
    process.channel(process.device, SECOND, engine=GR0)
    process.register(SECOND)
    before = len(world.gate_calls())

    for order in (1, 0):
        seq = client.give_order(order)
        until(lambda wanted=seq: client.region.order_done == wanted, "answered")

    assert world.gate_calls()[before:] == [call(process, "disable", FIRST, SECOND), call(process, "enable", SECOND)]


def test_more_than_64_channels_go_in_two_calls(world, offline):
    _, process, client = offline
    for handle in range(0x5C001000, 0x5C001000 + 99):
        process.channel(process.device, handle, engine=GR0)
        process.register(handle)

    seq = client.give_order(1)
    until(lambda: client.region.order_done == seq, "answered")

    assert [line.split()[3] for line in world.gate_calls()] == ["n=64", "n=36"]


def test_a_dead_daemon_stops_offline_work_beside_online_work(world, offline):
    _, process, client = offline
    client.control.online_registered = 1

    world.daemons[0].end_lease(client)

    until(lambda: world.gate_calls() == [call(process, "disable", FIRST)], "it stopped itself")
    assert client.region.self_stops == 1
    heir = world.daemon(OFFLINE).client()
    heir.expect(CHANNEL_ADD, h_channel=FIRST)
    assert world.gate_calls()[-1] == call(process, "enable", FIRST), "on again before it is announced"
    assert heir.region.self_stops == 1


def test_a_dead_daemon_leaves_nothing_off_where_no_online_work_is(world, offline):
    _, process, client = offline

    world.daemons[0].end_lease(client)

    until(lambda: world.gate_calls() == [call(process, "enable", FIRST)], "it made sure that it runs")


@pytest.mark.parametrize("refusal", [REFUSED_MODE, REFUSED_VERSION])
def test_offline_work_that_a_new_daemon_refuses_never_runs_on(world, offline, refusal):
    """Nobody would stop it for an online service. It goes on when a valved takes it."""
    _, process, client = offline

    world.daemons[0].end_lease(client)
    until(lambda: call(process, "enable", FIRST) in world.gate_calls(), "no online work: it runs on without valved")
    heir = world.daemon(OFFLINE)
    heir.refusal = refusal
    until(lambda: world.gate_calls()[-1] == call(process, "disable", FIRST), "refused, so it stopped itself")
    process.channel(process.device, SECOND, engine=GR0)
    process.register(SECOND)
    assert call(process, "disable", FIRST, SECOND) in world.gate_calls(), "what it makes meanwhile is stopped too"

    heir.refusal = None
    heir.client().expect(CHANNEL_ADD, h_channel=FIRST)
    assert world.gate_calls()[-1] == call(process, "enable", FIRST, SECOND)


def test_a_daemon_that_hangs_counts_as_dead(world, offline):
    """Its socket is still open, but its heartbeat is older than the lease."""
    _, process, client = offline
    client.control.online_registered = 1

    client.control.lease_ns = 50_000_000

    until(lambda: call(process, "disable", FIRST) in world.gate_calls(), "it stopped itself")


def test_a_draining_daemon_leaves_everything_on(world, offline):
    _, process, client = offline
    seq = client.give_order(1)
    until(lambda: client.region.order_done == seq, "answered")
    client.control.online_registered = 1

    client.control.draining = 1
    world.daemons[0].end_lease(client)

    until(lambda: world.gate_calls()[-1:] == [call(process, "enable", FIRST)], "on again")


def launched(world, daemon, **settings):
    """An offline process with a channel, and one launch behind it."""
    puppet, client = world.offline(daemon, **settings)
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    puppet.launch(1)
    return puppet, client, process


def holds_a_launch(puppet):
    """Launches that reached the driver, once one more waits. One that went on, and whose thread ends, does not wait."""
    for asked in count(2):
        puppet.launch_in_background(1)
        if puppet.threads() >= 3 and (done := puppet.stub("launches")) < asked:
            return done


def test_where_the_driver_refuses_launches_are_held_instead(world):
    daemon = world.daemon(OFFLINE)
    puppet, client, _ = launched(world, daemon, FAKERM_GATE_STATUS="27")
    client.control.online_registered = 1

    daemon.end_lease(client)
    until(lambda: client.region.self_stops == 1, "the lease ran out")
    until(lambda: puppet.threads() == 2, "only the session beside the main thread")
    held = holds_a_launch(puppet)

    world.daemon(OFFLINE).client()
    until(lambda: puppet.stub("launches") > held and puppet.threads() == 2, "every held launch went on")


@pytest.mark.parametrize("order", [2, 1])
def test_a_launch_is_never_held_for_ever_by_a_daemon_that_died(world, order):
    daemon = world.daemon(OFFLINE)
    puppet, client, _ = launched(world, daemon)
    client.control.gate_epoch = 1
    seq = client.give_order(order)
    until(lambda: client.region.order_done == seq, "it has heard")
    held = holds_a_launch(puppet)

    daemon.end_lease(client)

    until(lambda: puppet.stub("launches") > held and puppet.threads() == 2, "every held launch went on")


def test_a_hold_beside_a_stop_holds_launches_and_stops_channels(world):
    puppet, client, process = launched(world, world.daemon(OFFLINE))
    client.control.gate_epoch = 1
    client.give_order(1)
    until(lambda: world.gate_calls()[-1:] == [call(process, "disable", FIRST)], "off")
    held = holds_a_launch(puppet)

    client.give_order(2)
    until(lambda: world.gate_calls()[-1:] == [call(process, "enable", FIRST)], "on, for what is queued on the card")
    assert puppet.stub("launches") == held

    client.control.gate_epoch = 2
    client.give_order(0)
    until(lambda: puppet.stub("launches") > held and puppet.threads() == 2, "every held launch went on")


def test_a_schedule_call_is_not_held_for_ever_by_a_daemon_that_died(world):
    daemon = world.daemon(OFFLINE)
    waiting = []
    daemon.on_message = lambda client, message: message.type == SCHEDULE_WAIT and not waiting.append(message)
    puppet, _ = world.offline(daemon)
    process = Process.begin(puppet)
    process.group(0x5C000006)
    puppet.control_in_background(process.ctl, process.client, 0x5C000006, 0xA06C0101, "010000")
    until(lambda: waiting, "the shim asks")

    daemon.close()

    until(lambda: "schedule" in world.gate_calls(), "it went on without an answer")


def test_a_channel_freed_while_stopped_is_not_named_again(world, offline):
    _, process, client = offline
    process.channel(process.device, SECOND, engine=GR0)
    process.register(SECOND)
    seq = client.give_order(1)
    until(lambda: client.region.order_done == seq, "answered")

    process.free(FIRST)
    client.expect(CHANNEL_DEL, h_channel=FIRST)
    seq = client.give_order(0)
    until(lambda: client.region.order_done == seq, "answered")

    assert world.gate_calls()[-1] == call(process, "enable", SECOND)
