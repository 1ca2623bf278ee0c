"""What offline processes must leave free: told in time, never counted twice, and never given away by the pool."""

from __future__ import annotations

import copy
import errno
import random
from dataclasses import replace
from functools import partial

import pytest
from instructions import calls_of
from memory_world import KvWorld
from node_world import successor

from valved.abi.link import Feature
from valved.config import MIB, Config, MemoryTable
from valved.kv.supply import kv_uses
from valved.machine.cards import CardUse
from valved.model.ids import ProcessId, Remap, Role
from valved.policy.keeping import MemoryUse
from valved.state.kept import online_names

SIZE = 2 * MIB
SHIM = Feature.GAPS | Feature.MEMORY | Feature.KEEP


def world_of(tmp_path, handles=40, **more):
    memory = MemoryTable(handle_mib=2, remap=Remap.HELPER, headroom_min_mib=2, headroom_max_mib=8, spare_mib=8, **more)
    return KvWorld(tmp_path, config=Config(memory=memory), handles=handles)


@pytest.fixture
def world(tmp_path):
    world = world_of(tmp_path)
    yield world
    world.check()


def cards(free_mib, by_pid=(), total_mib=100):
    return {
        bytes([gpu + 1]) * 16: CardUse(
            total_bytes=total_mib * MIB,
            used_bytes=(total_mib - free_mib) * MIB,
            by_pid={pid: mib * MIB for pid, mib in by_pid} if gpu == 0 else {},
            is_mig=False,
        )
        for gpu in range(2)
    }


def remember(world, name="chat", plain_mib=0, kv_mib=0):
    """A service of that name ended a while ago."""
    use = MemoryUse(plain_bytes=plain_mib * MIB, kv_bytes=kv_mib * MIB)
    world.kv.supply.peaks.see(0, {name: use}, world.clock.now_ns())
    world.kv.supply.services_changed()


def test_an_offline_process_is_told_what_to_leave_before_it_is_welcomed(world):
    remember(world, plain_mib=30)

    shim = world.shim("offline")

    assert world.gate.kept[shim.client] == {0: 30 * MIB, 1: 0}


def test_the_end_of_a_service_never_leaves_its_memory_to_offline_work_for_a_moment(world):
    """No card has been read anew."""
    job, service = world.shim("offline"), world.shim("online")
    world.kv.service.see_cards(cards(20, [(service.entry.process.pid, 60)]))
    assert world.gate.kept[job.client] == {0: 0, 1: 0}

    service.die()
    world.run(1)

    assert world.gate.kept[job.client] == {0: 60 * MIB, 1: 0}


def test_an_online_process_is_never_told_to_leave_anything(world):
    remember(world, plain_mib=30)

    shim = world.shim("online")
    world.kv.service.see_cards(cards(50))

    assert world.gate.kept[shim.client] == {0: 0, 1: 0}


def test_kv_memory_that_can_be_had_back_is_never_kept_a_second_time(world):
    remember(world, plain_mib=10, kv_mib=24)
    job = world.shim("offline")
    assert world.gate.kept[job.client][0] == 34 * MIB

    engine = world.engine("offline", columns=16, name="lent")
    world.run(500)
    world.kv.service.see_cards(cards(50))

    assert len(engine.backed()) == 64  # 32 MiB, of which the null block's column is not to be had
    assert world.gate.kept[job.client][0] == 10 * MIB


def test_lending_never_takes_the_place_of_weights_that_come_back(world):
    remember(world, plain_mib=30)
    world.kv.service.see_cards(cards(50))

    engine = world.engine("offline", columns=16)
    world.run(500)

    assert len(engine.backed()) == 4 * (50 - 8 - 30) * MIB // SIZE


def test_weights_that_come_back_never_take_the_place_of_kv_memory_on_a_card_with_room_for_both(tmp_path):
    """`pool_mib` is of KV memory alone. What is kept must leave the card, not this limit."""
    world = world_of(tmp_path, pool_mib=40)
    remember(world, plain_mib=30)
    world.kv.service.see_cards(cards(90))

    engine = world.engine("offline", columns=16)
    world.run(500)

    assert len(engine.backed()) == 64  # 32 MiB
    world.check()


