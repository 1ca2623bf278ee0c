"""The shim's picture of the driver's objects, as valved gets to see it: which channels, on which GPU, for what."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from fake_daemon import (
    CHANNEL_ADD,
    CHANNEL_DEL,
    NOTE,
    NOTE_APP_DISABLED,
    NOTE_APP_ENABLED,
    NOTE_INCOMPLETE,
    NOTE_MPS,
    NOTE_UNKNOWN_DRIVER,
    OFFLINE,
    RM_CLIENT,
    SCHEDULE_DONE,
    SCHEDULE_WAIT,
    until,
)
from rmkit import (
    BIND_CHANNEL,
    BIND_GROUP,
    COMPUTE,
    COPY,
    COPY0,
    DISABLE,
    GID_INFO,
    GPFIFO,
    GR0,
    GROUP,
    MPS,
    SCHEDULE_CHANNEL,
    SHARE,
    UUID,
    Process,
    channel_params,
    disable_params,
    group_params,
    share_params,
    unregister,
)

TSG, OTHER_TSG, FIRST, SECOND, COPY_CHANNEL = 0x5C000006, 0x5C000007, 0x5C000008, 0x5C00000A, 0x5C000019
FILLING = range(0x5C001000, 0x5C001000 + 600)  # messages about so many channels do not fit into a socket


@pytest.fixture(params=["online", "offline"])
def process(world, request):
    puppet, client = getattr(world, request.param)()
    return Process.begin(puppet), client


@pytest.fixture
def offline(world):
    puppet, client = world.offline()
    return Process.begin(puppet), client


@pytest.mark.parametrize("form", [21, 64], ids=["NVOS21", "NVOS64"])
@pytest.mark.parametrize("xfer", [False, True], ids=["plain", "wrapped"])
def test_a_channel_is_learned_from_either_form_of_alloc_wrapped_or_not(world, form, xfer):
    puppet, client = world.online()
    process = Process.begin(puppet, instance=3, form=form, xfer=xfer)

    process.group(TSG)
    process.channel(TSG, FIRST)
    process.register(FIRST)

    client.expect(
        CHANNEL_ADD,
        h_client=process.client,
        h_channel=FIRST,
        h_tsg=TSG,
        device_instance=3,
        gpu_uuid=UUID,
        engine=GR0,
        compute=1,
        cid=100,
    )


def test_scheduling_a_group_tells_of_all_its_channels_first(process):
    made, client = process
    made.group(TSG)
    made.channel(TSG, FIRST)
    made.channel(TSG, SECOND)

    made.schedule(TSG)

    client.expect(CHANNEL_ADD, h_channel=FIRST)
    client.expect(CHANNEL_ADD, h_channel=SECOND)


def test_a_channel_that_joins_a_running_group_is_told_at_once(process):
    made, client = process
    made.group(TSG)
    made.schedule(TSG)

    made.channel(TSG, FIRST)

    client.expect(CHANNEL_ADD, h_channel=FIRST, compute=1)


def test_a_channel_straight_under_a_device_goes_by_its_own_engine(process):
    made, client = process

    made.channel(made.device, FIRST, engine=GR0)
    made.control(FIRST, SCHEDULE_CHANNEL, "010000")
    made.channel(made.device, SECOND, engine=COPY0)
    made.control(SECOND, SCHEDULE_CHANNEL, "010000")

    client.expect(CHANNEL_ADD, h_channel=FIRST, compute=1, h_tsg=0)
    client.expect(CHANNEL_ADD, h_channel=SECOND, compute=0, engine=COPY0)


def test_a_copy_group_is_told_as_copy(process):
    made, client = process
    made.group(TSG, COPY0)
    made.channel(TSG, COPY_CHANNEL)
    made.schedule(TSG)

    client.expect(CHANNEL_ADD, h_channel=COPY_CHANNEL, compute=0, engine=COPY0)


def test_an_engine_that_arrives_by_bind_counts(process):
    made, client = process
    made.group(TSG, 0)
    made.channel(TSG, FIRST)
    made.control(TSG, BIND_GROUP, "09000000")

    made.schedule(TSG)

    client.expect(CHANNEL_ADD, h_channel=FIRST, engine=COPY0, compute=0)


def test_an_engine_learned_after_the_report_is_reported_again(process):
    made, client = process
    made.channel(made.device, FIRST, engine=0)
    made.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST, engine=0, compute=1)

    made.control(FIRST, BIND_CHANNEL, "0a000000")

    client.expect(CHANNEL_ADD, h_channel=FIRST, engine=10, compute=0)


def test_without_an_engine_the_objects_on_the_channel_tell(process):
    made, client = process
    made.group(TSG, 0)
    made.channel(TSG, FIRST)
    made.alloc(FIRST, 0x5C000009, COMPUTE)
    made.channel(TSG, SECOND)
    made.alloc(SECOND, 0x5C00000B, COPY)
    made.schedule(TSG)

    client.expect(CHANNEL_ADD, h_channel=FIRST, compute=1)
    client.expect(CHANNEL_ADD, h_channel=SECOND, compute=0)


def test_a_gpu_uuid_learned_by_a_control_is_told(process):
    made, client = process
    made.control(made.subdevice, GID_INFO, (b"\0\0\0\0\2\0\0\0\x10\0\0\0" + UUID + bytes(240)).hex())
    made.channel(made.device, FIRST, engine=GR0)

    made.control(FIRST, SCHEDULE_CHANNEL, "010000")

    client.expect(CHANNEL_ADD, h_channel=FIRST, gpu_uuid=UUID)


def test_a_gpu_uuid_learned_after_the_report_is_reported_again(process):
    made, client = process
    made.channel(made.device, FIRST, engine=GR0)
    made.control(FIRST, SCHEDULE_CHANNEL, "010000")
    client.expect(CHANNEL_ADD, h_channel=FIRST, gpu_uuid=bytes(16))

    made.register(FIRST)

    client.expect(CHANNEL_ADD, h_channel=FIRST, gpu_uuid=UUID)


def test_a_free_channel_is_told_as_gone(process):
    made, client = process
    made.channel(made.device, FIRST, engine=GR0)
    made.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)

    made.free(FIRST)

    client.expect(CHANNEL_DEL, h_channel=FIRST, cid=100)


@pytest.mark.parametrize("what", ["group", "share", "space", "device", "client", "file"])
def test_what_a_channel_rests_on_takes_it_along(process, what):
    made, client = process
    share = 0x5C000030
    made.group(TSG)
    made.alloc(TSG, share, SHARE, share_params(made.space))
    made.channel(TSG, FIRST, share=share)
    made.channel(made.device, SECOND, engine=GR0)
    made.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)

    if what == "file":
        made.puppet.close(made.ctl)
    else:
        made.free(
            {"group": TSG, "share": share, "space": made.space, "device": made.device, "client": made.client}[what]
        )

    client.expect(CHANNEL_DEL, h_channel=FIRST)


def test_a_free_that_fails_leaves_the_channel_known(world):
    puppet, client = world.online(FAKERM_FREE_FAILS="1")
    made = Process.begin(puppet)
    made.channel(made.device, FIRST, engine=GR0)
    made.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)

    made.free(FIRST)

    client.expect(CHANNEL_DEL, h_channel=FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)


def test_a_reused_handle_comes_with_a_new_cid(process):
    made, client = process
    for cid in (100, 101):
        made.channel(made.device, FIRST, engine=GR0)
        made.register(FIRST)
        client.expect(CHANNEL_ADD, h_channel=FIRST, cid=cid)
        made.free(FIRST)
        client.expect(CHANNEL_DEL, h_channel=FIRST, cid=cid)


def test_the_same_handle_in_two_clients_is_two_channels(world):
    puppet, client = world.online()
    first, second = Process.begin(puppet, instance=0), Process.begin(puppet, instance=1)
    for made in (first, second):
        made.channel(made.device, FIRST, engine=GR0)
        made.register(FIRST, bytes([made.instance]) * 16)
        client.expect(CHANNEL_ADD, h_client=made.client, h_channel=FIRST, device_instance=made.instance)

    first.free(first.client)

    client.expect(CHANNEL_DEL, h_client=first.client, h_channel=FIRST)
    assert client.inbox.empty(), "the other client keeps its own"


def test_a_duplicated_group_carries_its_engine_into_the_other_client(world):
    puppet, client = world.online()
    owner, guest = Process.begin(puppet), Process.begin(puppet)
    owner.group(TSG, COPY0)

    puppet.dup(guest.ctl, guest.client, guest.device, OTHER_TSG, owner.client, TSG)
    guest.channel(OTHER_TSG, FIRST)
    guest.register(FIRST)

    client.expect(CHANNEL_ADD, h_client=guest.client, h_tsg=OTHER_TSG, engine=COPY0, compute=0)


def test_an_unregistered_channel_is_not_told_again(process):
    made, client = process
    made.channel(made.device, FIRST, engine=GR0)
    made.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)

    made.puppet.uvm(made.uvm, 28, unregister(made.client, FIRST))
    made.free(FIRST)

    client.expect(CHANNEL_DEL, h_channel=FIRST)
    assert client.inbox.empty()


def test_an_applications_own_disable_is_told_and_so_is_its_end(process):
    made, client = process
    made.channel(made.device, FIRST, engine=GR0)
    made.register(FIRST)

    made.control(made.subdevice, DISABLE, disable_params(True, [(made.client, FIRST)]))
    client.expect(NOTE, code=NOTE_APP_DISABLED, h_client=made.client, h_channel=FIRST)
    made.control(made.subdevice, DISABLE, disable_params(False, [(made.client, FIRST)]))
    client.expect(NOTE, code=NOTE_APP_ENABLED, h_client=made.client, h_channel=FIRST)


def test_a_channel_that_a_schedule_enabled_never_keeps_the_mark_of_an_earlier_disable(process):
    made, client = process
    made.channel(made.device, FIRST, engine=GR0)
    made.register(FIRST)
    made.control(made.subdevice, DISABLE, disable_params(True, [(made.client, FIRST)]))
    client.expect(NOTE, code=NOTE_APP_DISABLED, h_client=made.client, h_channel=FIRST)

    made.control(FIRST, SCHEDULE_CHANNEL, "010000")

    client.expect(NOTE, code=NOTE_APP_ENABLED, h_client=made.client, h_channel=FIRST)


def test_a_schedule_that_skips_the_enable_never_takes_the_mark_of_an_earlier_disable(process):
    """From branch 580 on. The channel is off still, by the application: valved may not enable it."""
    made, client = process
    made.channel(made.device, FIRST, engine=GR0)
    made.register(FIRST)
    made.control(made.subdevice, DISABLE, disable_params(True, [(made.client, FIRST)]))
    client.expect(NOTE, code=NOTE_APP_DISABLED, h_client=made.client, h_channel=FIRST)

    made.control(FIRST, SCHEDULE_CHANNEL, "010001")

    made.channel(made.device, SECOND, engine=GR0)
    made.register(SECOND)
    client.expect(CHANNEL_ADD, h_channel=SECOND)
    assert NOTE_APP_ENABLED not in [message.code for message in client.seen if message.type == NOTE]


def test_offline_numbers_come_before_the_first_channel(offline):
    made, client = offline
    made.channel(made.device, FIRST, engine=GR0)

    made.control(FIRST, SCHEDULE_CHANNEL, "010000")

    told = client.expect(RM_CLIENT, h_client=made.client, h_device=made.device, h_subdevice=made.subdevice, has_fd=1)
    assert CHANNEL_ADD not in [message.type for message in client.seen]
    client.expect(CHANNEL_ADD, h_channel=FIRST)
    assert len(told.fds) == 1  # the file that proves it


def test_an_online_process_shows_its_file_before_its_first_channel(world):
    puppet, client = world.online()
    made = Process.begin(puppet)
    made.channel(made.device, FIRST, engine=GR0)
    made.register(FIRST)

    told = client.expect(RM_CLIENT, h_client=made.client, has_fd=1)
    assert CHANNEL_ADD not in [message.type for message in client.seen]
    assert len(told.fds) == 1


def test_the_drivers_file_is_sent_when_valved_asks_for_it(world):
    daemon = world.daemon(2)
    asked = []

    def ask_for_fd(client, message):
        if message.type != RM_CLIENT or asked:
            return False
        asked.append(message)
        client.ack(message, want_fd=1)
        return True

    daemon.on_message = ask_for_fd
    puppet, client = world.offline(daemon)
    made = Process.begin(puppet)
    made.channel(made.device, FIRST, engine=GR0)
    made.register(FIRST)

    client.expect(RM_CLIENT)
    told = client.expect(RM_CLIENT, has_fd=1, h_client=made.client)
    assert len(told.fds) == 1


def test_an_offline_channel_is_acknowledged_before_it_may_run(world):
    """The schedule call must not reach the driver while valved has not said that it knows the channel."""
    daemon = world.daemon(2)
    waiting = []

    def hold_back(client, message):
        if message.type == CHANNEL_ADD:
            waiting.append((client, message))
            return True
        return False

    daemon.on_message = hold_back
    puppet, client = world.offline(daemon)
    made = Process.begin(puppet)
    made.group(TSG)
    made.channel(TSG, FIRST)

    puppet.control_in_background(made.ctl, made.client, TSG, 0xA06C0101, "010000")
    until(lambda: waiting, "CHANNEL_ADD came")
    assert "schedule" not in world.gate_calls()
    waiting[0][0].ack(waiting[0][1])

    client.expect(SCHEDULE_WAIT, h_client=made.client, h_object=TSG)
    client.expect(SCHEDULE_DONE, h_client=made.client, h_object=TSG)
    assert world.gate_calls() == ["schedule"]


def test_a_schedule_call_waits_while_the_gate_is_closed(world):
    daemon = world.daemon(2)
    waiting = []

    def hold_back(client, message):
        if message.type == SCHEDULE_WAIT:
            waiting.append((client, message))
            return True
        return False

    daemon.on_message = hold_back
    puppet, _ = world.offline(daemon)
    made = Process.begin(puppet)
    made.group(TSG)

    puppet.control_in_background(made.ctl, made.client, TSG, 0xA06C0101, "010000")
    until(lambda: waiting, "the shim asks")
    assert world.gate_calls() == []
    waiting[0][0].ack(waiting[0][1], status=11)  # EAGAIN: ask again
    until(lambda: len(waiting) == 2, "the shim asks again")
    assert world.gate_calls() == []
    waiting[1][0].ack(waiting[1][1])

    until(lambda: world.gate_calls() == ["schedule"], "the call went through")


def test_more_threads_than_can_wait_never_spin_until_the_gate_opens(world):
    waiting = []

    def hold_back(client, message):
        if message.type == SCHEDULE_WAIT:
            waiting.append((client, message))
        return message.type == SCHEDULE_WAIT

    puppet, _ = world.offline(world.daemon(2, on_message=hold_back))
    made = Process.begin(puppet)
    made.group(TSG)
    for _ in range(33):
        puppet.control_in_background(made.ctl, made.client, TSG, 0xA06C0101, "010000")
    until(lambda: len(waiting) == 32, "as many ask as can")

    def rest():
        tasks = Path(f"/proc/{puppet.process.pid}/task").iterdir()
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "S" for task in tasks)

    until(rest, "no thread is busy with waiting")
    for client, message in waiting[:32]:
        client.ack(message)
    until(lambda: len(waiting) == 33, "the last one asks, too")
    waiting[32][0].ack(waiting[32][1])
    until(lambda: world.gate_calls() == ["schedule"] * 33, "every call went through")


def test_a_channel_is_never_left_out_because_valved_did_not_read_for_a_while(world):
    """A waiting thread gives up after two seconds. What it could not even send is told later."""
    daemon = world.daemon(2)
    goes_on = threading.Event()
    puppet, client = world.offline(daemon)
    made = Process.begin(puppet)
    for handle in FILLING:
        made.channel(made.device, handle, engine=GR0)
        made.register(handle)
        client.expect(CHANNEL_ADD, h_channel=handle)
    daemon.on_message = lambda *_: not goes_on.wait()

    for handle in FILLING:
        made.free(handle)  # each says so, and waits for nothing: the socket is full
    made.channel(made.device, FIRST, engine=GR0)
    made.register(FIRST)
    goes_on.set()

    client.expect(CHANNEL_ADD, h_channel=FIRST)
    ended = [message.fields["h_channel"] for message in client.seen if message.type == CHANNEL_DEL]
    assert ended == list(FILLING)  # all of them, and before the handle of one might come again


def test_an_applications_own_enable_waits_for_the_gate_too(offline):
    made, client = offline
    made.channel(made.device, FIRST, engine=GR0)
    made.register(FIRST)

    made.control(made.subdevice, DISABLE, disable_params(False, [(made.client, FIRST)]))

    client.expect(SCHEDULE_WAIT, h_object=made.subdevice)
    client.expect(SCHEDULE_DONE, h_object=made.subdevice)


def test_unscheduling_waits_for_nobody(world, offline):
    made, client = offline
    made.group(TSG)

    made.schedule(TSG, on=False)

    assert world.gate_calls() == ["schedule"]
    assert client.none_of(SCHEDULE_WAIT)


def test_serialised_parameters_are_reported_as_a_hole_not_guessed_at(process):
    made, client = process

    made.alloc(made.device, FIRST, GPFIFO, channel_params(GR0), flags=1)

    client.expect(NOTE, code=NOTE_INCOMPLETE)


def test_an_mps_object_is_reported(process):
    made, client = process

    made.alloc(made.device, 0x5C000077, MPS)

    client.expect(NOTE, code=NOTE_MPS)


@pytest.mark.parametrize("version", ["470.57.02", "610.43.02", "not a version"])
def test_an_unknown_driver_is_observed_only(world, version):
    puppet, client = world.online(FAKERM_VERSION=version)
    made = Process.begin(puppet)
    made.channel(made.device, FIRST, engine=GR0)
    made.register(FIRST)
    puppet.launch(2)

    client.expect(NOTE, code=NOTE_UNKNOWN_DRIVER)
    assert client.none_of(CHANNEL_ADD)
    assert client.submitted() == 2, "launches are counted all the same"


@pytest.mark.parametrize("version", ["535.98", "550.163.01", "570.211.01", "580.142", "590.48.01", "595.45.04"])
def test_each_known_branch_is_captured(world, version):
    puppet, client = world.online(FAKERM_VERSION=version)
    made = Process.begin(puppet)

    made.alloc(made.device, TSG, GROUP, group_params())
    made.alloc(TSG, FIRST, GPFIFO, channel_params(size=360))
    made.register(FIRST)

    client.expect(CHANNEL_ADD, h_channel=FIRST, compute=1)


def test_the_branch_is_said_in_the_hello(world):
    _, client = world.online(FAKERM_VERSION="570.211.01")

    assert client.hello.driver == 570211001


def test_arguments_that_cannot_be_read_do_no_harm(process):
    made, client = process
    puppet, bad = made.puppet, 0x10

    made.alloc(made.device, FIRST, GPFIFO, argument=bad)
    made.control(made.subdevice, DISABLE, "", argument=bad)
    puppet.control(made.ctl, made.client, TSG, 0xA06C0101, "", argument=bad)
    made.channel(made.device, SECOND, engine=GR0)
    made.register(SECOND)

    client.expect(NOTE, code=NOTE_INCOMPLETE)
    client.expect(CHANNEL_ADD, h_channel=SECOND)


def test_a_number_that_was_closed_behind_our_back_is_just_a_file(process):
    """Closed by a raw system call and given to another file: its ioctls are none of ours."""
    made, client = process
    made.puppet.close_by_syscall(made.uvm)
    other = made.puppet.open("/dev/null")
    assert made.uvm == other

    made.puppet.raw_ioctl(other, 27, 0)

    made.channel(made.device, FIRST, engine=GR0)
    made.control(FIRST, SCHEDULE_CHANNEL, "010000")
    client.expect(CHANNEL_ADD, h_channel=FIRST)


def test_a_drivers_file_with_a_high_number_is_never_overlooked(world):
    """Data loaders and servers with many sockets have more than a thousand files open."""
    daemon = world.daemon(OFFLINE)
    puppet = world.puppet(role="offline", VALVE_REQUIRE="1")
    puppet.fill_fds(1100)
    process = Process.begin(puppet)
    client = daemon.client()

    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)

    assert process.ctl > 1100
    client.expect(CHANNEL_ADD, h_channel=FIRST)
    puppet.close(process.ctl)
    client.expect(CHANNEL_DEL, h_channel=FIRST)


def test_a_vfork_child_that_tidies_up_its_files_takes_no_channel_along(process):
    """subprocess closes inherited descriptors in a child that still shares the parent's memory."""
    made, client = process
    made.channel(made.device, FIRST, engine=GR0)
    made.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)

    assert made.puppet.spawn("echo", "here") == "here\n"

    assert client.none_of(CHANNEL_DEL)
