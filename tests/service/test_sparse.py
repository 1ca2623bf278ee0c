"""Memory taken from outside its process, on virtual time: tried first, told first, and right whoever fails or dies."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from lent_fds import lend
from memory_walk import MOMENTS_US, WALKS, Attacked, Node, under_pressure
from memory_world import BASE, MIB, Hook, KvWorld, Shim, kv_world
from msgspec.structs import replace
from scarce import left

from valved.abi.kv_link import KvHow, KvOp, KvScratch, KvSpan
from valved.abi.link import LinkType, Malformed
from valved.config import Config, MemoryTable, QuotaTable
from valved.kv.outside import UNHEARD
from valved.kv.slots import KvRangeBook, RangeKey, RangeSlots
from valved.model.events import EventKind
from valved.model.ids import Mode, Reach, Remap
from valved.model.memory import KvTensor
from valved.state.registry import BRAKE_SERVICE

MEMORY = MemoryTable(
    handle_mib=2, remap=Remap.SPARSE, headroom_min_mib=2, headroom_max_mib=8, tau_s=1.0, tau_min_s=0.2, order_s=0.05
)
CONFIG = Config(memory=MEMORY, quota=QuotaTable(clients_per_uid=1000))
world = kv_world(CONFIG)


def reclaims(world):
    return [event for event in world.events(EventKind.RECLAIMED) if event.detail["freed"]]


def demotions(world):
    return [event.reason for event in world.events(EventKind.REMAP_UNSAFE)]


def state_of(world, hook):
    return next(one.state for one in world.node.status().memory.engines if one.service == hook.shim.entry.service)


def test_what_is_missing_is_taken_without_the_processes_help(world):
    offline, online = under_pressure(world)
    offline.shim.answers = False  # as it would with its thread stuck, or not scheduled
    world.run(100)

    assert len(online.backed()) >= 40
    assert {event.detail["how"] for event in reclaims(world)} == {"sparse"}
    assert not world.gate.off
    assert world.node.status().memory.remap == "sparse"
    offline.shim.catch_up()
    world.run(100)


def test_a_process_whose_door_cannot_be_opened_now_is_asked_between_its_steps(world):
    """Its descriptor goes back to whoever received it, and the server closes that."""

    def cannot_open(fd, uuid):
        raise OSError(errno.EAGAIN, "no thread")

    world.outside.open = cannot_open
    shim = world.shim("offline", gpus=(0,))
    body = KvScratch(gpu_uuid=bytes([1]) * 16, device_instance=0, place=0, base=BASE, bytes=2 * MIB)
    fds = [lend()]
    world.outside.memory[fds[0]] = None
    world.register.handle(shim.client, world.packet(LinkType.KV_SCRATCH, body), fds)

    assert len(fds) == 1
    assert not world.node.status().memory.trials


def test_an_engine_that_there_is_no_descriptor_for_is_answered_and_keeps_what_it_had(world):
    hook = world.engine("offline", columns=4)
    before = world.kv.books.engines[hook.shim.entry.service]
    with left(1):
        assert hook.attach() == errno.EMFILE

    assert world.kv.books.engines[hook.shim.entry.service] is before


def test_neighbours_are_taken_in_one_call():
    book = KvRangeBook(
        key=RangeKey(1, 1), gpu=0, base=BASE, handle_bytes=2 * MIB, is_elastic=True, at=np.zeros(9, np.int64)
    )

    runs = RangeSlots.of_range(book, np.array([8, 1, 2, 0, 5])).spans()

    assert runs == [(BASE, 6 * MIB), (BASE + 10 * MIB, 2 * MIB), (BASE + 16 * MIB, 2 * MIB)]


def test_memory_comes_back_between_two_steps(world):
    offline, online = under_pressure(world)
    offline.shim.steps = False
    world.run(100)
    online.shim.die()
    world.run(1000)
    assert {body.how for body, _ in offline.shim.at_step} == {KvHow.AT_STEP}
    while offline.shim.at_step:
        offline.shim.step()
        world.run(100)

    assert len(offline.backed()) == 64


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (lambda world: world.outside.fails.append(0x1F), "refused: an argument is invalid (RM status 0x1f)"),
        (lambda world: world.outside.fails.append(-errno.ENOTTY), "refused: Inappropriate ioctl for device"),
        (lambda world: setattr(world.outside, "is_real", False), "did not read as zero"),
        (lambda world: setattr(world.outside, "hangs", True), "took longer than 0.05 s"),
    ],
    ids=["refused", "no such call", "does nothing", "hangs"],
)
def test_who_fails_the_trial_is_asked_between_its_steps_and_holds_nothing_for_it(world, fail, words):
    fail(world)
    offline, online = under_pressure(world)
    world.outside.go_on()
    world.run(200)

    memory = world.node.status().memory
    assert words in demotions(world)[0]
    assert words in state_of(world, offline)
    assert state_of(world, offline).startswith("cooperative: ")
    assert (memory.demotions, memory.trials_passed, memory.trials_failed) == (1, 0, 1)
    assert [(one.rung, words in one.reason) for one in memory.trials] == [("cooperative", True)]
    assert {event.detail["how"] for event in reclaims(world)} == {"cooperative"}
    assert len(online.backed()) >= 40
    assert not world.outside.open_fds


@pytest.mark.parametrize(
    ("status", "outcome", "words"),
    [
        (errno.EBADMSG, "wrong bytes", "the trial failed: the bytes were not the same when mapped again"),
        (errno.EFAULT, "wrong bytes", "the trial failed: memory beside the taken memory changed"),
        (errno.EIO, "refused", "the trial ended with error 5"),
    ],
)
def test_what_the_process_finds_in_its_trial_counts(world, status, outcome, words):
    shim = world.shim("offline")
    shim.trials[KvHow.OUTSIDE] = status
    shim.offer_scratch(0)
    world.run(100)

    [trial] = world.node.status().memory.trials
    assert (trial.rung, trial.outcome, trial.reason) == ("cooperative", outcome, words)
    assert trial.pid == shim.entry.process.pid
    assert not world.outside.open_fds
    shim.die()


def test_a_process_that_never_answers_its_trial_never_keeps_its_memory_untaken(world):
    shim = world.shim("offline")
    shim.answers = False
    shim.offer_scratch(0)
    world.run(20_000)
    assert [trial.outcome for trial in world.node.status().memory.trials] == ["not tried yet"]
    world.run(20_000)

    [trial] = world.node.status().memory.trials
    assert (trial.rung, trial.outcome) == ("cooperative", "hung")
    assert not world.outside.open_fds
    shim.die()


def test_a_trial_that_waits_for_a_busy_service_is_no_trial_that_hangs(world):
    shim = world.shim("offline")
    shim.answers = False
    shim.offer_scratch(0)
    world.run(100)
    world.gating.set_standing(BRAKE_SERVICE, frozenset({0}))
    world.run(120_000)
    assert [trial.outcome for trial in world.node.status().memory.trials] == ["not tried yet"]

    world.gating.set_standing(BRAKE_SERVICE, frozenset())
    shim.catch_up()
    world.run(1000)

    assert [trial.outcome for trial in world.node.status().memory.trials] == ["passed"]
    shim.die()


def test_auto_takes_memory_from_outside_after_the_trial_and_helper_is_never_chosen_for_anybody(tmp_path):
    auto = KvWorld(tmp_path, config=Config(memory=replace(MEMORY, remap=Remap.AUTO)), handles=20)
    auto.is_new = True
    _, online = under_pressure(auto)
    auto.run(100)

    assert {event.detail["how"] for event in reclaims(auto)} == {"sparse"}
    assert len(online.backed()) >= 40
    assert (auto.node.status().memory.remap, auto.node.status().memory.trials_passed) == ("auto", 1)
    auto.check()


def test_a_shim_that_passes_nothing_is_asked_between_its_steps(world, monkeypatch):
    monkeypatch.setattr(Shim, "offer_scratch", lambda shim, gpu: None)

    offline = world.engine("offline", columns=16)
    world.run(500)

    assert state_of(world, offline) == "cooperative: the process's shim passed no uvm descriptor"


def test_where_kernels_are_not_really_stopped_nothing_is_taken_from_outside(world, monkeypatch):
    offline = world.engine("offline", columns=16)
    world.run(500)
    engine = world.kv.books.engines[offline.shim.entry.service]
    before = world.kv.ways.way_of([engine])

    monkeypatch.setattr(world.gate, "reach", lambda gpu: (Reach.LAUNCH_GATE, ""))

    assert (before, world.kv.ways.way_of([engine])) == (Remap.SPARSE, Remap.COOPERATIVE)


def test_a_trial_waits_until_gpus_may_be_stopped(world):
    shim = world.shim("offline")
    world.brake.set_mode(Mode.OBSERVE, "test")
    shim.offer_scratch(0)
    world.run(2000)
    assert world.kv.outside.best(shim.client, 0) is Remap.COOPERATIVE

    world.brake.set_mode(Mode.HARVEST, "test")
    world.run(6000)

    assert world.kv.outside.best(shim.client, 0) is Remap.SPARSE
    shim.die()


def test_a_call_that_hangs_gives_up_the_gate_and_holds_the_launches(world):
    offline, online = under_pressure(world)
    world.outside.hangs = True
    world.run(70)

    assert not world.gate.off
    assert offline.shim.client in world.gate.launches_held
    assert len(np.setdiff1d(np.arange(64), offline.backed()))
    assert demotions(world) == ["a mapping order took longer than 0.05 s"]
    world.outside.go_on()
    world.run(2000)

    assert offline.shim.client not in world.gate.launches_held
    assert len(online.backed()) > 16  # the late memory arrived after all


def test_a_call_that_hangs_and_then_fails_ends_between_two_steps(world):
    offline, _ = under_pressure(world)
    offline.shim.steps = False
    world.outside.hangs = True
    world.run(70)
    world.outside.fails.append(0x1F)
    world.outside.go_on()
    world.run(100)
    lost = 64 - len(offline.backed())
    assert lost
    assert offline.shim.client not in world.gate.launches_held  # or it would never come to its step
    offline.shim.step()
    world.run(100)

    assert world.kv.books.orders.is_idle or offline.shim.at_step
    for _ in range(10):
        offline.shim.step()
        world.run(500)


@pytest.mark.parametrize("status", [0x1F, 0x65, -errno.EBADF])
def test_a_refusal_at_work_is_made_good_between_two_steps(world, status):
    offline, online = under_pressure(world)
    world.outside.fails.append(status)
    world.run(100)

    assert not world.gate.off
    assert demotions(world)
    assert state_of(world, offline).startswith("cooperative: the driver refused")
    world.run(5000)
    assert len(online.backed()) >= 40


@pytest.mark.parametrize("moment_us", MOMENTS_US)
@pytest.mark.parametrize("victim", ["offline", "online", "hook"])
def test_whoever_dies_at_any_moment(world, victim, moment_us):
    offline, online = under_pressure(world)
    world.clock.advance(moment_us * 1000)

    if victim == "hook":
        world.register.leave(offline.client, "link closed")
    else:
        {"offline": offline, "online": online}[victim].shim.die()
    world.run(3000)

    assert not world.gate.off
    if victim == "offline":
        assert len(online.backed()) >= 40
        assert len(world.outside.open_fds) == 0
    if victim == "online":
        assert len(offline.backed()) == 64


@pytest.mark.parametrize("moment_us", MOMENTS_US)
def test_a_link_that_breaks_at_any_moment_keeps_what_was_not_taken(world, moment_us):
    offline, online = under_pressure(world)
    world.clock.advance(moment_us * 1000)
    shim, pid = offline.shim, offline.shim.entry.process.pid
    shim.hang_up()
    world.run(2000)

    shim.retell(world.offline(pid=pid, gpus=(0,)))
    world.run(1000)
    world.check_memory()
    shim.die()
    world.run(3000)

    assert len(online.backed()) >= 40


@pytest.mark.parametrize("moment_us", MOMENTS_US)
def test_a_successor_is_never_told_of_memory_that_reads_zero(tmp_path, moment_us):
    """valved dies at any moment of a reclaim: the shim reads what it said to the end."""
    first = KvWorld(tmp_path, config=CONFIG, handles=20)
    offline, online = under_pressure(first)
    first.clock.advance(moment_us * 1000)
    first.outside.is_dead = True
    shims = [offline.shim, online.shim]
    second = KvWorld(tmp_path, config=CONFIG, clock=first.clock, processes=first.processes)
    second.card, second.shims = first.card, shims
    for shim in shims:
        shim.hang_up()
        role = second.offline if shim is offline.shim else second.online
        shim.retell(role(pid=shim.entry.process.pid, gpus=(0,)), second)
    second.run(1000)

    believed = set(offline.shim.ranges[0])
    assert believed.isdisjoint(slot for _, slot in offline.shim.read_zero)
    hook = Hook(offline.shim, 64)
    assert hook.register([KvTensor(base_addr=BASE, block_stride_bytes=1 << 19, block_bytes=1 << 19)], (0,)) == 0
    assert hook.attach() == 0
    told = {int(block) // 4 for block in hook.backed()}
    assert told <= set(offline.shim.ranges[0])
    second.kv.check_integrity()


def fill_socket(world):
    """Under pressure, with orders to take memory that wait in valved because the offline process does not read."""
    offline, online = under_pressure(world)
    connection = offline.shim.connection
    connection.is_full = True
    world.run(20)
    assert any(packet[0] is LinkType.KV_RUNS for packet in connection.queue)
    return offline, online, connection


def test_memory_is_never_taken_while_the_order_waits_in_valved(world):
    offline, online, connection = fill_socket(world)
    assert not offline.shim.read_zero

    connection.is_full = False
    connection.flush()
    world.run(100)

    assert offline.shim.read_zero
    assert len(online.backed()) >= 40
    assert not demotions(world)


def read_again(world, offline, connection):
    connection.is_full = False
    connection.flush()
    world.run(100)
    offline.shim.step()
    world.run(100)


def test_memory_is_never_taken_from_a_process_that_may_run_again_when_it_hears_of_it(world):
    offline, online, connection = fill_socket(world)
    world.run(100)  # the reclaim has ended without it

    read_again(world, offline, connection)

    assert not offline.shim.read_zero
    assert len(online.backed()) >= 40


def test_the_driver_is_never_begun_with_so_late_that_it_may_be_at_it_when_the_gpu_opens(world):
    """Half of the time that the gate stays closed is its own."""
    offline, online, connection = fill_socket(world)
    world.run(30)
    assert world.gate.off

    read_again(world, offline, connection)

    assert not offline.shim.read_zero
    assert len(online.backed()) > 16  # asked instead, it gave it all the same


def test_no_hole_is_left_behind_when_valved_dies_with_an_order_that_it_had_not_sent(tmp_path):
    first = KvWorld(tmp_path, config=CONFIG, handles=20)
    offline, _, connection = fill_socket(first)
    first.outside.is_dead = True
    connection.queue.clear()
    first.clock.advance(1_000_000_000)

    assert not offline.shim.read_zero
    assert not offline.shim.thought_gone


def test_what_leaves_the_process_while_it_is_taken_is_refused(world):
    offline, _ = under_pressure(world)
    offline.shim.answers = False
    world.run(20)
    [slot, *_] = sorted(offline.shim.read_zero)[:1]
    taken, kept = slot[1], min(set(range(16)) - {at for _, at in offline.shim.read_zero})

    seqs = [
        offline.shim.say(LinkType.KV_PIN, KvSpan(range=0, offset=at * 2 * MIB, bytes=2 * MIB)) for at in (taken, kept)
    ]

    assert [offline.shim.acked(seq) for seq in seqs] == [errno.EBUSY, 0]
    offline.shim.catch_up()
    world.run(100)


def test_what_has_left_the_process_is_never_taken(world):
    offline = world.engine("offline", columns=16)
    world.run(500)
    offline.shim.say(LinkType.KV_PIN, KvSpan(range=0, offset=0, bytes=32 * MIB))
    online = world.engine("online", columns=4)
    world.run(500)
    online.want(used=4, wanted=16)
    world.run(2000)

    assert len(offline.backed()) == 64


def test_a_client_that_hears_nothing_is_not_taken_from_without_end(world):
    offline, _ = under_pressure(world)
    book = offline.shim.world.kv.books.engines[offline.shim.entry.service].ranks[offline.shim.client].books[0]
    orders = world.kv.books.orders
    offline.shim.answers = False
    for _ in range(UNHEARD):
        orders.take_away(KvOp.QUARANTINE, RangeSlots.of_range(book, np.array([0])), KvHow.OUTSIDE)

    slots = RangeSlots.of_range(book, np.array([1]))
    [part] = world.kv.outside.plan([(slots, orders.draft_away(slots)[0].raw)], is_ours=True)
    assert world.kv.outside.take(part) == []
    offline.shim.die()


SCRATCH = {"gpu_uuid": bytes([1]) * 16, "device_instance": 0, "place": 0, "base": 1 << 32, "bytes": 2 * MIB}


@pytest.mark.parametrize(
    ("change", "role", "fds"),
    [
        ({"bytes": 0}, "offline", 1),
        ({"bytes": 1 << 50}, "offline", 1),
        ({"base": (1 << 64) - 1}, "offline", 1),
        ({"gpu_uuid": bytes(15) + b"x"}, "offline", 1),
        ({}, "offline", 0),
        ({}, "online", 1),
        ({}, "offline", 1),
    ],
    ids=["nothing", "too much", "wraps", "no such GPU", "no descriptor", "online", "another file"],
)
def test_a_lie_about_scratch_memory_ends_the_connection(world, change, role, fds):
    shim = world.shim(role)

    with pytest.raises(Malformed):
        shim.say(LinkType.KV_SCRATCH, KvScratch(**{**SCRATCH, **change}), [lend() for _ in range(fds)])

    assert not world.outside.open_fds
    shim.die()


def test_nobody_passes_scratch_memory_where_it_was_not_asked_for(tmp_path):
    helper = Config(memory=MemoryTable(handle_mib=2, remap=Remap.HELPER))
    world = KvWorld(tmp_path, config=helper)
    shim = world.shim("offline")

    with pytest.raises(Malformed):
        shim.offer_scratch(0)


class SparseWalk(Node):
    config = CONFIG


class AttackedWalk(Attacked):
    config = CONFIG


SparseWalk.TestCase.settings = AttackedWalk.TestCase.settings = WALKS
TestSparseWalk, TestAttackedWalk = SparseWalk.TestCase, AttackedWalk.TestCase
