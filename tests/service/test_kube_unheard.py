"""Whom a node cannot hear or stop: offline pods without the shim, claims without a name, jobs with nothing to do."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading

import pytest
from fakeapi import until
from kube_node import GIB, OFFLINE_UID, ONLINE_UID, group, kube_node, pod, registered, scenario, uuid_of

from valved.abi.link import Feature
from valved.clients.untold import NO_ROOM
from valved.kube import counting, seriesfile
from valved.machine.cards import CardUse
from valved.model.events import EventKind
from valved.model.ids import Role


@scenario
async def test_an_offline_pod_without_the_shim_never_runs_on_unstopped_and_unreported(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)
        node.room.counting.ungated.patience_s = node.room.counting.ungated.settle_s = 0.0
        gpu = uuid_of(node.world, 0)
        node.room.book.put(pod("batch-0", OFFLINE_UID, "offline", gpu, "Running"))
        info = node.world.gate.gpus()[0]
        node.world.processes.add(900, comm="bare", cgroup=group(OFFLINE_UID))
        node.cards.uses[info.uuid] = CardUse(total_bytes=80 * GIB, used_bytes=GIB, by_pid={900: GIB}, is_mig=False)

        await until(lambda: node.api.reports and node.api.reports[-1]["ungated"])

        assert (900, "SIGSTOP") in node.world.signals
        await until(lambda: node.guarded() == [0])
        (told,) = node.api.reports[-1]["ungated"]
        assert told["podUID"] == OFFLINE_UID
        (state,) = [one for one in node.api.reports[-1]["conditions"] if one["type"] == "OfflineUngated"]
        assert (state["status"], state["message"]) == ("True", "process 900 (bare) of default/batch-0")


@scenario
async def test_an_offline_pod_for_which_valved_had_no_room_is_never_told_to_run_without_the_shim(tmp_path):
    """It is frozen and evicted as one that does: another node may have room."""
    async with kube_node(tmp_path) as node:
        await registered(node)
        node.room.counting.ungated.patience_s = node.room.counting.ungated.settle_s = 0.0
        node.room.book.put(pod("batch-0", OFFLINE_UID, "offline", uuid_of(node.world, 0), "Running"))
        node.world.processes.add(900, comm="late", cgroup=group(OFFLINE_UID))
        node.world.gate.create_error = OSError(errno.EMFILE, "too many")
        assert node.world.hello(900).client is None
        info = node.world.gate.gpus()[0]
        node.cards.uses[info.uuid] = CardUse(total_bytes=80 * GIB, used_bytes=GIB, by_pid={900: GIB}, is_mig=False)

        await until(lambda: node.api.reports and node.api.reports[-1]["ungated"])

        (frozen,) = node.world.events(EventKind.FROZEN)
        assert frozen.reason == f"process 900 (late) of default/batch-0 uses a GPU {NO_ROOM}"
        assert "without the shim" not in " ".join(one.reason for one in node.world.events(EventKind.GUARD))


@scenario
async def test_no_offline_pod_that_dies_is_told_to_use_the_gpu_without_the_shim(tmp_path):
    """It has left, as valved kills it at the end of its pod, and the driver takes seconds to take it off the card."""
    async with kube_node(tmp_path) as node:
        await registered(node)
        node.room.book.put(pod("batch-0", OFFLINE_UID, "offline", uuid_of(node.world, 0), "Running"))
        node.world.processes.add(900, comm="done", cgroup=group(OFFLINE_UID))
        node.world.processes.ending.add(900)
        info = node.world.gate.gpus()[0]
        node.cards.uses[info.uuid] = CardUse(total_bytes=80 * GIB, used_bytes=GIB, by_pid={900: GIB}, is_mig=False)

        await node.room.counting.look()
        await node.room.reconcile()

        assert node.guarded() == []
        assert not node.room._observer.strangers(node.room.known.cards)  # whom `Ungated` would freeze, and report
        assert "without the shim" not in " ".join(one.reason for one in node.world.events(EventKind.GUARD))


@scenario
async def test_an_offline_pod_whose_channels_are_in_no_book_never_runs_on_unreported(tmp_path):
    """It is registered, and its CUDA went past the shim."""
    async with kube_node(tmp_path) as node:
        await registered(node)
        node.room.counting.ungated.patience_s = node.room.counting.ungated.settle_s = 0.0
        node.room.book.put(pod("batch-0", OFFLINE_UID, "offline", uuid_of(node.world, 0), "Running"))
        node.world.processes.is_stopped = lambda *_: False
        node.world.processes.add(900, comm="past", cgroup=group(OFFLINE_UID))
        client = node.world.hello(900).client
        assert node.world.books.clients[client].role is Role.OFFLINE
        info = node.world.gate.gpus()[0]
        node.cards.uses[info.uuid] = CardUse(total_bytes=80 * GIB, used_bytes=GIB, by_pid={900: GIB}, is_mig=False)

        await until(lambda: (900, "SIGSTOP") in node.world.signals)
        await until(lambda: node.guarded() == [0])
        await until(lambda: node.api.reports[-1]["ungated"])


@scenario
async def test_a_disk_that_hangs_never_ends_the_look_for_ungated_pods(tmp_path):
    """What it is to take is the node's series, for the next valved."""
    begun, free = threading.Event(), threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "SAVE_NS", 0)
        patch.setattr(seriesfile, "keep", lambda *_: (begun.set(), free.wait()))
        async with kube_node(tmp_path, start=False) as node, contextlib.AsyncExitStack() as end:
            end.callback(free.set)
            node.start_room()
            node.room.counting.ungated.patience_s = node.room.counting.ungated.settle_s = 0.0
            await until(begun.is_set)
            node.room.book.put(pod("batch-0", OFFLINE_UID, "offline", uuid_of(node.world, 0), "Running"))
            info = node.world.gate.gpus()[0]
            node.world.processes.add(900, comm="bare", cgroup=group(OFFLINE_UID))
            node.cards.uses[info.uuid] = CardUse(total_bytes=80 * GIB, used_bytes=GIB, by_pid={900: GIB}, is_mig=False)

            await until(lambda: (900, "SIGSTOP") in node.world.signals, 30)


