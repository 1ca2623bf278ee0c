"""Who may join as what, what channels mean, and what is left when somebody goes."""

from __future__ import annotations

import errno
import os

import pytest
from node_world import MS, World

from valved.abi.link import LinkType, Note, NoteMessage, Refusal, RmClient
from valved.clients.identity import NOT_YET, PodClaim
from valved.config import Config, LinkTable, QuotaTable
from valved.errors import NotFound, NotNow
from valved.machine.ports import ArmResult
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Mode, Reach, Role
from valved.state.registry import GUARD_SERVICE

CONFIG = Config(
    quota=QuotaTable(clients_per_uid=3, channels_per_client=4, notes_per_client=2),
    link=LinkTable(schedule_hold_s=1.0),
)


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path, config=CONFIG)
    yield world
    world.check()


# Roles


def test_a_claimed_process_gets_its_role_whatever_it_asks_for(world):
    """The environment only asks; the claim decides."""
    pid = world.processes.add(200)
    world.node.launch(pid, 2000, Role.OFFLINE, "batch")

    connection = world.hello(pid, wanted=Role.ONLINE)

    assert connection.last.role == Role.OFFLINE


def test_what_a_claimed_process_starts_belongs_to_it(world):
    world.processes.add(200)
    world.processes.add(201, parent=200)
    world.processes.add(202, parent=201)
    service = world.node.launch(200, 2000, Role.ONLINE, "chat")

    connection = world.hello(202, wanted=Role.ONLINE)

    assert (connection.last.role, connection.last.service) == (Role.ONLINE, service)


class Pods:
    """A claim source that knows what a test tells it."""

    def __init__(self):
        self.answer = NOT_YET

    def claim_of(self, peer):
        return self.answer

    def name_of(self, cgroup):
        return ""

    def trust_of(self, namespace):
        return ""

    def said_of(self, cgroup):
        return ()


@pytest.fixture
def kube(tmp_path):
    """A Kubernetes node, where pods say what their processes are."""
    world = World(tmp_path, config=CONFIG, pods=Pods())
    yield world
    world.check()


POD = "/kubepods/pod8b1c/"


def test_all_containers_of_an_online_pod_are_one_service(kube):
    kube.register.claimed.pods.answer = PodClaim(role=Role.ONLINE, name="serving/chat-0", cgroup=POD)
    kube.processes.add(200, cgroup=POD + "engine")
    kube.processes.add(300, cgroup=POD + "worker")

    engine, worker = kube.hello(200, wanted=Role.NONE), kube.hello(300, wanted=Role.OFFLINE)

    assert (engine.last.role, worker.last.role) == (Role.ONLINE, Role.ONLINE)
    assert engine.last.service == worker.last.service
    assert kube.books.services[engine.last.service].name == "serving/chat-0"


def test_the_first_process_of_a_pod_may_end_before_the_others(kube):
    """A launcher script comes and goes; the pod's service lives as long as anybody in it does."""
    kube.register.claimed.pods.answer = PodClaim(role=Role.ONLINE, name="serving/chat-0", cgroup=POD)
    kube.processes.add(200, cgroup=POD + "engine")
    kube.processes.add(300, cgroup=POD + "engine")
    first, second = kube.hello(200, wanted=Role.NONE), kube.hello(300, wanted=Role.NONE)

    kube.processes.end(200)
    third = kube.hello(kube.processes.add(301, cgroup=POD + "engine"), wanted=Role.NONE)

    assert third.last.service == second.last.service == first.last.service

    kube.processes.end(300)
    kube.processes.end(301)

    assert not kube.books.services
    assert not kube.books.claims


def test_a_pod_that_nobody_has_told_of_is_asked_to_knock_again(kube):
    """No answer at all: the shim passes through and comes back; a refusal would be for good."""
    kube.processes.add(200, cgroup=POD + "engine")

    connection = kube.hello(200, wanted=Role.NONE)

    assert connection.sent == []
    assert connection.client is None

    kube.register.claimed.pods.answer = PodClaim(role=Role.ONLINE, name="serving/chat-0", cgroup=POD)

    assert kube.hello(200, wanted=Role.NONE).last.role is Role.ONLINE


