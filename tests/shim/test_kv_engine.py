"""A whole engine on KV memory that is taken and given back all the time: the answers stay those of an undisturbed run.

The engine is the demo's (tools/demo/kv_engine.py): every token of its answers comes from owner tags that a kernel found
in the request's blocks, and its hook is the one of the real engines.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest
from fake_daemon import OFFLINE, RUN, STOP, Client, until
from kv_pool import MIB, QUARANTINE, UNBACK, Entry, Pool
from kv_table import Hook
from valve_tools.demo import kv_batch, kv_service

H = 2 * MIB
BLOCK = 64 << 10
BLOCKS, PLANES = 256, 2
SLOTS = BLOCKS * BLOCK // H  # of a plane; a column is one of each
REQUESTS = ["--kv-blocks", str(BLOCKS), "--kv-planes", str(PLANES), "--in-tokens", "120", "--out-tokens", "80"]


class Node:
    """What a valved does to one engine, step by step, for columns of one slot in each plane."""

    def __init__(self, pool: Pool, client: Client, hook: Hook, ranges: list[int]) -> None:
        self.pool, self.client, self.hook, self.ranges = pool, client, hook, ranges
        names = iter(sorted(pool.fds))
        self.at = {(each, slot): next(names) for each in ranges for slot in range(SLOTS)}
        self.spare: list[int] = []

    def blocks_of(self, columns: Iterable[int]) -> list[int]:
        per = BLOCKS // SLOTS
        return [block for column in columns for block in range(column * per, (column + 1) * per)]

    def order(self, kind: int) -> None:
        seq = self.client.give_order(kind)
        until(lambda: self.client.region.order_done == seq, "obeyed")

    def take(self, columns: list[int]) -> None:
        """Stop, quarantine, record, run."""
        self.order(STOP)
        for each in self.ranges:
            done = self.pool.order(self.client, QUARANTINE, each, [Entry(slot) for slot in columns])
            assert (done.done, done.status) == (len(columns), 0)
            self.spare += [self.at.pop((each, slot)) for slot in columns]
        self.hook.change(self.blocks_of(columns), backed=False)
        self.order(RUN)

    def give(self, columns: list[int]) -> None:
        for each in self.ranges:
            handles = {slot: self.spare.pop() for slot in columns}
            done = self.pool.give(self.client, each, handles)
            assert (done.done, done.status) == (len(columns), 0)
            self.at |= {(each, slot): name for slot, name in handles.items()}
        self.hook.change(self.blocks_of(columns), backed=True)


def summary(program) -> dict[str, object]:
    text, _ = program.communicate(timeout=200)
    found = json.loads([line for line in text.splitlines() if '"summary"' in line][-1])
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def undisturbed(emulated_gpus, tmp_path_factory):
    from kv_world import World

    world = World(emulated_gpus, tmp_path_factory.mktemp("alone"), OFFLINE)
    alone = summary(world.program(*kv_batch.COMMAND, *REQUESTS, "--kv-requests", "200", "--step-us", "100"))
    world.close()
    return alone


def attached(world, *arguments: str) -> tuple[object, Node]:
    pool = world.begin(limit=2 * SLOTS * PLANES)
    pool.hooks.columns = SLOTS
    program = world.program(*kv_batch.COMMAND, *REQUESTS, *arguments)
    client = world.daemons[-1].client()
    hook = pool.hooks.hook()
    ranges = [world.range_of(pool).range for _ in range(PLANES)]
    return program, Node(pool, client, hook, ranges)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_answers_of_a_robbed_engine_are_those_of_an_undisturbed_one(kv_world, undisturbed, seed):
    program, node = attached(kv_world(OFFLINE), "--kv-requests", "200", "--step-us", "1500")
    draw, rounds, gone = random.Random(seed), 0, []

    while program.poll() is None and rounds < 25:
        columns = sorted(draw.sample(range(1, SLOTS), draw.randint(1, SLOTS - 3)))
        node.take(columns)
        until(lambda: program.poll() is not None or node.hook.word("epoch_seen") == node.hook.epoch, "seen")
        node.give(columns)
        rounds += 1
    found = summary(program)

    assert found["ok"]
    assert (found["checksum"], found["units"]) == (undisturbed["checksum"], 200)
    assert found["hit_requests"] > 0
    assert rounds > 3, gone


def test_rows_of_the_book_name_the_blocks_in_use(kv_world):
    program, node = attached(kv_world(OFFLINE), "--step-us", "2000")

    until(lambda: node.hook.word("used_blocks") > 20, "it runs")
    rows = node.hook.rows()

    assert rows
    blocks = [block for row in rows.values() for block in row]
    assert len(blocks) == len(set(blocks))
    assert 0 not in blocks
    program.terminate()
    assert summary(program)["ok"]


def test_an_engine_offers_whole_free_columns_down_to_the_target(kv_world):
    program, node = attached(kv_world(OFFLINE), "--step-us", "2000", "--kv-batch", "2")
    until(lambda: node.hook.word("used_blocks"), "it runs")

    node.hook.aim(BLOCKS // 4)
    offered = until(node.hook.offered, "offered")
    per = BLOCKS // SLOTS
    columns = sorted({block // per for block in offered})

    assert offered == node.blocks_of(columns)
    for each in node.ranges:
        node.pool.order(node.client, UNBACK, each, [Entry(slot) for slot in columns])
    node.hook.change(offered, backed=False)
    until(lambda: not node.hook.offered(), "settled")
    program.terminate()
    assert summary(program)["ok"]


def started_online(kv_world, *arguments: str):
    """A busy machine may miss the 50 ms that an online process gives valved, which then runs untouched: again."""
    while True:
        world = kv_world()
        pool = world.begin(initial=1)
        pool.hooks.columns, pool.hooks.backed = SLOTS, BLOCKS // SLOTS
        program = world.program(*kv_service.COMMAND, *arguments)
        until(lambda: pool.born.qsize() or program.poll() is not None, "its range, or its end")  # noqa: B023
        if pool.born.qsize():
            return world, pool, program


def test_an_online_engine_asks_for_memory_and_uses_it_when_it_is_there(kv_world, tmp_path):
    per = BLOCKS // SLOTS
    trace = tmp_path / "requests.csv"
    trace.write_text("t_s,in_tokens,out_tokens\n" + "".join(f"{n / 8},{500 + 300 * n},40\n" for n in range(8)))
    shape = ["--kv-blocks", str(BLOCKS), "--kv-planes", "1", "--trace", str(trace)]
    world, pool, program = started_online(kv_world, *shape, "--prefill-us", "1", "--decode-us", "500", "--quiet")
    client, hook = world.daemons[-1].client(), pool.hooks.hook()
    number = world.range_of(pool).range

    hook.needs.get(timeout=200)
    assert hook.word("wanted_blocks") > per
    pool.create(client, number, range(1, SLOTS), zero=True)
    hook.change(range(per, BLOCKS), backed=True)
    found = summary(program)

    assert program.returncode == 0
    assert found["finished"] == found["requests"]
    assert found["kv"]["waits"] > 0
    assert found["kv"]["wrong_words"] == 0