def test_free_handles_never_stay_where_weights_come_back(world):
    engine = world.engine("offline", columns=16)
    world.run(500)
    engine.shim.die()
    world.run(100)
    remember(world, plain_mib=30)

    world.kv.service.see_cards(cards(30))

    assert world.kv.books.pool.free_handles(0) == 16 - 8 * MIB // SIZE


def test_an_old_look_at_a_card_never_makes_other_memory_of_kv_memory(world):
    """A service gives its cache up and another one ends, before the card is read anew."""
    job, service, other = world.shim("offline"), world.engine("online", columns=16, name="chat"), world.shim("online")
    service.want(used=48)
    world.run(500)
    kv = 2 * len(service.shim.ranges[0])
    world.kv.service.see_cards(cards(20, [(service.shim.entry.process.pid, 30 + kv)]))

    service.shim.free_range(0)
    world.run(1)
    other.die()
    world.run(1)
    service.shim.die()
    world.run(1)
    world.kv.service.see_cards(cards(50))

    assert world.kv.books.pool.free_handles(0) * SIZE == kv * MIB
    assert world.gate.kept[job.client][0] == 30 * MIB


def plain_peak(world, name="chat"):
    return world.kv.supply.peaks.of(0, world.clock.now_ns())[name].plain_bytes // MIB


def test_kv_memory_that_comes_while_the_card_is_read_is_never_remembered_as_other_memory(world):
    """The process has it, and valved has not heard so yet. For an hour offline jobs would leave it free once more."""
    service = world.engine("online", columns=16, name="chat")
    for _ in range(50):
        world.run(200)
        service.obey_target()
    had = 2 * len(service.shim.ranges[0])
    service.shim.answers = False
    service.want(used=48)
    world.run(20)
    assert world.kv.books.orders.under_way(service.shim.client)

    world.kv.service.see_cards(cards(20, [(service.shim.entry.process.pid, 30 + 24)]))

    assert had < 24
    assert plain_peak(world) <= 30
    service.shim.catch_up()
    world.run(500)
    world.kv.service.see_cards(cards(20, [(service.shim.entry.process.pid, 30 + 2 * len(service.shim.ranges[0]))]))
    assert plain_peak(world) == 30


def test_kv_memory_that_goes_while_the_card_is_read_is_never_remembered_as_other_memory(world):
    service = world.engine("online", columns=16, name="chat")
    service.want(used=48)
    world.run(500)
    kv = 2 * len(service.shim.ranges[0])
    read = cards(20, [(service.shim.entry.process.pid, 30 + kv)])
    world.kv.service.see_cards(read)
    service.want(used=0)
    for _ in range(100):
        world.run(200)
        service.obey_target()
    assert 2 * len(service.shim.ranges[0]) < kv

    world.kv.service.see_cards(read)

    assert plain_peak(world) == 30


def test_a_card_that_is_read_while_handles_are_made_never_has_room_for_them_once_more(world):
    began_ns = world.clock.now_ns()
    engine = world.engine("online", columns=16)
    engine.want(used=64)
    world.run(500)
    assert len(engine.backed()) == 64

    world.kv.service.see_cards({uuid: replace(card, read_ns=began_ns) for uuid, card in cards(8 + 40).items()})

    assert world.kv.supply.affordable(0) == 40 // 2 - 16


def test_a_service_always_gets_what_is_kept_for_it_as_kv_memory(tmp_path):
    world = world_of(tmp_path, online_mib=40)
    world.kv.service.see_cards(cards(50))

    engine = world.engine("online", columns=16)
    engine.want(used=64)
    world.run(500)

    assert len(engine.backed()) == 64
    world.check()