def test_a_launchers_claim_is_older_than_the_pods(kube):
    kube.register.claimed.pods.answer = PodClaim(role=Role.ONLINE, name="serving/chat-0", cgroup=POD)
    kube.processes.add(200, cgroup=POD + "engine")
    kube.node.launch(200, 2000, Role.OFFLINE, "batch")

    assert kube.hello(200, wanted=Role.NONE).last.role is Role.OFFLINE


def test_a_process_that_nobody_claimed_is_never_online(world):
    world.processes.add(200)

    assert world.refusal(world.hello(200, wanted=Role.ONLINE)) is Refusal.ROLE


def test_a_process_that_nobody_claimed_may_be_offline(world):
    world.processes.add(200)

    assert world.hello(200, wanted=Role.OFFLINE).last.role == Role.OFFLINE


def test_a_process_that_wants_nothing_and_was_not_claimed_gets_nothing(world):
    world.processes.add(200)

    assert world.refusal(world.hello(200, wanted=Role.NONE)) is Refusal.ROLE


def test_a_reused_pid_does_not_inherit_the_claim(world):
    world.processes.add(200)
    world.node.launch(200, 2000, Role.ONLINE, "chat")
    world.processes.end(200)
    world.processes.add(200, start=99_999)

    assert world.refusal(world.hello(200, wanted=Role.ONLINE)) is Refusal.ROLE


def test_claiming_under_a_wrong_start_time_is_refused_with_the_next_step(world):
    world.processes.add(200)

    with pytest.raises(NotFound, match="200") as caught:
        world.node.launch(200, 1, Role.ONLINE, "chat")

    assert caught.value.field == "start_time"


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups count for root only")
def test_root_finds_members_by_their_own_control_group(world):
    """A daemonised engine is nobody's child any more, but it still lives in its container."""
    world.processes.add(200, cgroup="/kube/pod1")
    world.processes.add(201, parent=1, cgroup="/kube/pod1/engine")
    service = world.node.launch(200, 2000, Role.ONLINE, "chat")

    assert world.hello(201, wanted=Role.ONLINE).last.service == service


def test_a_login_session_is_no_control_group_of_ones_own(world):
    world.processes.add(199, cgroup="/login")
    world.processes.add(200, parent=199, cgroup="/login")
    world.processes.add(300, parent=199, cgroup="/login")
    world.node.launch(200, 2000, Role.ONLINE, "chat")

    assert world.refusal(world.hello(300, wanted=Role.ONLINE)) is Refusal.ROLE


def test_an_engine_hook_joins_the_service_of_its_process(world):
    online = world.online()
    hook = world.hook(online)

    assert world.service_of(hook) == world.service_of(online)


def test_a_hook_of_nobody_is_refused(world):
    world.processes.add(300)

    assert world.refusal(world.hello(300, wanted=Role.HOOK)) is Refusal.ROLE


def test_a_hook_cannot_join_another_users_process(world):
    world.offline(pid=200, claimed=False)

    assert world.refusal(world.hello(200, wanted=Role.HOOK, uid=4000)) is Refusal.ROLE


# Refusals


@pytest.mark.parametrize("abi", [(0, 0), (2, 9)])
def test_no_common_version_is_refused_with_both_versions_named(world, abi):
    world.processes.add(200)
    connection = world.hello(200, abi=abi)

    assert world.refusal(connection) is Refusal.VERSION
    assert "ABI 1" in connection.last.text
    assert str(abi[1]) in connection.last.text


def test_one_user_cannot_take_every_place(world):
    for pid in (200, 201, 202, 203):
        world.processes.add(pid)
    for pid in (200, 201, 202):
        world.hello(pid)

    assert world.refusal(world.hello(203)) is Refusal.QUOTA
    assert world.hello(203, uid=1001).client is not None


