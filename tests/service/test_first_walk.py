"""Walks in which what a look has prepared is sent: before each need the memory is lent, and offline work stands."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from memory_walk import WALKS, Attacked, Node

from valved.config import Config, MemoryTable, QuotaTable
from valved.kv.first import Firsts
from valved.model.ids import Remap


def config(remap, planes=1):
    memory = MemoryTable(
        handle_mib=2,
        remap=remap,
        headroom_min_mib=2,
        headroom_max_mib=8,
        tau_s=1.0,
        tau_min_s=0.2,
        order_s=0.05,
        pool_mib=48 * planes,  # else more may always be made, as far as valved knows
    )
    return Config(memory=memory, quota=QuotaTable(clients_per_uid=1000))


class Lent:
    @initialize(columns=st.integers(8, 16), has_others=st.booleans(), wanted=st.integers(40, 64))
    def lent(self, columns, has_others, wanted):
        for many in (columns, 16)[: 1 + has_others]:
            self.come("offline", many)
        self.world.run(500)
        for hook in self.hooks:
            hook.hold(0, list(range(4, 32)))
        self.come("online", 16)
        self._needs(self.hooks[-1], wanted)

    @rule(data=st.data(), wanted=st.integers(12, 64))
    def need_after_a_rest(self, data, wanted):
        """What it had goes back, and offline work has it. Then it is at work and needs more."""
        online = [hook for hook in self.hooks if not hook.shim.is_offline]
        if online:
            self._needs(data.draw(st.sampled_from(online)), wanted)

    def _needs(self, hook, wanted):
        hook.want(used=4)
        for _ in range(3):
            hook.obey_target()
            self.world.run(1500)
            for one in self.hooks:
                one.shim.step()
        self.world.gate.launch(hook.shim.client)
        self.world.clock.advance(1_000_000)
        hook.want(used=4, wanted=wanted)


class HelperWalk(Lent, Attacked):
    config = config(Remap.HELPER)


class SparseWalk(Lent, Node):
    config = config(Remap.SPARSE)


class PlanesWalk(Lent, Node):
    config = config(Remap.HELPER, planes=3)
    layers = 3


class GpusWalk(Lent, Attacked):
    """Engines of one to four GPUs, which they share in part."""

    config = config(Remap.HELPER)
    gpus = 4

    @precondition(lambda self: len(self.hooks) < 4)
    @rule(
        role=st.sampled_from(["online", "offline"]),
        columns=st.integers(2, 16),
        gpus=st.sampled_from([(0,), (1,), (0, 1), (1, 2), (0, 1, 2, 3)]),
    )
    def come(self, role, columns, gpus=(0, 1)):
        super().come(role, columns, gpus)


@pytest.mark.parametrize("walk", [HelperWalk, SparseWalk, PlanesWalk, GpusWalk])
def test_whatever_happens_while_it_is_under_way_books_and_card_never_differ(walk, monkeypatch):
    sent, send = [], Firsts.send

    def sends(firsts, seen, wanted_blocks):
        send(firsts, seen, wanted_blocks)
        sent.extend(one for one in seen.firsts if one.orders)

    monkeypatch.setattr(Firsts, "send", sends)

    run_state_machine_as_test(walk, settings=WALKS)

    assert sent, "no walk came to it"
