"""Pods that are deleted: no offline process of theirs meets the kubelet's SIGKILL with its channels off."""

from __future__ import annotations

import asyncio
from datetime import datetime, timezone

import pytest
from fakeapi import until
from kube_node import OFFLINE_UID, ONLINE_UID, UIDS, group, kube_node, pod, scenario
from node_world import World
from valve_kube import names
from valve_kube.client import ApiError

from valved.kube.apiserver import ApiServer
from valved.kube.deletions import CUT_S, Deletions
from valved.kube.host import Host, KubeBooks
from valved.kube.pods import COPY, STATIC_UID, PodBook, PodsListener
from valved.model.ids import GpuIndex, Role
from valved.state.registry import BRAKE_SERVICE

EPOCH_S = 1_800_000_000.9  # when the virtual clock began, by the API server's; it cuts its times to whole seconds
GRACE_S = 30
ANOTHER, HASH = UIDS[4], "0123456789abcdef0123456789abcdef"
KILLED = [(300, "SIGSTOP"), (300, "SIGKILL")]


class Room(PodsListener):
    """A node with the pod of an offline process, an online service beside it, and an API server."""

    def __init__(self, folder, uid=OFFLINE_UID):
        self.book, self.uid = PodBook(), uid
        self.world = world = World(folder, pods=self.book)
        host = Host(
            gate=world.gate,
            books=world.books,
            gating=world.gating,
            register=world.register,
            brake=world.brake,
            journal=world.journal,
            clock=world.clock,
            processes=world.processes,
            run_dir=folder,
            version="test",
            ladder=world.ladder,
            endings=world.endings,
        )
        self.deletions = Deletions(host, self.book, self)
        self.book.listener = self
        self.pods_changed, self.pod_left = self.deletions.pods_changed, self.deletions.pod_left
        self.ahead_s = 0.0  # the clock of this node
        self.found = []  # at the API server: UIDs of pods of that name
        self.off_at_a_kill = []
        world._signal = self._signal
        self.book.put(self.item())
        self.online = world.online(pid=200)
        world.processes.add(300, cgroup=group(uid))
        self.client = world.hello(300, Role.NONE, features=world.shim_features).client
        world.add_channel(self.client, gpu=0, h_client=0xC1D00000 + self.client)
        world.run(1000)

    def _signal(self, process, number):
        self.world.signals.append((process.pid, number.name))
        if number.name == "SIGKILL":
            self.off_at_a_kill.append(dict(self.world.gate.off))
        return True

    def now_s(self):
        return EPOCH_S + self.world.clock.now_ns() / 1e9 + self.ahead_s

    async def is_gone(self, pod):
        if self.found is None:
            raise OSError("the API server is away")
        return pod.uid not in self.found

    def item(self, ends_s=None, grace_s=GRACE_S, **notes):
        made = pod("batch-0", self.uid, role="offline", phase="Running")
        made["metadata"]["annotations"].update(notes)
        made["metadata"]["uid"] = ANOTHER if STATIC_UID in notes else self.uid  # a copy has a UID of its own
        if ends_s is not None:
            text = datetime.fromtimestamp(int(ends_s), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            made["metadata"].update(deletionTimestamp=text, deletionGracePeriodSeconds=grace_s)
        return made

    def delete(self, grace_s=GRACE_S, ago_s=0.0, **notes):
        self.book.put(self.item(self.true_s() + grace_s - ago_s, grace_s, **notes))

    def true_s(self):
        return self.now_s() - self.ahead_s

    def stop(self):
        """A request comes to the online service."""
        self.world.gate.launch(self.online)
        assert self.world.gate.off

    def run(self, seconds):
        self.world.run(seconds * 1000)

    @property
    def signals(self):
        return self.world.signals


@pytest.fixture
def room(tmp_path):
    return Room(tmp_path)


def test_no_stopped_process_of_a_deleted_pod_meets_the_kubelets_kill_with_its_channels_off(room):
    room.stop()
    room.delete()

    room.run(GRACE_S - 0.5)

    assert room.signals == KILLED
    assert room.off_at_a_kill == [{}]
    room.world.check()


def test_no_process_of_a_deleted_pod_loses_more_of_its_grace_than_two_seconds(room):
    room.stop()
    room.delete()

    room.run(GRACE_S - 2.1)
    assert not room.signals
    room.run(0.5)
    assert room.signals == KILLED


@pytest.mark.parametrize("grace_s", [1, 2, 3])
def test_no_short_grace_is_cut_by_more_than_half(room, grace_s):
    room.stop()
    room.delete(grace_s)

    room.run(grace_s / 2 - 0.1)
    assert not room.signals
    room.run(0.4)
    assert room.signals == KILLED


def test_no_process_is_ended_that_runs_and_none_is_left_that_is_stopped_later(room):
    room.delete()
    room.run(GRACE_S - 1)
    assert not room.signals

    room.stop()
    room.run(0.3)

    assert (room.signals, room.off_at_a_kill) == (KILLED, [{}])


def test_no_process_without_a_link_is_left_to_the_kubelet_with_its_channels_off(room):
    room.stop()
    room.world.register.leave(room.client, "link closed")
    assert room.world.gate.off
    room.delete()

    room.run(GRACE_S - 1)

    assert (room.signals, room.off_at_a_kill) == (KILLED, [{}])


@pytest.mark.parametrize("stands_after_s", [0, 0.2, 60])
def test_no_process_dies_with_its_container_before_its_channels_are_on(room, stands_after_s):
    """The kernel kills all that is in a container with its first process, which is the oldest."""
    world = room.world
    world.processes.add(301, cgroup=group(OFFLINE_UID))
    child = world.hello(301, Role.NONE, features=world.shim_features).client
    world.add_channel(child, gpu=0, h_client=0xC1D00000 + child)
    world.run(1000)
    room.stop()
    world.processes.slow_to_stop.add(301)

    room.delete(ago_s=GRACE_S)
    room.run(stands_after_s)
    world.processes.slow_to_stop.clear()
    room.run(0.1)

    assert room.signals == [(301, "SIGSTOP"), (300, "SIGSTOP"), (301, "SIGKILL"), (300, "SIGKILL")]
    assert room.off_at_a_kill[1] == {}


def test_no_deletion_that_was_heard_late_waits_for_a_whole_grace(room):
    """The API server was away, or this valved has just started."""
    room.stop()
    room.delete(ago_s=GRACE_S - 1)

    room.run(0.3)

    assert room.signals == KILLED


def test_no_grace_that_was_made_shorter_counts_at_its_first_length(room):
    room.stop()
    room.delete(3600)
    room.run(10)
    room.delete(4)

    room.run(1.9)
    assert not room.signals
    room.run(0.6)
    assert room.signals == KILLED


def test_no_later_word_of_a_deleted_pod_gives_it_more_time(room):
    room.ahead_s = -86400.0  # deletionTimestamp is of no help
    room.stop()
    room.delete()
    (ends,) = (one.deletion.ends_s for one in room.book.pods.values())

    room.run(GRACE_S / 2)
    room.book.put(room.item(ends, **{names.SLO: "tpot=40ms"}))
    room.run(GRACE_S / 2 - 1)

    assert room.signals == KILLED


def test_no_drain_that_is_taken_back_lets_a_process_go_whose_pod_s_time_is_over(room):
    room.stop()
    room.world.processes.slow_to_stop.add(300)
    room.delete(ago_s=GRACE_S)
    room.run(0.2)

    room.world.endings.take_back([])
    room.run(1)

    assert room.signals == KILLED


@pytest.mark.parametrize("ahead_s", [-86400.0, 86400.0])
def test_no_wrong_clock_ends_a_pod_that_is_not_deleted(room, ahead_s):
    room.ahead_s = ahead_s
    room.stop()
    room.book.put({**room.item(), "status": {"phase": "Running", "conditions": [{"type": "Ready"}]}})

    room.run(3600)

    assert not room.signals


@pytest.mark.parametrize(("ahead_s", "passes_s"), [(-86400.0, GRACE_S - 2.0), (-5.0, GRACE_S - 2.0), (5.0, 23.0)])
def test_no_wrong_clock_costs_a_deleted_pod_more_than_the_difference_or_ends_it_too_late(room, ahead_s, passes_s):
    room.ahead_s = ahead_s
    room.stop()
    room.delete()

    room.run(passes_s - 0.1)
    assert not room.signals
    room.run(1.2)
    assert room.signals == KILLED


def test_no_other_pod_is_ended_with_a_deleted_one(room):
    world = room.world
    room.book.put(pod("batch-1", ANOTHER, role="offline", phase="Running"))
    world.processes.add(400, cgroup=group(ANOTHER))
    other = world.hello(400, Role.NONE, features=world.shim_features).client
    world.add_channel(other, gpu=0, h_client=0xC1D00000 + other)
    room.stop()
    room.delete()

    room.run(3 * GRACE_S)

    assert room.signals == KILLED
    assert other in world.books.clients


def test_no_online_process_of_a_deleted_pod_is_signalled(room):
    world = room.world
    room.book.put(pod("chat-1", ONLINE_UID, role="online", phase="Running"))
    world.processes.add(500, cgroup=group(ONLINE_UID))
    connection = world.hello(500, Role.NONE)
    assert connection.last.role is Role.ONLINE
    world.add_channel(connection.client, gpu=0, h_client=0xC1D00000 + connection.client)
    room.stop()
    gone = pod("chat-1", ONLINE_UID, role="online", phase="Running")
    gone["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z", deletionGracePeriodSeconds=1)
    room.book.put(gone)

    room.run(60)

    assert not room.signals


def test_no_difference_between_the_clocks_that_a_report_has_told_counts(tmp_path):
    """This node is 100 s ahead."""
    api = ApiServer(None, "node-1", PodBook(), lambda is_braked: None, found=lambda item: None, wall_s=lambda: 1_100.7)

    api.clock.stored(1_100.7, 1_100.7, 1_000.0)

    assert 1_000.0 <= api.now_s() <= 1_000.7 + CUT_S


# Pods that have left


def test_no_pod_that_was_deleted_by_force_leaves_a_process_with_its_channels_off(room):
    room.stop()
    room.book.drop(room.item(room.true_s(), 0))

    room.run(0.3)

    assert (room.signals, room.off_at_a_kill) == (KILLED, [{}])


def test_none_is_left_that_is_stopped_after_its_pod_was_deleted_by_force(room):
    room.book.drop(room.item(room.true_s(), 0))
    room.run(5)
    assert not room.signals

    room.stop()
    room.run(0.3)

    assert (room.signals, room.off_at_a_kill) == (KILLED, [{}])


@pytest.fixture(autouse=True)
def asks_again_at_once(monkeypatch):
    monkeypatch.setattr("valved.kube.deletions.AGAIN_S", 0.0)


def asked(room, leave, later=lambda: None):
    """What is asked of the API server is asked."""

    async def ask():
        task = asyncio.ensure_future(room.deletions.run())
        leave()
        for _ in range(9):
            await asyncio.sleep(0)
        later()
        for _ in range(9):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(ask())
    room.run(5)


@pytest.mark.parametrize("leave", [lambda room: room.book.replace([]), lambda room: room.book.drop(room.item())])
@pytest.mark.parametrize("found", [[OFFLINE_UID], None], ids=["it is there", "nobody answers"])
def test_no_pod_that_a_list_or_a_watch_has_lost_is_ended(room, leave, found):
    room.stop()
    room.found = found

    asked(room, lambda: leave(room))

    assert not room.signals


@pytest.mark.parametrize("found", [[], [ANOTHER]], ids=["gone", "another of its name"])
def test_no_pod_that_was_deleted_while_the_watch_was_away_leaves_a_process_with_its_channels_off(room, found):
    room.stop()
    room.found = found

    asked(room, lambda: room.book.replace([]))

    assert (room.signals, room.off_at_a_kill) == (KILLED, [{}])


def test_no_pod_is_forgotten_for_an_api_server_that_did_not_answer_at_first(room):
    room.stop()
    room.found = None

    asked(room, lambda: room.book.replace([]), lambda: setattr(room, "found", []))

    assert (room.signals, room.off_at_a_kill) == (KILLED, [{}])


def lose(room, **notes):
    asked(room, lambda: room.book.drop(room.item(room.true_s(), 0, **notes)))


@pytest.mark.parametrize("leave", [Room.delete, lose])
def test_no_static_pod_is_ended_with_its_copy(tmp_path, leave):
    """The kubelet runs it on, and makes another copy."""
    mark = {STATIC_UID: HASH, COPY: HASH}
    room = Room(tmp_path, uid=HASH)
    room.book.put(room.item(**mark))
    room.stop()

    leave(room, **mark)
    room.run(60)

    assert not room.signals


@pytest.mark.parametrize("mark", [{STATIC_UID: OFFLINE_UID, COPY: OFFLINE_UID}, {}], ids=["its copy", "another pod"])
def test_no_static_pod_whose_manifest_names_its_uid_is_ended_for_its_copy(room, mark):
    """The runtime spoke of it, and no list of the API server's has a pod of its UID."""
    room.stop()
    copy = room.item(**mark)
    copy["metadata"]["uid"] = ANOTHER
    api = ApiServer(PodOfThatName(copy), "node-1", PodBook(), lambda is_braked: None, found=lambda item: None)
    room.is_gone = api.is_gone

    asked(room, lambda: room.book.replace([copy]))

    assert room.signals == ([] if mark else KILLED)


@pytest.mark.parametrize("is_claimed", [False, True])
@pytest.mark.parametrize(("name", "is_ended"), [("batch-node-1", False), ("batch-0", True)], ids=["static", "another"])
def test_no_static_pod_whose_manifest_names_its_uid_is_ended_while_it_has_no_copy(room, name, is_ended, is_claimed):
    """Somebody deleted the copy, or the API server takes none."""
    api = ApiServer(NoPod(), "node-1", PodBook(), lambda is_braked: None, found=lambda item: None)
    room.is_gone = api.is_gone
    room.book.pods.clear()
    (claim,) = (one for one in room.world.books.claims.values() if one.role is Role.OFFLINE)
    room.world.books.services[claim.service].name = f"default/{name}"
    if not is_claimed:
        room.book.heard(OFFLINE_UID, "default", name, {})
    room.stop()

    asked(room, room.deletions.ask_for_untold)

    assert room.signals == (KILLED if is_ended else [])


class NoPod:
    """There is none, whoever asks."""

    async def request(self, method, path):
        raise ApiError(404, "NotFound", "")


class PodOfThatName:
    """Every question with one pod."""

    def __init__(self, found):
        self.found = found

    async def request(self, method, path):
        return self.found


def test_no_look_goes_on_when_nothing_is_deleted(room):
    room.stop()
    room.delete()
    assert room.deletions._ticker.runs

    room.book.drop(room.item(room.true_s(), 0))
    room.run(1)
    assert room.signals == KILLED

    assert not room.deletions._ticker.runs


def deleted():
    made = pod("batch-0", OFFLINE_UID, role="offline", phase="Running")
    made["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z", deletionGracePeriodSeconds=30)
    return [made]


def another():
    return [pod("batch-0", ANOTHER, role="offline")]


async def stopped_pod(node):
    """The node has heard of an offline pod; a client of it is here, and its channel is off."""
    await until(lambda: OFFLINE_UID in node.books.pods.pods)
    world = node.world
    world.processes.add(300, cgroup=group(OFFLINE_UID))
    client = world.hello(300, Role.NONE, features=world.shim_features).client
    world.add_channel(client, gpu=0, h_client=0xC1D00000 + client)
    world.gating.set_standing(BRAKE_SERVICE, frozenset({GpuIndex(0)}))
    return client


@pytest.mark.parametrize("listed", [deleted, list, another])
def test_no_node_leaves_a_deleted_pod_to_the_kubelet(tmp_path, listed):
    """The whole room: what the API server lists reaches the process, and a pod that it does not list is asked for."""

    def before(node):
        node.api.items = [pod("batch-0", OFFLINE_UID, role="offline", phase="Running")]

    async def body(folder):
        async with kube_node(folder, prepare=before) as node:
            world, client = node.world, await stopped_pod(node)

            node.api.items = listed()
            node.room.api.pods.relist()

            await until(lambda: world.books.clients[client].process in world.endings)
            world.run(1000)
            assert world.signals == KILLED

    scenario(body)(tmp_path)


async def stopped_while_nobody_hears(node):
    """An offline process of a pod is here and stopped. The valved that heard of the pod is gone."""
    client = await stopped_pod(node)
    await node.stop_room()
    node.books = KubeBooks(pods=PodBook())  # claims of the state file are in the books of the next one
    return client, node.world.books.clients[client].process


@pytest.mark.parametrize("has_link", [True, False], ids=["linked", "without a link"])
@pytest.mark.parametrize("runtime_tells", [False, True], ids=["api", "runtime"])
@pytest.mark.parametrize("listed", [list, another])
def test_no_pod_that_was_deleted_while_valved_was_away_leaves_a_process_with_its_channels_off(
    tmp_path, listed, runtime_tells, has_link
):
    def before(node):
        node.api.items = [pod("batch-0", OFFLINE_UID, role="offline", phase="Running")]

    async def body(folder):
        async with kube_node(folder, prepare=before) as node:
            client, process = await stopped_while_nobody_hears(node)
            node.api.items = listed()
            if not has_link:
                node.world.register.leave(client, "link closed")

            node.start_room()
            await node.room.api.pods.wait_synced()
            if runtime_tells:
                node.room.book.heard(OFFLINE_UID, "default", "batch-0", {})
            await until(lambda: process in node.world.endings)
            node.world.run(1000)
            assert node.world.signals == KILLED

    scenario(body)(tmp_path)


def test_no_pod_is_ended_that_no_list_has_and_the_api_server_knows(tmp_path):
    def before(node):
        node.api.items = [pod("batch-0", OFFLINE_UID, role="offline", phase="Running")]

    async def body(folder):
        async with kube_node(folder, prepare=before) as node:
            _, process = await stopped_while_nobody_hears(node)
            asked, is_gone = [], ApiServer.is_gone

            async def asking(api, one):
                asked.append((one.uid, await is_gone(api, one)))
                return asked[-1][1]

            node.start_room()
            await node.room.api.pods.wait_synced()
            node.room.book.drop(node.api.items[0])  # as a list that does not have it
            node.room.api.is_gone = asking.__get__(node.room.api)
            await until(lambda: asked)
            await asyncio.sleep(0)
            assert asked[0] == (OFFLINE_UID, False)
            assert process not in node.world.endings

    scenario(body)(tmp_path)