@pytest.mark.parametrize(
    "leave",
    [
        lambda brake: brake.set_mode(Mode.OFF, "test"),
        lambda brake: brake.set_mode(Mode.OBSERVE, "test"),
        lambda brake: brake.drain("test"),
    ],
)
def test_where_offline_work_must_leave_none_is_claimed_and_who_comes_is_never_turned_away_to_run(world, leave):
    """A shim that is refused passes everything through: beside online work, where nobody could stop it."""
    leave(world.brake)
    world.processes.add(200)

    with pytest.raises(NotNow):
        world.node.launch(200, 2000, Role.OFFLINE, "batch")
    client = world.hello(200).client
    world.add_channel(client, gpu=0, h_client=0xC1D00200)

    assert len(world.gate.off) == 1


def test_a_process_that_asks_again_never_fills_the_journal(world):
    """A shim that was refused asks twice a minute, for life."""
    world.processes.add(200)

    for _ in range(3):
        assert world.refusal(world.hello(200, wanted=Role.ONLINE)) is Refusal.ROLE

    assert len(world.events(EventKind.REFUSED)) == 1
    assert world.refusal(world.hello(200, wanted=Role.ONLINE, abi=(9, 9))) is Refusal.VERSION
    assert len(world.events(EventKind.REFUSED)) == 2, "another reason is news"


def test_a_daemon_out_of_descriptors_refuses_and_keeps_its_books(world):
    world.gate.create_error = OSError(errno.EMFILE, "too many")
    world.processes.add(200)

    assert world.refusal(world.hello(200)) is Refusal.QUOTA
    assert not world.books.services


def test_refusals_are_counted_by_reason(world):
    world.processes.add(200)
    world.hello(200, wanted=Role.ONLINE)
    world.hello(200, abi=(5, 6))

    assert world.gating.counters.refusals == {"role": 1, "version": 1}
    assert len(world.events(EventKind.REFUSED)) == 2


# Channels


def test_an_offline_channel_is_off_before_its_ack_while_the_gate_is_closed(world):
    world.online()
    offline = world.offline(gpus=())

    seq = world.add_channel(offline, h_client=0xBEEF)

    assert world.gate.off
    assert (seq, 0) in world.connections[offline].acks()


def test_a_channel_on_an_unknown_gpu_is_answered_with_enodev(world):
    offline = world.offline(gpus=())

    packet = world.packet(LinkType.CHANNEL_ADD, world.channel(gpu=7))
    world.register.handle(offline, packet, [])

    assert (packet.seq, errno.ENODEV) in world.connections[offline].acks()


def test_channels_are_limited_per_client(world):
    offline = world.offline(gpus=())
    for number in range(4):
        world.add_channel(offline, h_channel=number + 1)

    seq = world.add_channel(offline, h_channel=99)

    assert (seq, errno.ENOSPC) in world.connections[offline].acks()


def test_a_channel_that_cannot_be_reached_is_refused_a_place(world):
    offline = world.offline(gpus=())
    world.gate.next_arm = ArmResult(status=0x1B, reach=Reach.NONE, want_fd=False, gated=False)

    seq = world.add_channel(offline)

    assert (seq, errno.EOPNOTSUPP) in world.connections[offline].acks()
    assert world.gating.counters.refusals == {"unreachable": 1}


def test_the_next_rung_asks_for_the_workloads_descriptor(world):
    offline = world.offline(gpus=())
    world.gate.next_arm = ArmResult(status=0, reach=Reach.CHANNEL_SELF, want_fd=True, gated=False)

    world.add_channel(offline)

    assert world.connections[offline].last.want_fd


def test_a_passed_descriptor_becomes_the_gates(world):
    offline = world.offline(gpus=())
    fd = os.eventfd(0)
    body = RmClient(gpu_uuid=bytes(16), device_instance=1, h_client=5, h_device=6, h_subdevice=7, has_fd=True)

    world.register.handle(offline, world.packet(LinkType.RM_CLIENT, body), [])  # asks for it
    fds = [fd]
    world.register.handle(offline, world.packet(LinkType.RM_CLIENT, body), fds)

    assert not fds  # it was taken
    assert ("give_rm_client", 5, fd) in world.gate.calls


