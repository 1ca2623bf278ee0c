"""What a shim carries out in part, and what valved cannot open for a moment, is tried again: nothing stays half."""

from __future__ import annotations

import errno

from memory_world import kv_world

from valved.config import Config, MemoryTable
from valved.model.events import EventKind
from valved.model.ids import Remap, Role

MEMORY = MemoryTable(
    handle_mib=2, remap=Remap.SPARSE, headroom_min_mib=1, headroom_max_mib=1, tau_s=1.0, tau_min_s=0.2, keep_s=0.2
)
world = kv_world(Config(memory=MEMORY), handles=80)


def test_an_offer_that_is_refused_half_way_never_leaves_a_column_in_part(world):
    online = world.engine("online", columns=10, layers=4)
    world.run(500)
    online.want(used=4, wanted=32)
    world.run(500)
    online.want(used=4)
    online.shim.fails.append((2, errno.EIO))
    [engine] = world.kv.books.engines_with(Role.ONLINE)
    for _ in range(100):
        world.run(50)
        online.obey_target()
        if not online.shim.fails:
            break
    assert not online.shim.fails
    world.run(20)

    assert not engine.partial_columns().tolist()
    assert world.events(EventKind.RETURNED)[-1].detail["handles"] % 4 == 0


def test_a_shim_that_refuses_for_good_is_never_asked_without_end(world):
    online = world.engine("online", columns=10, layers=4)
    world.run(500)
    online.want(used=4, wanted=32)
    world.run(500)
    online.want(used=4)
    online.shim.fails.extend([(0, errno.EIO)] * 100)
    for _ in range(20):
        world.run(50)
        online.obey_target()

    assert 100 - len(online.shim.fails) <= 20 * 3


def test_a_process_whose_descriptor_valved_has_no_room_for_now_is_never_given_up(world, monkeypatch):
    open_, tries = world.outside.open, []

    def scarce(fd, uuid):
        tries.append(fd)
        if len(tries) <= 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return open_(fd, uuid)

    monkeypatch.setattr(world.outside, "open", scarce)
    offline = world.engine("offline", columns=10)
    world.run(500)
    assert not any(trial.rung == "sparse" for trial in world.kv.outside.trials())
    world.run(30_000)

    assert len(tries) == 3
    assert world.kv.outside.best(offline.shim.client, 0) is Remap.SPARSE


def test_a_descriptor_that_waits_for_room_never_outlives_its_process(world, monkeypatch):
    def scarce(fd, uuid):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(world.outside, "open", scarce)
    offline = world.engine("offline", columns=10)
    world.run(500)
    offline.shim.die()
    world.run(30_000)

    assert not world.kv.outside.trials()
