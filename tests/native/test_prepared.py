"""A reclaim that is prepared: what the native gate stops, tells and sends by itself while Python sleeps."""

from __future__ import annotations

import mmap
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from gates import FakeDriver, Rig, gate_rig, wait_until

from valved.abi.kv_files import BOOK_HEAD, KvBook, KvTable
from valved.machine.ports import StampKind
from valved.machine.prepared import PreparedTake
from valved.model.ids import GpuIndex
from valved.state.registry import MEMORY_SERVICE

GPU = GpuIndex(0)
PACKETS = (b"a" * 64, b"b" * 64)
LOST = (2, 3, 5)
MODE = BOOK_HEAD.fields["mode"][1]
WANTED = BOOK_HEAD.fields["wanted_blocks"][1]


class Scene:
    """An engine that will need memory, one that will lose it, and what stands ready between them."""

    def __init__(self, rig: Rig, gpus: tuple[int, ...] = (0,)) -> None:
        self.rig, self.port = rig, rig.gate.prepared
        self.workloads = [rig.offline(gpu=gpu) for gpu in gpus]
        for workload in self.workloads:
            workload.add(2)
        kind = socket.AF_UNIX, socket.SOCK_SEQPACKET
        self.hook, self.hooks_end = socket.socketpair(*kind)
        self.link, self.victim = socket.socketpair(*kind)
        self.victim.setblocking(False)
        self.table, self.book = KvTable(8, 16), KvBook(4, 8, 8, 16)
        self.words = mmap.mmap(self.book.fd, self.book.bytes)
        self.victims_book = KvBook(4, 8, 8, 16)
        self.victims_mode = mmap.mmap(self.victims_book.fd, self.victims_book.bytes)
        self.can_lose(True)
        assert self.port.listen(self.hook.fileno())
        self.take = PreparedTake(
            gpus=frozenset(map(GpuIndex, gpus)),
            wanted=self.book.word("wanted_blocks"),
            had=40,
            mode=self.victims_book.word("mode"),
            table=self.table.memory(),
            blocks=np.array(LOST, np.uint32).tobytes(),
            backed=5,
            packets=tuple((self.link.fileno(), raw) for raw in PACKETS),
        )

    def sleep(self, *more: PreparedTake) -> None:
        self.port.put([self.take, *more])
        self.port.rest()

    def need(self, blocks: int) -> None:
        struct.pack_into("<I", self.words, WANTED, blocks)
        self.hooks_end.send(b"need")

    def can_lose(self, on: bool) -> None:
        struct.pack_into("<I", self.victims_mode, MODE, 2 * on)

    def heard(self) -> list[bytes]:
        found = []
        while True:
            try:
                found.append(self.victim.recv(4096))
            except BlockingIOError:
                return found

    def lost(self) -> list[int]:
        return [block for block in range(8) if not self.table.entry(block)[1]]

    def close(self) -> None:
        self.port.put([])
        for sock in self.hook, self.hooks_end, self.link, self.victim:
            sock.close()
        self.words.close()
        self.victims_mode.close()
        del self.take
        self.victims_book.close()
        self.table.close()
        self.book.close()


@pytest.fixture
def scene(rig: Rig) -> Iterator[Scene]:
    scene = Scene(rig)
    yield scene
    scene.close()


def raw_of(packets: list[bytes]) -> list[bytes]:
    """But for the moment of sending, which is filled in."""
    return [packet[:16] + packet[24:] for packet in packets]


EXPECTED = raw_of(list(PACKETS))


def test_a_need_stops_and_tells_and_orders_while_python_sleeps(scene: Scene) -> None:
    scene.sleep()
    scene.need(41)
    wait_until(lambda: scene.table.epoch == 1, "it is told")

    assert scene.workloads[0].on() == 0
    assert scene.lost() == list(LOST)
    assert all(scene.table.entry(block)[0] == 1 for block in LOST)
    assert scene.port.wake() == 0
    sent, told_ns = scene.port.end(go=True)
    assert (sent, told_ns > 0) == (2, True)
    packets = scene.heard()
    assert raw_of(packets) == EXPECTED
    assert all(struct.unpack_from("<Q", packet, 16)[0] == told_ns for packet in packets)


def test_the_stop_is_stamped_on_the_account_of_moves_of_memory(scene: Scene) -> None:
    scene.sleep()
    scene.need(41)

    stamp = scene.rig.wait_stamp(lambda stamp: stamp.kind is StampKind.GATE and stamp.service == MEMORY_SERVICE)

    assert (stamp.gpu, stamp.channels) == (0, 2)
    assert scene.port.wake() == 0
    scene.port.end(go=False)
    scene.rig.gate.remove_service(MEMORY_SERVICE)
    scene.rig.wait_gated(0, False)
    assert scene.workloads[0].on() == 2


@pytest.mark.parametrize("wanted", [0, 40])
def test_a_need_that_is_no_larger_than_foreseen_never_begins_anything(scene: Scene, wanted: int) -> None:
    scene.sleep()
    scene.need(wanted)

    assert scene.port.wake() == -1
    assert scene.port.end(go=True)[0] == -1
    assert (scene.heard(), scene.lost(), scene.workloads[0].on()) == ([], [], 2)


def test_nothing_ever_begins_with_an_engine_that_says_it_can_lose_nothing_any_more(scene: Scene) -> None:
    scene.sleep()
    scene.can_lose(False)
    scene.need(41)

    assert scene.port.wake() == -1
    assert (scene.heard(), scene.lost(), scene.workloads[0].on()) == ([], [], 2)