def test_a_new_gpu_of_an_online_service_is_held_from_its_first_channel_on(world):
    world.offline(gpus=(1,))
    online = world.online(gpus=(0,))
    world.run(1)

    world.add_channel(online, gpu=1)

    assert world.gate.is_gated(1)


def test_a_service_that_gives_a_gpu_up_lets_its_offline_work_run(world):
    world.offline(gpus=(1,))
    online = world.online(gpus=(0, 1))
    body = world.channel(gpu=1, h_client=0xC1D00000 + online, h_channel=0xCAF00002)

    world.register.handle(online, world.packet(LinkType.CHANNEL_DEL, body), [])

    assert not world.gate.is_gated(1)


def test_what_the_application_disabled_itself_is_left_alone(world):
    offline = world.offline()
    channel = world.channel(h_client=0xC1D00000 + offline)
    note = NoteMessage(code=Note.APP_DISABLED, h_client=channel.h_client, h_channel=channel.h_channel, text="")

    world.register.handle(offline, world.packet(LinkType.NOTE, note), [])
    world.online()

    assert not world.gate.off
    assert world.handover.snapshot().clients[0].channels == []


def test_a_schedule_of_an_old_shim_never_leaves_a_channel_marked_as_the_applications(world):
    offline = world.offline()
    channel = world.channel(h_client=0xC1D00000 + offline)
    note = NoteMessage(code=Note.APP_DISABLED, h_client=channel.h_client, h_channel=channel.h_channel, text="")
    world.register.handle(offline, world.packet(LinkType.NOTE, note), [])

    world.schedule(offline, channel.h_client, kind=LinkType.SCHEDULE_DONE)

    assert not world.books.clients[offline].app_disabled
    assert not world.gate.clients[offline].app_disabled


def test_notes_reach_the_operator_a_bounded_number_of_times(world):
    offline = world.offline()
    for number in range(5):
        body = NoteMessage(code=Note.UNKNOWN_SUBMIT, h_client=0, h_channel=0, text=f"cuLaunch{number}")
        world.register.handle(offline, world.packet(LinkType.NOTE, body), [])

    notes = next(client for client in world.node.status().clients if client.id == offline).notes
    told = [note for note in notes if note.startswith("unknown-submit")]
    assert told == ["unknown-submit: cuLaunch0", "unknown-submit: cuLaunch1"]


# SCHEDULE


def test_a_schedule_call_waits_while_its_gpu_is_gated(world):
    """The ioctl would enable the channels behind the gate's back."""
    online, offline = world.online(), world.offline()
    world.gate.launch(online)

    seq = world.schedule(offline, 0xC1D00000 + offline)
    while_gated = world.connections[offline].acks()
    world.gate.finish(online)
    world.run(100)

    assert seq not in dict(while_gated)
    assert dict(world.connections[offline].acks())[seq] == 0


def test_a_schedule_call_goes_through_at_once_while_the_gate_is_open(world):
    offline = world.offline()

    seq = world.schedule(offline, 0xC1D00000 + offline)

    assert dict(world.connections[offline].acks())[seq] == 0


def test_a_schedule_call_is_not_held_for_ever(world):
    online, offline = world.online(), world.offline()
    world.gate.launch(online)

    seq = world.schedule(offline, 0xC1D00000 + offline)
    world.run(1001)

    assert dict(world.connections[offline].acks())[seq] == errno.EAGAIN


def test_a_schedule_call_that_ran_across_a_gate_is_undone(world):
    online, offline = world.online(), world.offline()
    world.gate.launch(online)
    world.gate.calls.clear()

    world.schedule(offline, 0xC1D00000 + offline, kind=LinkType.SCHEDULE_DONE)

    assert ("stop_again", 0xC1D00000 + offline) in world.gate.calls


# The lease


def test_offline_clients_know_whether_online_work_shares_a_gpu(world):
    """It decides what they do when valved dies."""
    near, far = world.offline(gpus=(0,)), world.offline(gpus=(1,))
    online = world.online(gpus=(0,))
    with_online = [world.gate.clients[client].online_registered for client in (near, far)]

    world.register.leave(online, "test")
    world.processes.end(world.events(EventKind.LEFT)[-1].detail["pid"])

    assert with_online == [True, False]
    assert world.gate.clients[near].online_registered is False