def test_a_cache_that_cannot_be_taken_back_never_gets_what_is_kept(world):
    remember(world, kv_mib=30)
    world.kv.service.see_cards(cards(50))
    job = world.shim("offline")
    job.has_stepped = False

    too_much = job.reserve(1, 8, elastic=False)
    enough = job.reserve(2, 5, elastic=False)
    world.run(500)

    assert (job.acked(too_much), job.acked(enough)) == (errno.ENOMEM, 0)


def test_a_cache_that_cannot_be_taken_back_never_gets_free_handles_that_are_kept(world):
    """The card is full: what a service had as KV memory is free in the pool, and nowhere else."""
    job, service = world.shim("offline"), world.engine("online", columns=16, name="chat")
    job.has_stepped = False
    service.want(used=60)
    world.run(500)
    kv = len(service.shim.ranges[0])
    world.kv.service.see_cards(cards(8, [(service.shim.entry.process.pid, 2 * kv)]))
    service.shim.die()
    world.run(100)
    world.kv.service.see_cards(cards(8))
    assert world.kv.books.pool.free_handles(0) == kv

    too_much = job.reserve(1, 8, elastic=False)
    world.run(500)

    assert job.acked(too_much) == errno.ENOMEM


def test_a_restart_never_forgets_what_a_service_had(world, tmp_path):
    service = world.shim("online")
    world.kv.service.see_cards(cards(20, [(service.entry.process.pid, 60)]))
    service.die()
    world.run(1)
    saved = world.kv.report.saved()
    (tmp_path / "next").mkdir()
    heir = world_of(tmp_path / "next")
    heir.run(1000)

    heir.kv.report.restore(saved)

    assert heir.kv.supply.kept_bytes(0) == 60 * MIB


def test_a_restart_never_keeps_a_second_time_what_a_service_still_has(world):
    """No card has been read anew, and an allocation that is refused now ends the job."""
    service, other = world.shim("online", name="chat"), world.shim("online", name="gone")
    pids = [one.entry.process.pid for one in (service, other)]
    world.kv.service.see_cards(cards(5, [(pids[0], 60), (pids[1], 20)]))
    other.die()
    world.run(1)
    second = successor(world)

    second.processes.add(7000)
    job = second.offline(pid=7000)

    assert second.gate.kept[job] == {0: 20 * MIB, 1: 0}


@pytest.mark.parametrize("is_back", [False, True])
def test_a_look_before_a_service_has_told_its_ranges_never_makes_other_memory_of_them(world, is_back):
    service = world.engine("online", columns=16, name="chat")
    service.want(used=48)
    world.run(500)
    kv, pid = 2 * len(service.shim.ranges[0]), service.shim.entry.process.pid
    had = MemoryUse(plain_bytes=30 * MIB, kv_bytes=kv * MIB)
    world.kv.service.see_cards(cards(20, [(pid, 30 + kv)]))
    assert world.kv.supply.peaks.of(0, world.clock.now_ns()) == {"chat": had}
    second = successor(world)
    if is_back:
        second.hello(pid, Role.ONLINE, features=SHIM)

    second.kv.service.see_cards(cards(20, [(pid, 30 + kv)]))

    assert second.kv.supply.peaks.of(0, second.clock.now_ns()) == {"chat": had}
    assert second.kv.supply.kept_bytes(0) == 0


def test_what_a_service_needs_is_never_kept_for_ever(world):
    service = world.shim("online")
    world.kv.service.see_cards(cards(20, [(service.entry.process.pid, 60)]))
    service.die()

    world.run(3_601_000)
    world.kv.service.see_cards(cards(80))

    assert world.kv.supply.kept_bytes(0) == 0


def test_a_job_with_an_older_shim_is_never_passed_over_in_silence(world):
    world.processes.add(300)
    world.processes.add(301)
    old = world.hello(300, Role.OFFLINE, features=Feature.GAPS | Feature.MEMORY).client
    new = world.hello(301, Role.OFFLINE, features=SHIM).client

    notes = {client.id: client.notes for client in world.node.status().clients}

    assert ["older" in note for note in notes[old]] == [True]
    assert not notes[new]