def test_nothing_ever_begins_while_python_is_awake(scene: Scene) -> None:
    scene.sleep()
    assert scene.port.wake() == -1
    scene.need(50)
    scene.rig.settle()
    assert scene.port.wake() == -1
    assert (scene.heard(), scene.lost(), scene.workloads[0].on()) == ([], [], 2)

    scene.port.rest()
    assert scene.port.wake() == 0  # whoever looks first begins: here the caller


def test_nothing_is_ever_told_or_ordered_before_the_gpu_stands(scene: Scene) -> None:
    scene.rig.driver.rules.hang = 1
    scene.sleep()
    scene.need(41)
    wait_until(lambda: scene.rig.driver.counts.hanging == 1, "the stop is under way")
    assert (scene.port.wake(), scene.heard(), scene.lost()) == (0, [], [])

    scene.rig.driver.rules.hang = 0
    wait_until(lambda: scene.table.epoch == 1, "it is told")
    assert scene.workloads[0].on() == 0
    assert scene.port.end(go=False)[0] == 2


def test_what_is_taken_back_is_never_done_when_the_gpu_stands_at_last(scene: Scene) -> None:
    scene.rig.driver.rules.fail_disable = 0x65
    scene.sleep()
    scene.need(41)
    assert scene.port.wake() == 0
    assert scene.port.end(go=True)[0] == -1

    scene.rig.driver.rules.fail_disable = 0
    scene.rig.wait_gated(0)
    scene.rig.settle()

    assert (scene.heard(), scene.lost(), scene.table.epoch) == ([], [], 0)


def test_a_gpu_that_stands_already_is_not_waited_for(scene: Scene) -> None:
    scene.rig.online(7, {0})  # holds from birth
    scene.rig.wait_gated(0)
    scene.sleep()
    scene.need(41)
    wait_until(lambda: scene.table.epoch == 1, "it is told")

    assert scene.port.wake() == 0
    assert scene.port.end(go=False)[0] == 2


def test_a_gpu_that_is_let_run_though_it_is_held_never_counts_as_standing(scene: Scene) -> None:
    scene.rig.gate.let(frozenset({GPU}))
    scene.sleep()
    scene.need(41)

    assert scene.port.wake() == 0
    scene.rig.settle()
    assert scene.port.end(go=True)[0] == -1
    assert scene.lost() == []


def test_all_gpus_stand_before_anything_is_told(driver: FakeDriver) -> None:
    driver.rules.gpus = 2
    with gate_rig(driver) as rig:
        scene = Scene(rig, (0, 1))
        driver.rules.hang = 1
        scene.sleep()
        scene.need(41)
        wait_until(lambda: driver.counts.hanging == 2, "both stops are under way")
        assert scene.lost() == []
        driver.rules.hang = 0
        wait_until(lambda: scene.table.epoch == 1, "it is told")

        assert [workload.on() for workload in scene.workloads] == [0, 0]
        assert scene.port.wake() == 0
        assert scene.port.end(go=False)[0] == 2
        scene.close()


def test_packets_are_never_sent_beyond_one_that_finds_no_room(scene: Scene) -> None:
    scene.link.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            scene.link.send(b"x" * 64)
    scene.sleep()
    scene.need(41)
    wait_until(lambda: scene.table.epoch == 1, "it is told all the same")

    assert scene.port.wake() == 0
    assert scene.port.end(go=True)[0] == 0
    assert {len(packet) for packet in scene.heard()} == {64}


def test_a_link_that_its_owner_closes_is_never_anothers(scene: Scene) -> None:
    scene.rig.driver.rules.hang = 1
    scene.sleep()
    scene.need(41)
    wait_until(lambda: scene.rig.driver.counts.hanging == 1, "the stop is under way")
    number = scene.link.fileno()
    scene.link.shutdown(socket.SHUT_RDWR)
    scene.link.close()
    stranger, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert number in (stranger.fileno(), end.fileno())
    scene.rig.driver.rules.hang = 0
    wait_until(lambda: scene.table.epoch == 1, "it is told")

    assert scene.port.wake() == 0
    assert scene.port.end(go=True)[0] == 0
    for sock in stranger, end:
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(64)
    stranger.close()
    end.close()


def test_of_several_only_the_one_that_is_needed_begins(scene: Scene) -> None:
    idle = KvBook(4, 8, 8, 16)
    other = replace(scene.take, wanted=idle.word("wanted_blocks"), had=0)
    scene.port.put([other, scene.take])
    scene.port.rest()
    scene.need(41)

    assert scene.port.wake() == 1
    scene.port.end(go=False)
    del other
    scene.port.put([])
    idle.close()


def test_a_table_that_is_closed_meanwhile_is_never_written_where_it_was(scene: Scene) -> None:
    """Its memory stays until the native gate lets go of it."""
    scene.rig.driver.rules.hang = 1
    scene.sleep()
    scene.need(41)
    wait_until(lambda: scene.rig.driver.counts.hanging == 1, "the stop is under way")
    scene.table.close()
    scene.rig.driver.rules.hang = 0

    assert scene.port.wake() == 0
    wait_until(lambda: not scene.take.table[128 + 4 * LOST[0]] & 1, "it is told")
    assert scene.port.end(go=False)[0] == 2
    scene.table = KvTable(8, 16)
