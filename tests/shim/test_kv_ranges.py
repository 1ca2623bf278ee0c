"""Which allocations become KV ranges, and what the application gets when one cannot."""

from __future__ import annotations

import pytest
from fake_daemon import FEATURE_MEMORY, KV_PIN, KV_RANGE, KV_RANGE_DEL, NOTE, OFFLINE, ONLINE, RUN, STOP, until
from kv_pool import BACK, ELASTIC, MIB, QUARANTINE, ZERO, Entry

H = 2 * MIB
OUT_OF_MEMORY = 2
ENOTSUP = 95


def is_plain(engine, client, address, size=4 * H):
    """Ordinary memory: valved heard of no range, and the whole of it can be used."""
    return address > 0 and engine.touch(address, size) == 0 and client.none_of(KV_RANGE)


@pytest.mark.parametrize(
    ("size", "flags", "words"),
    [
        (4 * H, None, {}),
        (H - 1, 0, {}),
        (4 * H, 0, {"kv_handle_bytes": 0}),
        (4 * H, 0, {"kv_handle_bytes": 3 * MIB}),
        (4 * H, None, {"kv_size_rule": 4 * H + 1}),
    ],
    ids=["no bracket", "less than a handle", "no handles here", "not a size of the card", "below the rule"],
)
def test_other_allocations_are_left_alone(kv_world, size, flags, words):
    world = kv_world()
    world.begin()
    world.daemons[-1].words |= words
    engine, client = world.engine()

    assert is_plain(engine, client, engine.alloc(size, flags), size)


def test_a_daemon_that_knows_no_memory_is_not_asked(kv_world):
    world = kv_world()
    world.begin()
    world.daemons[-1].features &= ~FEATURE_MEMORY
    engine, client = world.engine()

    assert is_plain(engine, client, engine.alloc(4 * H, 0))


def test_without_a_daemon_a_bracket_is_nothing(kv_world):
    world = kv_world()
    world.begin()
    engine, client = world.engine()
    world.daemons[-1].close()
    until(client.gone.is_set, "the link broke")

    assert engine.touch(engine.alloc(4 * H, ELASTIC), 4 * H) == 0
    assert engine.ranges() == 0  # so its hook need not wait for a valved


def test_an_engine_learns_whether_it_holds_memory_of_valveds(kv_world):
    world = kv_world(OFFLINE)
    world.begin()
    engine, _ = world.engine()
    assert engine.ranges() == 0

    address = engine.alloc(4 * H, ELASTIC)
    assert engine.ranges() == 1
    engine.free(address)

    assert engine.ranges() == 0


def test_the_size_rule_takes_large_allocations_without_a_bracket(kv_world):
    world = kv_world()
    pool = world.begin()
    world.daemons[-1].words["kv_size_rule"] = 4 * H
    engine, _ = world.engine()

    engine.alloc(4 * H - 1)
    address = engine.alloc(4 * H)

    told = world.range_of(pool)
    assert (told.base, told.flags) == (address, 0)


@pytest.mark.parametrize("door", ["getproc_alloc", "linked_alloc"])
def test_every_door_to_the_driver_leads_to_a_range(kv_world, door):
    world = kv_world()
    pool = world.begin()
    engine, _ = world.engine()

    code, address = getattr(engine, door)(4 * H)

    assert code == 0
    assert world.range_of(pool).base == address


def test_the_form_of_32_bit_addresses_is_not_ours(kv_world):
    """cuMemAlloc of CUDA 2.0 writes four bytes; whoever asks for that version gets the driver's own answer."""
    world = kv_world()
    pool = world.begin()
    engine, _ = world.engine()

    engine.getproc_alloc(4 * H, 2000)

    assert pool.born.empty()


@pytest.mark.parametrize("role", [ONLINE, OFFLINE])
def test_what_the_pool_lacks_is_refused_offline_and_plain_online(kv_world, role):
    world = kv_world(role)
    pool = world.begin(limit=2)
    engine, client = world.engine()

    address = engine.alloc(4 * H, 0)

    number = world.range_of(pool).range
    client.expect(KV_RANGE_DEL, range=number)
    if role == OFFLINE:
        assert address == -OUT_OF_MEMORY
    else:
        assert engine.touch(address, 4 * H) == 0


