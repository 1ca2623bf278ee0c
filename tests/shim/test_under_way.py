"""A neighbour of the same user whose descriptors lie unread keeps no process from showing its own (ETOOMANYREFS)."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_daemon import (
    CHANNEL_ADD,
    FEATURE_FETCH,
    KV_DONE,
    KV_HELD,
    KV_SCRATCH,
    LONG_S,
    OFFLINE,
    ONLINE,
    RM_CLIENT,
    until,
)
from kv_outside import Outside, attempt
from kv_pool import ELASTIC, MIB, QUARANTINE, TAG, Entry
from rmkit import GR0, Process
from under_way import BOUNDED, neighbour

from valved.clients.fetching import fetched

H = 2 * MIB
FIRST = 0x5C000008
pytestmark = pytest.mark.skipif(not fetched(), reason="this kernel has no SO_PEERPIDFD")


def has_channel(puppet):
    made = Process.begin(puppet)
    made.channel(made.device, FIRST, engine=GR0)
    made.register(FIRST)
    return made


@pytest.mark.parametrize("role", [ONLINE, OFFLINE])
def test_a_process_is_never_kept_from_showing_what_its_channels_need(world, role):
    world.prefix = BOUNDED
    begin = world.online if role == ONLINE else world.offline
    puppet, client = begin(world.daemon(role, more=FEATURE_FETCH))

    with neighbour():
        made = has_channel(puppet)
        told = client.expect(RM_CLIENT, h_client=made.client, has_fd=1)
        client.expect(CHANNEL_ADD, h_channel=FIRST)

    assert client.lent == [RM_CLIENT]
    assert len(told.fds) == 1


@pytest.mark.parametrize("role", [ONLINE, OFFLINE])
def test_what_could_not_be_fetched_is_never_given_up_nor_said_that_way_again(world, role):
    world.prefix = BOUNDED
    daemon = world.daemon(role, more=FEATURE_FETCH)
    daemon.unfetched = {RM_CLIENT}
    begin = world.online if role == ONLINE else world.offline
    puppet, client = begin(daemon)

    with neighbour():
        made = has_channel(puppet)
        until(lambda: client.lent, "it was lent")
    told = client.expect(RM_CLIENT, h_client=made.client, has_fd=1)

    assert client.lent == [RM_CLIENT]
    assert len(told.fds) == 1


@pytest.fixture
def four(kv_world):
    made = kv_world(OFFLINE)
    made.prefix, made.more = BOUNDED, FEATURE_FETCH
    pool = made.begin()
    engine, client = made.engine()
    address = engine.alloc(4 * H, ELASTIC)
    return made, pool, engine, client, made.range_of(pool).range, address


def test_no_handle_that_a_process_made_is_lost_and_none_is_another(four):
    _, pool, engine, client, number, address = four
    pool.order(client, QUARANTINE, number, [Entry(1), Entry(2)])

    with neighbour():
        names = pool.create(client, number, [1, 2])

    assert KV_DONE in client.lent
    engine.tag(address, 4 * H, TAG)
    pool.order(client, QUARANTINE, number, [Entry(1), Entry(2)])
    pool.give(client, number, {1: names[1], 2: names[0]}, zero=False)
    assert engine.wrong_pages(address, 4 * H, TAG) == 0


def test_a_new_valved_is_told_of_every_handle(four):
    made, _, engine, _, _, address = four
    engine.tag(address, 4 * H, TAG)

    with neighbour():
        made.daemons[-1].close()
        again = made.begin()
        client = again.daemon.client()
        held = again.held.get(timeout=200)

    fds = held.take_fds()
    for fd in fds:
        os.close(fd)
    assert KV_HELD in client.lent
    assert (held.count, len(set(fds))) == (4, 4)
    assert engine.wrong_pages(address, 4 * H, TAG) == 0


@pytest.fixture
def trial(kv_world):
    """`trial(unfetched)`: a process whose memory for a trial has to be told beside such a neighbour."""
    made = kv_world(OFFLINE)
    made.prefix, made.more = BOUNDED, FEATURE_FETCH

    def begin(unfetched=()):
        pool = made.begin(sparse=True)
        made.daemons[-1].unfetched = unfetched
        with ThreadPoolExecutor() as threads, neighbour():
            engine, client = made.engine()
            address = threads.submit(
                engine.alloc, 4 * H, ELASTIC
            )  # its handles may have to wait for the neighbour's end
            until(lambda: KV_SCRATCH in client.lent, "it was lent")
            if not unfetched:
                address.result()
        engine.tag(address.result(), 4 * H, TAG)
        return made, pool, engine, client, address.result()

    return begin


def test_memory_for_a_trial_is_never_kept_from_it(trial, emulated_gpus):
    """valved makes it sparse by the file that it has fetched."""
    _, pool, engine, client, address = trial()
    scratch = pool.scratch.get(timeout=LONG_S)
    outside = Outside(emulated_gpus, scratch)

    outside.sparse(scratch.base, scratch.bytes)

    assert attempt(pool, client, scratch) == 0
    assert engine.wrong_pages(address, 4 * H, TAG) == 0
    outside.process.kill()


def test_memory_for_a_trial_that_valved_cannot_fetch_never_ends_the_link_and_is_told_to_the_next_valved(trial):
    made, pool, engine, client, address = trial({KV_SCRATCH})
    number = made.range_of(pool).range

    assert pool.order(client, QUARANTINE, number, [Entry(1)]).done == 1
    assert pool.scratch.empty()
    assert client.lent.count(KV_SCRATCH) == 1
    made.daemons[-1].close()
    again = made.begin(sparse=True)

    assert len(again.scratch.get(timeout=LONG_S).fds) == 1
    assert engine.wrong_pages(address, H, TAG) == 0


NO_MEMORY = """
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <fcntl.h>
int access(const char *path, int how);
int close(int fd);
long syscall(long number, long a, long b, long c, long d, long e, long f)
{
	static long (*real)(long, long, long, long, long, long, long);

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "syscall");
	if (number != SYS_sendmsg || access(getenv("SHORT"), F_OK))
		return real(number, a, b, c, d, e, f);
	close(open(getenv("REFUSED"), O_CREAT | O_WRONLY, 0600));
	errno = ENOBUFS;
	return -1;
}
"""


def test_a_handle_is_never_kept_back_where_the_kernel_had_no_memory_to_say_it_by_number(
    kv_world, tmp_path, monkeypatch
):
    """valved would wait for the end of its order, and a service for the memory."""
    source, library = tmp_path / "more.c", tmp_path / "more.so"
    source.write_text(NO_MEMORY)
    subprocess.run(["cc", "-shared", "-fPIC", "-D_GNU_SOURCE", source, "-o", library, "-ldl"], check=True)
    short, refused = tmp_path / "short", tmp_path / "refused"
    monkeypatch.setenv("SHORT", os.fspath(short))
    monkeypatch.setenv("REFUSED", os.fspath(refused))
    made = kv_world(OFFLINE)
    made.more = FEATURE_FETCH
    pool = made.begin()
    engine, client = made.engine(preload=os.fspath(library))
    engine.alloc(4 * H, ELASTIC)
    number = made.range_of(pool).range
    pool.order(client, QUARANTINE, number, [Entry(1)])

    short.touch()
    with ThreadPoolExecutor() as threads:
        names = threads.submit(pool.create, client, number, [1])
        until(refused.exists, "the answer was refused")
        short.unlink()
        assert len(names.result()) == 1
