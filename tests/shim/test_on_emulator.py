"""The shim on the emulated GPU: the channels that a driver really hands out, and kernels that really stop."""

from __future__ import annotations

import pytest
from card_process import process_on
from fake_daemon import CHANNEL_ADD, OFFLINE, ONLINE, RM_CLIENT, FakeDaemon, until
from valve_tools.emulator.node import Options, node


@pytest.fixture
def emulated(tmp_path):
    with node(Options(gpus=1)) as emulator:
        daemons = []

        def begin(role):
            daemons.append(FakeDaemon(tmp_path, role))
            return emulator, daemons[-1]

        yield begin
        for daemon in daemons:
            daemon.discard()


def test_every_channel_of_a_context_is_learned(emulated):
    emulator, daemon = emulated(ONLINE)

    with process_on(emulator, daemon, "online") as child:
        client = daemon.client()
        real = {channel.h_channel: channel for channel in emulator.state().of(child.pid)}
        told = [client.expect(CHANNEL_ADD) for _ in real]

        assert {message.h_channel for message in told} == set(real)
        assert all(bool(message.compute) == real[message.h_channel].is_compute for message in told)
        assert all(any(message.gpu_uuid) for message in told)


def test_a_context_on_the_emulated_gpu_is_proven_idle(emulated):
    emulator, daemon = emulated(ONLINE)

    with process_on(emulator, daemon, "online"):
        client = daemon.client()
        client.control.watch = 1

        until(lambda: client.region.idle_ns and not client.region.busy, "proven idle")


def test_an_order_stops_exactly_the_compute_channels_and_starts_them_again(emulated):
    emulator, daemon = emulated(OFFLINE)

    with process_on(emulator, daemon, "offline") as child:
        client = daemon.client()
        client.expect(RM_CLIENT)
        compute = {channel.h_channel for channel in emulator.state().of(child.pid) if channel.is_compute}

        seq = client.give_order(1)
        until(lambda: client.region.order_done == seq, "answered")
        assert client.region.order_status == 0
        assert {channel.h_channel for channel in emulator.state().disabled} == compute
        seq = client.give_order(0)
        until(lambda: client.region.order_done == seq, "answered")

        assert emulator.state().disabled == ()