def test_an_offline_process_allocates_itself_where_valved_does_not_manage(kv_world):
    world = kv_world(OFFLINE)
    pool = world.begin()
    world.daemons[-1].on_message = lambda client, message: (
        message.type == KV_RANGE and bool(client.ack(message, ENOTSUP) or True)
    )
    engine, client = world.engine()

    address = engine.alloc(4 * H, ELASTIC)

    client.expect(KV_RANGE)
    assert engine.touch(address, 4 * H) == 0
    assert not pool.fds


def test_a_range_that_valved_called_backed_and_is_not_is_not_handed_out(kv_world):
    world = kv_world()
    world.begin()
    world.daemons[-1].on_message = lambda client, message: (
        message.type == KV_RANGE and bool(client.ack(message) or True)
    )
    engine, client = world.engine()

    address = engine.alloc(4 * H, 0)

    client.expect(KV_RANGE_DEL)
    assert engine.touch(address, 4 * H) == 0


def test_a_valved_that_is_silent_holds_an_online_start_for_seconds_and_only_once(kv_world):
    world = kv_world()
    pool = world.begin()
    pool.silent = True
    engine, client = world.engine()

    addresses = [engine.alloc(4 * H, 0) for _ in range(20)]

    client.expect(KV_RANGE_DEL)
    assert len(pool.ranges) == 1
    assert [engine.touch(address, 4 * H) for address in addresses] == [0] * 20


@pytest.mark.parametrize("role", [ONLINE, OFFLINE])
def test_a_valved_that_dies_meanwhile_ends_the_wait_at_once(kv_world, role):
    world = kv_world(role)
    pool = world.begin()
    pool.silent = True
    engine, _ = world.engine()
    engine.begin("alloc", 4 * H, ELASTIC)
    world.range_of(pool)

    world.daemons[-1].close()

    assert engine.touch(engine.end("alloc"), 4 * H) == 0


def test_ranges_of_two_gpus_are_told_apart_and_backed_on_their_own(kv_world, emulated_gpus):
    world = kv_world()
    pool = world.begin()
    engine, _ = world.engine()
    before = [emulated_gpus.state().used_bytes(gpu) for gpu in (0, 1)]
    first = engine.alloc(2 * H, ELASTIC)
    engine.start(1)
    begun = emulated_gpus.state().used_bytes(1)

    second = engine.alloc(3 * H, ELASTIC)

    told = [world.range_of(pool), world.range_of(pool)]
    assert [each.base for each in told] == [first, second]
    assert told[0].gpu_uuid != told[1].gpu_uuid
    assert told[0].range != told[1].range
    state = emulated_gpus.state()
    zero_page = H
    assert state.used_bytes(0) - before[0] >= 2 * H + zero_page
    assert state.used_bytes(1) - begun == 3 * H + zero_page
    assert engine.tag(second, 3 * H, 5) == 0
    engine.start(0)
    assert engine.wrong_pages(first, 2 * H, 0) == 0


def test_freeing_returns_everything(kv_world, emulated_gpus):
    world = kv_world()
    pool = world.begin()
    engine, client = world.engine()
    before, fds = emulated_gpus.state().used_bytes(), []

    for _ in range(20):
        assert engine.free(engine.alloc(3 * H, ELASTIC)) == 0
        client.expect(KV_RANGE_DEL)
        pool.close()
        fds.append(len(engine.fds()))  # now and then with copies that are about to be closed

    assert emulated_gpus.wait(lambda state: state.used_bytes() == before + H, "all but the zero page is free")
    until(lambda: len(engine.fds()) == min(fds), "every descriptor is closed")


def test_only_the_first_address_of_a_range_frees_it(kv_world):
    world = kv_world()
    world.begin()
    engine, _ = world.engine()
    address = engine.alloc(4 * H, 0)

    assert engine.free(address + H) == 1
    assert engine.free(address) == 0
    assert engine.free(address) == 1


