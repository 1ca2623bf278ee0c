"""After a restart: whose proofs take long keeps what it had; whose proofs never come does not."""

from __future__ import annotations

import pytest
from fake_gate import FakeGate
from node_world import World

from valved.model.ids import Role
from valved.state import saved as state


@pytest.fixture
def first(tmp_path):
    return World(tmp_path)


def successor(first):
    """A new valved on the same machine."""
    first.handover.save()
    second = World(first.folder, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)
    saved, problem = state.load(first.folder / "state.json")
    assert not problem
    second.handover.restore(saved, come_back_s=2.0)
    return second


@pytest.mark.parametrize("slow_ms", [1500, 30_000])
def test_a_service_never_loses_gpus_while_the_proofs_of_its_channels_are_under_way(first, slow_ms):
    """A driver that answers slowly is no word that the process left the GPU."""
    online = first.online(pid=200, gpus=(0, 1))
    service = first.service_of(online)
    first.offline(pid=300, gpus=(0, 1))
    second = successor(first)
    second.prover.is_slow = True
    client = second.hello(200, wanted=Role.ONLINE).client
    for gpu in (0, 1):
        second.add_channel(client, gpu=gpu, h_client=0xC1D00000 + client)
    for _ in range(slow_ms // 500):
        second.run(500)
        second.handover.settle(patience_over=True)
        assert second.gating.online[service].gpus == {0, 1}
    second.prover.answer()  # the first; the second is asked only now
    for _ in range(slow_ms // 500):
        second.run(500)
        second.handover.settle(patience_over=True)
        assert second.gating.online[service].gpus == {0, 1}

    second.prover.answer()
    second.run(2000)
    second.handover.settle(patience_over=True)

    assert not second.books.services[service].kept_gpus
    assert second.gating.online[service].gpus == {0, 1}
    second.check()


def test_who_offers_nothing_or_a_file_that_is_no_proof_never_keeps_gpus_for_ever(first):
    online = first.online(pid=200, gpus=(0,))
    service = first.service_of(online)
    second = successor(first)
    client = second.hello(200, wanted=Role.ONLINE).client
    second.prover.foreign.add(0xC1D00000 + client)
    second.add_channel(client, gpu=0, h_client=0xC1D00000 + client)  # it waits for a proof, and for ever
    second.add_channel(client, proven=False, gpu=1, h_client=0xC1D0FFFF)
    second.run(5000)

    second.handover.settle(patience_over=True)

    assert second.gating.online[service].gpus == frozenset()
