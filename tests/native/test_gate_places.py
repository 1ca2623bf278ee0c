"""Places of the native gate: taken by who needs one, given back by everybody."""

from __future__ import annotations

import os

import pytest
from fake_daemon import until
from gates import FakeDriver, Rig, gate_rig

from valved.abi import region
from valved.model.ids import ChannelRef, GpuIndex, Reach, Role, ServiceId


def test_three_thousand_engines_never_leave_the_gate_without_a_place(rig: Rig) -> None:
    """A hook of an offline service takes no place of a service; a service that ends gives its back."""
    for number in range(3000):
        service = ServiceId(100 + number)
        hook = rig.name()
        fds = rig.gate.create_client(hook, Role.HOOK, service)
        assert fds.control >= 0
        rig.gate.remove_client(hook)
        rig.gate.remove_service(service)

    rig.online(7, {0}).launch()


def test_a_new_valved_never_counts_through_the_epochs_of_the_one_before(driver: FakeDriver) -> None:
    """A thread that read an epoch of the old one, and says only now that it rang it, would swallow a ring."""
    epochs = set()
    for _ in range(4):
        with gate_rig(driver) as rig:
            epochs.add(rig.online(7, {0}).control["gate_epoch"])

    assert len(epochs) == 4
    assert not any(epoch % 2 for epoch in epochs)


def test_a_client_whose_pages_cannot_be_sealed_leaves_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(22, "F_SEAL_FUTURE_WRITE: Linux before 5.1")

    monkeypatch.setattr(region, "seal_control", refuse)
    before = len(os.listdir("/proc/self/fd"))

    for _ in range(20):
        with pytest.raises(OSError, match="F_SEAL"):
            rig.gate.create_client(rig.name(), Role.OFFLINE, ServiceId(0))

    # its doorbell and its eventfd for orders are closed by a thread of the native gate
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, "its descriptors are closed")


def test_what_is_given_up_is_on_and_stays_on(rig: Rig, driver: FakeDriver) -> None:
    job, other = rig.offline(), rig.offline()
    job.add(3)
    other.add(2)
    launcher = rig.online(7, {0})
    rig.wait_gated(0)
    assert (job.on(), other.on()) == (0, 0)

    rig.gate.channels.give_up(job.client, "MPS")
    rig.settle()

    assert (job.on(), other.on()) == (3, 0)
    assert rig.gate.channels.add_channel(job.client, job.allocate()).reach is Reach.NONE
    assert rig.gate.channels.reach(GpuIndex(0))[0] is Reach.NONE
    rig.gate.remove_client(job.client)
    launcher.launch()


def test_a_channel_told_of_twice_is_verified_once(rig: Rig, driver: FakeDriver) -> None:
    job = rig.offline()
    job.add(1)
    ref: ChannelRef = job.channels[0]
    job.free(ref)

    assert rig.gate.channels.add_channel(
        job.client, ref
    ).is_known  # not asked again: it is the same, as far as anybody says
    assert not rig.gate.channels.add_channel(job.client, ChannelRef(**{**fields(ref), "cid": ref.cid + 1})).is_known


def fields(ref: ChannelRef) -> dict[str, int]:
    return {name: getattr(ref, name) for name in ref.__slots__}
