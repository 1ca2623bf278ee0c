"""What an application is told of addresses in a KV range: one allocation, whatever is mapped where."""

from __future__ import annotations

import pytest
from fake_daemon import FEATURE_KV_FREE, KV_PIN, OFFLINE, ONLINE
from kv_pool import BACK, EBUSY, EEXIST, ELASTIC, MIB, QUARANTINE, UNBACK, Entry

H = 2 * MIB
CONTEXT, MEMORY_TYPE, BUFFER_ID, ORDINAL, LEGACY_IPC, START, SIZE = 1, 2, 7, 9, 10, 11, 12
MAPPED, HANDLE_TYPES, ACCESS, POOL = 13, 14, 16, 17
SYNC_MEMOPS, P2P_TOKENS = 6, 5
DEVICE_MEMORY, READWRITE = 2, 3
NOT_SUPPORTED = 801


@pytest.fixture
def ranged(kv_world):
    """An engine with four slots: backed, quarantined, a hole, backed; 1 KiB more than three slots were asked for."""
    world = kv_world(OFFLINE)
    pool = world.begin()
    engine, client = world.engine()
    address = engine.alloc(3 * H + 1024, ELASTIC)
    number = world.range_of(pool).range
    pool.order(client, QUARANTINE, number, [Entry(1)])
    pool.order(client, UNBACK, number, [Entry(2)])
    return pool, engine, client, number, address


@pytest.mark.parametrize("slot", range(4))
def test_every_address_answers_for_the_whole_range(ranged, slot):
    _, engine, _, _, address = ranged
    inside = address + slot * H + 512

    assert engine.address_range(inside) == [0, address, 3 * H + 1024]
    assert engine.attribute(START, inside) == [0, address]
    assert engine.attribute(SIZE, inside) == [0, 3 * H + 1024]
    assert engine.attribute(MEMORY_TYPE, inside, 4) == [0, DEVICE_MEMORY]
    assert engine.attribute(ORDINAL, inside, 4) == [0, 0]
    assert engine.attribute(MAPPED, inside, 1) == [0, 1]
    assert engine.attribute(ACCESS, inside, 4) == [0, READWRITE]
    assert engine.attribute(LEGACY_IPC, inside, 1) == [0, 0]
    assert engine.attribute(HANDLE_TYPES, inside) == [0, 0]
    assert engine.attribute(POOL, inside) == [0, 0]


def test_its_identity_and_context_never_change(ranged):
    pool, engine, client, number, address = ranged
    before = [engine.attribute(BUFFER_ID, address + at) for at in (0, H, 2 * H)]

    pool.create(client, number, [1, 2])

    assert [engine.attribute(BUFFER_ID, address + at) for at in (0, H, 2 * H)] == before
    assert len({tuple(each) for each in before}) == 1
    plain = engine.alloc(H)
    assert engine.attribute(CONTEXT, address) == engine.attribute(CONTEXT, plain)
    assert engine.attribute(BUFFER_ID, plain) != before[0]


def test_many_questions_at_once_are_answered_alike(ranged):
    _, engine, _, _, address = ranged

    answers = engine.attributes([MEMORY_TYPE, START, SIZE, ORDINAL, MAPPED], address + 2 * H)

    assert answers == [0, [DEVICE_MEMORY, address, 3 * H + 1024, 0, 1]]


def test_addresses_beside_a_range_are_the_drivers_business(ranged):
    _, engine, _, _, address = ranged
    plain = engine.alloc(H)

    assert engine.address_range(plain) == [0, plain, H]
    assert engine.address_range(address - 1)[0] != 0
    assert engine.address_range(address + 3 * H + 1024)[1] != address


def test_legacy_ipc_is_refused_with_a_reason(ranged):
    _, engine, _, _, address = ranged

    assert engine.ipc_handle(address) == NOT_SUPPORTED
    assert "cuIpcGetMemHandle on KV memory is not supported" in engine.errors.read_text()


def exported(engine, address):
    assert engine.export_range(address + 3 * H, 4096)[0] == 0