def test_freeing_waits_for_kernels_that_use_it(kv_world):
    world = kv_world()
    world.begin()
    engine, _ = world.engine()
    address = engine.alloc(4 * H, 0)

    engine.launch_spin(20000)
    engine.launch_touch(address, 4 * H)
    assert engine.free(address) == 0

    assert engine.synchronize() == 0


def test_a_range_ends_with_its_context(kv_world):
    world = kv_world()
    world.begin()
    engine, client = world.engine()
    engine.alloc(4 * H, ELASTIC)

    engine.reset_context()

    client.expect(KV_RANGE_DEL)


def test_a_forked_child_leaves_its_parents_ranges_alone(kv_world):
    world = kv_world()
    pool = world.begin()
    engine, client = world.engine()
    address = engine.alloc(4 * H, ELASTIC)
    engine.tag(address, 4 * H, 3)

    engine.fork_and_free(address)

    assert engine.wrong_pages(address, 4 * H, 3) == 0
    assert client.none_of(KV_RANGE_DEL)
    done = pool.order(client, QUARANTINE, world.range_of(pool).range, [Entry(0)])
    assert done.done == 1


def test_a_process_with_ranges_exits_as_any_other(kv_world):
    world = kv_world()
    world.begin()
    engine, client = world.engine()
    engine.alloc(4 * H, ELASTIC)

    assert engine.leave() == 0
    assert engine.errors.read_text() == ""
    until(client.gone.is_set, "gone")


def test_an_allocation_of_a_stopped_client_waits_for_the_gate_only(kv_world):
    """Its memory is cleared by kernels, and those wait until the client is woken."""
    world = kv_world(OFFLINE)
    pool = world.begin()
    engine, client = world.engine()
    engine.alloc(H, ELASTIC)
    world.range_of(pool)
    pool.silent = True
    seq = client.give_order(STOP)
    until(lambda: client.region.order_done == seq, "stopped")

    engine.begin("alloc", 2 * H, ELASTIC)
    told = world.range_of(pool)
    pool.send(client, BACK, told.range, [Entry(slot, 70 + slot, 1 | ZERO) for slot in range(2)])
    assert not engine.has_ended("alloc")
    client.give_order(RUN)
    done = pool.answer()
    client.ack(told)

    assert (done.done, len(done.fds)) == (2, 2)
    assert engine.touch(engine.end("alloc"), 2 * H) == 0
    done.close()


def test_a_collective_librarys_own_virtual_memory_is_untouched(kv_world, libraries):
    """Host memory on a NUMA node, exports, imports, two mappings of one handle: also in a bracket, beside a range."""
    program = libraries.compile("nccl", "-ldl")
    world = kv_world()
    pool = world.begin()

    plain = world.program(program, preload=False).communicate(timeout=200)[0]
    beside = world.program(program).communicate(timeout=200)[0]
    bracketed = world.program(program, "bracket").communicate(timeout=200)[0]

    assert plain == beside == bracketed
    assert "cuMemCreate 0" in plain
    assert pool.born.qsize() == 1
    clients = [client for client in world.daemons[-1].alive if client.hello]
    assert all(client.none_of(KV_PIN) for client in clients)


@pytest.mark.parametrize("role", [ONLINE, OFFLINE])
def test_an_online_process_that_finds_no_memory_is_never_silent_about_it(kv_world, role):
    world = kv_world(role)
    world.begin()
    engine, client = world.engine()

    assert engine.alloc(1 << 40) == -2

    if role == ONLINE:
        assert client.expect(NOTE).code == 8
    else:
        engine.alloc(H, 0)
        client.expect(KV_RANGE)
        assert client.none_of(NOTE)


def test_a_want_of_memory_is_never_kept_back_because_one_was_told_before_offline_work_came(kv_world):
    world = kv_world(ONLINE)
    world.begin()
    engine, client = world.engine()
    engine.alloc(1 << 40)
    client.expect(NOTE)

    def is_told_again() -> bool:
        engine.alloc(1 << 40)
        client.none_of(NOTE)
        return sum(message.type == NOTE for message in client.seen) == 2

    until(is_told_again)
