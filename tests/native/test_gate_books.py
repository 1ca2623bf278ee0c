"""After a thousand comings and goings: no fd, no thread, no memory file and no hold is left over."""

from __future__ import annotations

import errno
import os
import threading
from operator import le
from pathlib import Path

import pytest
from gates import FakeDriver, Rig, gate_rig, wait_until

from valved.abi import region
from valved.machine.ports import WakeOutcome
from valved.machine.stamps import StampKind
from valved.model.ids import ClientId, Role, ServiceId


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def held() -> tuple[int, int, int]:
    """Descriptors, threads of the kernel, threads of Python."""
    return open_fds(), len(os.listdir("/proc/self/task")), threading.active_count()


def wait_at_most(before: tuple[int, int, int]) -> None:
    """A thread closes what a client had, and is in the list a moment longer than whoever joins it waits. What an
    earlier test left may go meanwhile."""
    wait_until(lambda: all(map(le, held(), before)), "no more is held than before")


def test_a_thousand_clients_come_and_go(rig: Rig) -> None:
    workload = rig.offline()
    workload.add(4)
    rig.online(7, {0})
    before = held()

    for number in range(1000):
        client = rig.name()
        role = Role.ONLINE if number % 2 else Role.OFFLINE
        rig.gate.create_client(client, role, ServiceId(7))
        rig.gate.remove_client(client)

    wait_at_most(before)
    assert rig.gate.wake(ServiceId(7)) is WakeOutcome.WOKEN


def test_a_thousand_services_come_and_go(rig: Rig) -> None:
    workload = rig.offline()
    workload.add()
    for number in range(1000):
        service, client = ServiceId(100 + number), rig.name()
        rig.gate.create_client(client, Role.ONLINE, service)
        rig.gate.put_service(service, frozenset({workload.gpu}))
        rig.gate.remove_client(client)
        rig.gate.remove_service(service)
    rig.wait_gated(0, False)

    assert workload.on() == 1


def test_opening_and_closing_the_gate_leaves_nothing(fake_library: Path) -> None:
    driver = FakeDriver(fake_library)
    with gate_rig(driver):
        pass  # what is loaded once is loaded now
    before = held()

    for _ in range(20):
        with gate_rig(driver) as rig:
            rig.offline().add(3)
            rig.online(7, {0, 1})

    wait_at_most(before)


def test_every_edge_is_stamped_and_the_counts_balance(rig: Rig) -> None:
    workload, online = rig.offline(), rig.online(7, {0})
    workload.add()
    edges = 300
    for _ in range(edges):
        assert rig.gate.wake(ServiceId(7)) is WakeOutcome.WOKEN
        closed = online.control["gate_epoch"] + 1
        online.launch()
        rig.wait_stamp(lambda stamp, closed=closed: stamp.client == online.client and stamp.epoch == closed)
        rig.stamps = [stamp for stamp in rig.stamps if stamp.kind is StampKind.WAKE]
        online.finish()

    assert len(rig.stamps) == edges
    assert rig.gate.view(online.client).submitted == edges


def test_gaps_are_told_once_and_the_newest_when_many(rig: Rig) -> None:
    online = rig.online(7, {0})
    for number in range(100):
        at = region.GAP_OFFSET + number % region.GAPS * 16
        online.region.memory[at : at + 16] = (1000 + number).to_bytes(8, "little") + number.to_bytes(8, "little")
    online.region["gaps"] = 100

    assert rig.gate.view(online.client).gaps == ()  # who does not ask takes none
    gaps = rig.gate.view(online.client, with_gaps=True).gaps

    assert [gap.gap_ns for gap in gaps] == list(range(36, 100))
    assert rig.gate.view(online.client, with_gaps=True).gaps == ()


def test_a_client_that_cannot_be_made_never_leaves_a_descriptor_open(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is refused for want of descriptors asks again, and must not eat those that are left."""
    before = held()
    real = os.eventfd
    for good in (0, 1):
        left = [good]

        def eventfd(*arguments: int, left: list[int] = left) -> int:
            if not left[0]:
                raise OSError(errno.EMFILE, "Too many open files")
            left[0] -= 1
            return real(*arguments)

        monkeypatch.setattr(os, "eventfd", eventfd)
        with pytest.raises(OSError, match="Too many"):
            rig.gate.create_client(ClientId(900 + good), Role.OFFLINE, ServiceId(0))

    wait_at_most(before)


def test_no_stamp_that_a_full_ring_did_not_take_goes_uncounted(rig: Rig) -> None:
    rig.online(7, {0})
    rig.take_stamps()
    rig.stamps.clear()
    made = 0
    for _ in range(5000):
        made += rig.gate.wake(ServiceId(7)) is WakeOutcome.WOKEN
        rig.gate.hold(ServiceId(7), 0)
    rig.take_stamps()
    kept = [stamp for stamp in rig.stamps if stamp.kind is StampKind.WAKE]

    assert made == 5000 > len(kept)
    assert rig.gate.stamps_lost() >= made - len(kept)