def retained(engine, address):
    assert engine.retain(address + 3 * H) == 0


@pytest.mark.parametrize("leave", [exported, retained])
def test_what_leaves_the_process_is_pinned_there_and_at_valved(ranged, leave):
    pool, engine, client, number, address = ranged

    leave(engine, address)

    pin = client.expect(KV_PIN, range=number)
    assert pin.offset == 3 * H
    assert 0 < pin.bytes <= 4096
    for op in (QUARANTINE, UNBACK):
        done = pool.order(client, op, number, [Entry(0), Entry(3)])
        assert (done.done, done.status) == (1, EBUSY)
        pool.create(client, number, [0])


def test_an_export_that_the_driver_refuses_pins_nothing(ranged):
    pool, engine, client, number, address = ranged

    assert engine.export_range(address, 3 * H)[0] != 0

    assert client.none_of(KV_PIN)
    assert pool.order(client, QUARANTINE, number, [Entry(0), Entry(3)]).status == 0


@pytest.mark.parametrize("by", ["set", "get"])
def test_a_registration_with_a_nic_pins_the_whole_range(ranged, by):
    """It goes through the kernel, past CUDA; these attributes come before it."""
    pool, engine, client, number, address = ranged

    if by == "set":
        engine.set_attribute(SYNC_MEMOPS, address + H)
    else:
        engine.attribute(P2P_TOKENS, address + H)

    client.expect(KV_PIN, range=number, offset=0, bytes=3 * H + 1024)
    assert pool.order(client, QUARANTINE, number, [Entry(3)]).status == EBUSY
    assert pool.order(client, BACK, number, [Entry(3, 9, 1)]).status == EEXIST


def test_ordinary_memory_is_never_pinned(ranged):
    _, engine, client, _, _ = ranged
    plain = engine.alloc(H)

    assert engine.set_attribute(SYNC_MEMOPS, plain) == 0
    assert engine.export_range(plain, 4096)[0] == 0

    assert client.none_of(KV_PIN)


@pytest.mark.parametrize(("role", "told"), [(OFFLINE, True), (ONLINE, False)])
def test_an_offline_process_sees_its_budget_as_free_memory(kv_world, role, told):
    world = kv_world(role)
    world.begin()
    engine, client = world.engine()
    free, total = engine.mem_info()

    client.control.kv_budget_bytes = 10 * H
    engine.alloc(3 * H, ELASTIC)

    now = engine.mem_info()
    assert now[1] == total
    assert now[0] == (7 * H if told else free - 4 * H)  # three slots and the zero page
    client.control.kv_budget_bytes = H
    assert engine.mem_info()[0] == (0 if told else free - 4 * H)


def test_free_memory_is_never_the_same_before_and_after_ones_own_weights(kv_world):
    world = kv_world(OFFLINE)
    pool = world.begin()
    pool.daemon.features |= FEATURE_KV_FREE
    pool.initial = 2
    engine, client = world.engine()
    client.control.kv_budget_bytes = 10 * H
    free, _ = engine.mem_info()

    engine.alloc(5 * H)
    assert engine.mem_info()[0] == free - 5 * H
    engine.alloc(8 * H, ELASTIC)
    world.range_of(pool)

    assert engine.mem_info()[0] == free - 5 * H - 8 * H - H  # what has no memory yet is not free, either; the zero page


def test_free_handles_are_never_counted_on_another_gpu_than_theirs(kv_world):
    world = kv_world(OFFLINE)
    world.begin().daemon.features |= FEATURE_KV_FREE
    engine, client = world.engine()
    client.control.kv_budget_bytes = 10 * H
    free, _ = engine.mem_info()

    told = [(bytes([9]) * 16, 32 * H), (bytes.fromhex(engine.uuid()), 3 * H)]
    for index, (uuid, size) in enumerate(told):
        client.control.memory[256 + 32 * index : 280 + 32 * index] = uuid + size.to_bytes(8, "little")

    assert engine.mem_info()[0] == free + 3 * H