def test_what_was_reclaimed_before_a_reboot_never_counts_after_it(world):
    """The clock of this boot began anew: such a reclaim would stay in the last hour until the clock has come as far."""
    remember(world, plain_mib=30)
    world.kv.reserve.budget.note([0], world.clock.now_ns())

    same, other = (successor(world, boot=boot, config=world.config) for boot in ("boot", "another"))

    for second, is_same in ((same, True), (other, False)):
        assert bool(second.kv.reserve.budget.saved()) is is_same
        assert bool(second.kv.supply.peaks.saved()) is is_same


def calls_of_a_look(tmp_path, services):
    """At cards that say what they said before."""
    world = world_of(tmp_path)
    shims = [world.shim("online", name=f"chat{n}") for n in range(services)]
    read = cards(20, [(shim.entry.process.pid, 1) for shim in shims], total_mib=1000)
    for _ in range(2):
        world.kv.service.see_cards(read)
    calls = calls_of(partial(world.kv.service.see_cards, read), ("call", "c_call"))
    world.check()
    return calls


def test_a_look_at_cards_that_say_the_same_never_costs_more_calls_for_more_services(tmp_path):
    for folder in ("few", "many"):
        (tmp_path / folder).mkdir()

    assert calls_of_a_look(tmp_path / "few", 2) == calls_of_a_look(tmp_path / "many", 20)


def computed_anew(world, read):
    """What a look at these cards finds if it remembers nothing of how it came to the last answer."""
    supply, now_ns = world.kv.supply, world.clock.now_ns()
    kept = copy.deepcopy(supply._kept)
    names = online_names(world.books, supply._away())
    uses = kv_uses(world.kv.books, names.of_client)
    for gpu, uuid in supply._uuids.items():
        kept._gpus[gpu].went_by = None
        kept.look(gpu, names, read[uuid].by_pid, uses.get(gpu, {}), now_ns, is_read=True)
    return [(kept.of(gpu), kept.peaks.of(gpu, now_ns)) for gpu in supply._uuids]


@pytest.mark.parametrize("seed", range(8))
def test_a_look_that_computes_nothing_never_misses_a_change(tmp_path, seed):
    """Whatever changes: services, their memory and its orders, cards, processes that come back, the time."""
    draw, world = random.Random(seed), world_of(tmp_path, handles=60, remember_s=3.0)
    engines, shims, read = [], [], cards(90)
    for _ in range(40):
        match draw.choice(["same", "same", "same", "card", "time", "come", "grow", "die", "engine", "mute", "away"]):
            case "card":
                pids = [one.entry.process.pid for one in world.shims if one.is_alive]
                read = cards(draw.choice([20, 60]), [(pid, draw.choice([0, 10, 30])) for pid in pids], total_mib=200)
            case "time":
                world.run(draw.choice([1, 1000, 3100]))
            case "come":
                shims.append(world.shim(draw.choice(["online", "offline"]), name=draw.choice(["chat", "code"])))
            case "engine" if len(engines) < 3:
                engines += filter(None, [world.engine(draw.choice(["online", "offline"]), columns=4, name="chat")])
            case "grow" if engines:
                engine = draw.choice(engines)
                engine.want(used=draw.randrange(16))
                world.run(draw.choice([0, 1, 300]))
            case "mute" if engines:
                shim = draw.choice(engines).shim
                shim.answers = not shim.answers
            case "die" if shims:
                shims.pop(draw.randrange(len(shims))).die()
                world.run(draw.choice([0, 1]))
            case "away" if world.gating.online:
                online = draw.choice(list(world.gating.online.values()))
                online.away ^= {ProcessId(pid=5000, start_time=50_000)}
                online.back_ns = world.clock.now_ns()
        anew = computed_anew(world, read)
        world.kv.service.see_cards(read)

        now_ns, supply = world.clock.now_ns(), world.kv.supply
        assert anew == [(supply._kept.of(gpu), supply.peaks.of(gpu, now_ns)) for gpu in supply._uuids]