# Leaving


def test_a_dead_offline_process_is_enabled_on_its_way_out(world):
    """Its own teardown would otherwise wait for its channels under locks that everybody needs."""
    online, offline = world.online(), world.offline()
    world.gate.launch(online)
    pid = world.books.clients[offline].process.pid

    world.processes.end(pid)

    assert not world.gate.off
    assert world.gating.counters.channels_enabled_on_exit == 1
    assert offline not in world.books.clients


def test_a_dead_online_service_lets_go_of_its_gpus(world):
    world.offline()
    online = world.online()
    world.gate.launch(online)

    world.processes.end(world.books.clients[online].process.pid)

    assert not world.gate.off
    assert not world.gating.online


@pytest.mark.parametrize(("first", "last"), [(201, 200), (200, 201)], ids=["worker first", "launcher first"])
def test_a_service_outlives_its_launcher_and_its_workers_while_one_of_them_lives(world, first, last):
    world.processes.add(200)
    world.processes.add(201, parent=200)
    service = world.node.launch(200, 2000, Role.ONLINE, "chat")
    world.hello(201, wanted=Role.ONLINE)

    world.processes.end(first)
    kept = service in world.books.services
    world.processes.end(last)

    assert kept
    assert service not in world.books.services


def test_leaving_twice_is_leaving_once(world):
    offline = world.offline()

    world.register.leave(offline, "link")
    world.register.leave(offline, "exit")

    assert len(world.events(EventKind.LEFT)) == 1


def test_a_thousand_visits_leave_nothing_behind(world):
    readers = len(world.reactor.readers)
    for number in range(1000):
        pid = world.processes.add(1000 + number)
        connection = world.hello(pid)
        world.add_channel(connection.client, h_client=number + 1)
        if number % 2:
            world.processes.end(pid)
        else:
            world.register.leave(connection.client, "link closed")

    assert not world.books.clients
    assert not world.books.services
    assert len(world.reactor.readers) == readers
    assert world.gating.gpus[0].channels == 0


def test_a_worker_that_dies_under_a_busy_service_leaves_the_other_ranks_gated(world):
    world.offline(gpus=(0, 1))
    world.processes.add(200)
    ranks = []
    service = world.node.launch(200, 2000, Role.ONLINE, "chat")
    for gpu, pid in enumerate((201, 202)):
        world.processes.add(pid, parent=200)
        rank = world.hello(pid, wanted=Role.ONLINE, uid=5).client
        world.add_channel(rank, gpu=gpu, h_client=rank)
        ranks.append(rank)
    world.gate.launch(ranks[0])
    world.gate.launch(ranks[1])

    world.processes.end(202)
    world.run(200)

    assert world.books.services[service].gpus == {0}
    assert world.gate.is_gated(0)
    assert not world.gate.is_gated(1)


def test_the_node_status_shows_every_book(world):
    world.offline(name="batch")
    online = world.online(name="chat")
    world.gate.launch(online)
    world.run(1)

    status = world.node.status()

    assert {service.name: service.state.split(":")[0] for service in status.services} == {
        "batch": "stopped",
        "chat": "busy",
    }
    assert status.gpus[0].gated
    assert status.gpus[0].channels == 1
    assert [client.role for client in status.clients] == [Role.OFFLINE, Role.ONLINE]
    assert status.services[1].cooldown_ns == 20 * MS


def test_offline_work_on_a_guarded_gpu_never_goes_on_by_itself_when_valved_is_gone(world):
    """Somebody may use that GPU unseen: nobody registered is there, and the lease must hold all the same."""
    client = world.offline()
    world.gating.set_standing(GUARD_SERVICE, frozenset({GpuIndex(0)}))
    world.register.channels.lease.refresh()

    assert world.gate.clients[client].online_registered is True

    world.gating.set_standing(GUARD_SERVICE, frozenset())
    world.register.channels.lease.refresh()
    assert world.gate.clients[client].online_registered is False