@scenario
async def test_a_report_that_nobody_answers_never_delays_the_look_for_ungated_pods(tmp_path):
    async with kube_node(tmp_path, start=False) as node:
        node.start_room()
        writing = asyncio.Event()

        async def never(report):
            writing.set()
            await asyncio.Event().wait()

        node.room.api.write = never
        node.room.counting.ungated.patience_s = node.room.counting.ungated.settle_s = 0.0
        await writing.wait()
        node.room.book.put(pod("batch-0", OFFLINE_UID, "offline", uuid_of(node.world, 0), "Running"))
        info = node.world.gate.gpus()[0]
        node.world.processes.add(900, comm="bare", cgroup=group(OFFLINE_UID))
        node.cards.uses[info.uuid] = CardUse(total_bytes=80 * GIB, used_bytes=GIB, by_pid={900: GIB}, is_mig=False)

        await until(lambda: (900, "SIGSTOP") in node.world.signals)


@scenario
async def test_a_claimed_gpu_whose_uuid_nobody_names_never_counts_as_all_of_them_and_heard(tmp_path):
    """A DRA device is called gpu-0 by its driver. One pod with one of two opened both."""
    async with kube_node(tmp_path) as node:
        await registered(node)
        node.put(pod("chat-0", ONLINE_UID, role="online", phase="Running"))
        node.kubelet.held.append(("default", "chat-0", "work", "gpu.nvidia.com", ["gpu-0"]))
        node.world.processes.add(200, cgroup=group(ONLINE_UID))
        client = node.world.hello(200, wanted=Role.NONE).client
        await until(lambda: node.room.known.verdicts and node.room.known.verdicts[0].online)
        assert node.guarded() == [0, 1], "it may be either"

        node.world.add_channel(client, gpu=1, h_client=0xC1D00200)
        node.room._wake.set()

        await until(lambda: node.guarded() == [])
        first, second = node.room.known.verdicts
        assert (first.is_harvestable, first.reason) == (False, "no online pod holds it")
        assert (second.is_harvestable, second.online) == (True, ("default/chat-0",))


@scenario
async def test_a_job_that_waits_for_its_own_input_or_is_held_by_order_never_counts_as_demand(tmp_path):
    """Its hours would be a missed promise: it was evicted from an idle GPU."""
    async with kube_node(tmp_path) as node:
        node.room._observer.is_standing = lambda gpu: node.world.brake.is_paused
        node.put(pod("batch-0", OFFLINE_UID, role="offline"))
        node.world.processes.add(400, cgroup=group(OFFLINE_UID))
        client = node.world.hello(400, Role.OFFLINE).client
        node.world.add_channel(client, gpu=0, h_client=0xC1D00400)

        def has_work():
            (reading,) = node.room._observer.readings(node.world.clock.now_ns(), {}, {})
            return reading.has_work

        assert has_work(), "no hook: channels are all that is known"
        hook = node.world.hello(400, Role.HOOK, features=Feature.HINT).client
        node.world.run(1)
        node.world.gate.hint(hook, started=5, ended=5)
        assert not has_work()
        node.world.gate.hint(hook, started=6, ended=5)
        assert has_work()
        node.world.node.pause("test")
        assert not has_work()
