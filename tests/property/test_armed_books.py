"""Whatever joins, leaves or is told again: what is kept of armed channels is what a look at all of them finds."""

from __future__ import annotations

import errno
from collections import Counter
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from valve_abi import Feature
from valved.native._gate import ffi

from valved.gate import kept, reaching
from valved.gate.armed import LADDER, ArmedChannel, GateClient, entry_of
from valved.machine.ports import ClientFds
from valved.model.ids import ChannelRef, ClientId, GpuIndex, Reach, Role, ServiceId
from valved.native import _gate

GPUS = 2
INVALID = 0x21
ADDRESSES = {client: ffi.cast("struct valve_client *", 64 * client) for client in (1, 2)}
NAMES = ("client", "reach", "h_client", "h_channel", "fd", "h_target", "h_subdevice", "keep_off", "apart")


class Driver:
    """Stands for the native gate: keeps the list that it was handed last, and refuses what it is told to refuse."""

    def __init__(self) -> None:
        self.plans: dict[int, list[tuple]] = {gpu: [] for gpu in range(GPUS)}
        self.gated: set[int] = set()
        self.refused: set[int] = set()
        self.hangs = self.is_failed = False
        self.cids: dict[tuple[int, int], int] = {}
        self.freed: list[object] = []
        self.features = int(Feature.SELF_GATE | Feature.HOLD)

    def __getattr__(self, name):
        return getattr(_gate.lib, name)  # the constants

    def valve_gpu_cid(self, gate, gpu, h_client, h_channel, cid):
        cid[0] = self.cids.get((h_client, h_channel), 7)
        return 0

    def valve_gpu_try(self, gate, gpu, entry):
        return INVALID if entry.reach in self.refused else 0

    def valve_arm(self, gate, gpu, entries, count, stops, stop_count, runs, run_count, was):
        self.plans[gpu] = [read(entries[at]) for at in range(count)]
        if self.hangs:
            return -errno.ETIMEDOUT
        bad = gpu in self.gated and any(stops[at].reach in self.refused for at in range(stop_count))
        return INVALID if bad else 0

    def valve_gpu_gated(self, gate, gpu):
        return gpu in self.gated

    def valve_gpu_state(self, gate, gpu):
        return self.VALVE_GPU_FAILED if self.is_failed else self.VALVE_GPU_STOPPED if gpu in self.gated else 0

    def valve_gpu_stop_again(self, gate, gpu):
        pass

    def valve_gate_orders(self, gate):
        return 0

    def valve_gate_plans(self, gate):
        return 0

    def valve_gpu_gone(self, gate, gpu, gone, room):
        return 0

    def valve_client_free(self, gate, native):
        self.freed.append(native)

    def valve_client_view(self, native, view, flag):
        view.features = self.features

    def valve_client_take_fd(self, native, fd):
        return -errno.EMFILE if fd % 5 == 0 else 0


def read(entry) -> tuple:
    return tuple(getattr(entry, name) for name in NAMES)


class Walk:
    """Steps in any order, each equally often: what matters is what three of them do to one channel."""

    def __init__(self, draw: Random) -> None:
        self.draw, self.driver, self.holders, self.next_fd = draw, Driver(), {}, 11
        infos = [SimpleNamespace(status=0) for _ in range(GPUS)]
        self.port = reaching.NativeChannels(None, self.holders, infos, "")

    def step(self) -> None:
        steps = (self.add, self.add, self.remove, self.leave, self.give_up, self.rm_client, self.app, self.news)
        self.draw.choice(steps)()

    def client(self) -> ClientId:
        client = ClientId(self.draw.choice((1, 2)))
        fds = ClientFds(control=-1, region=-1, doorbell=-1, order=-1)
        new = GateClient(native=ADDRESSES[client], role=Role.OFFLINE, service=ServiceId(1), fds=fds)
        self.holders.setdefault(client, new)
        return client

    def one_of(self, *values):
        return self.draw.choice(values)

    def add(self) -> None:
        client, h, c, compute = self.client(), self.one_of(1, 2), self.one_of(1, 2), self.one_of(True, True, False)
        gpu, cid = GpuIndex(self.one_of(0, 1)), self.one_of(7, 7, 8)
        ref = ChannelRef(gpu=gpu, h_client=h, h_channel=c, cid=cid, h_tsg=0, engine=1, compute=compute)
        if not self.port.add_channel(client, ref).is_known:
            self.port.remove_channel(client, h, c)  # as clients/channels.py does

    def remove(self) -> None:
        self.port.remove_channel(self.client(), self.one_of(1, 2), self.one_of(1, 2))

    def leave(self) -> None:
        client = self.client()
        self.port.client_leaves(client, self.holders.pop(client), lives_on=self.one_of(True, False))

    def give_up(self) -> None:
        self.port.give_up(self.client(), "it says so")

    def rm_client(self) -> None:
        self.next_fd += 1
        fd = self.one_of(self.next_fd, -1)
        self.port.give_rm_client(self.client(), GpuIndex(0), self.one_of(1, 2), 1, self.one_of(1, 2), fd)

    def app(self) -> None:
        """And what it has scheduled is stopped again."""
        client, h = self.client(), self.one_of(1, 2)
        self.port.note_app_disabled(client, h, self.one_of(1, 2), self.one_of(True, False))
        self.port.stop_again(client, h)

    def news(self) -> None:
        """The driver changes its mind, GPUs stop and run, and a number names another channel."""
        driver = self.driver
        driver.gated = {gpu for gpu in range(GPUS) if self.one_of(True, False)}
        driver.refused = {rung for rung in range(len(LADDER)) if self.one_of(True, False, False)}
        driver.hangs, driver.is_failed = self.one_of(True, False, False), self.one_of(True, False, False)
        driver.cids[self.one_of(1, 2), self.one_of(1, 2)] = self.one_of(7, 8)

    # What must be so after each step

    def check(self) -> None:
        everything = list(self.port._channels)
        for gpu in map(GpuIndex, range(GPUS)):
            self.check_gpu(gpu, [one for one in everything if one.ref.gpu == gpu])
        for client in ADDRESSES:
            assert self.port._channels.of(client) == [one for one in everything if one.client == client]
        given_up = {client for client, holder in self.holders.items() if holder.is_given_up}
        assert not [one for one in everything if one.client in given_up and one.is_armed], "given up, and armed again"

    def check_gpu(self, gpu: GpuIndex, here: list[ArmedChannel]) -> None:
        books = self.port._channels
        armed = sorted((one for one in here if one.is_armed), key=lambda one: one.place)
        plan = books.plan(gpu)
        kept = [read(plan.entries[at]) for at in range(len(plan))]
        entries = [entry_of(one, self.holders[one.client]) for one in armed]
        assert kept == [read(ffi.new("struct valve_entry *", entry)) for entry in entries]
        rungs = Counter(one.reach for one in here if one.ref.compute)
        assert +books._rungs[gpu] == rungs
        assert books.weakest(gpu) == max(rungs, key=(*LADDER, Reach.NONE).index, default=None)
        assert [names(entry) for entry in self.driver.plans[gpu]] == [names(entry) for entry in kept]


def names(entry: tuple) -> tuple:
    """Which channel on which rung: other numbers of a call may be handed to the issuer with the next list."""
    return entry[:4]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_no_index_of_armed_channels_ever_differs_from_a_look_at_all_of_them(seed):
    walk = Walk(Random(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reaching, "lib", walk.driver)
        patch.setattr(kept, "lib", walk.driver)
        patch.setattr(kept, "os", SimpleNamespace(dup=lambda fd: fd + 1000))
        for _ in range(120):
            walk.step()
            walk.check()
