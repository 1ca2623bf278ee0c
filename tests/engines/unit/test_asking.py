"""Who asks for a block is told to the queue, and what vLLM would answer never changes by it."""

from __future__ import annotations

import inspect
import linecache
import logging
import random
from collections import OrderedDict

import numpy as np
import pytest
from kv_node import KvNode
from toy_engine import Block, Pool, ToyScheduler
from toy_world import Reclaimer, close, hooked, prompts, run
from valve_hook.holders import HolderIndex
from valve_hook.ledger import TENDED, Ledger
from valve_hook.vllm import asking
from valve_hook.vllm.asking import tell
from valve_hook.vllm.free_blocks import ColumnQueue
from valve_tools.engines import block_manager
from valve_tools.engines.block_manager import BlockManager, blocks_of

SOURCE = inspect.getsource(BlockManager.allocate_new_blocks)


def manager_of(kind=BlockManager, blocks=256, column=32):
    pool = Pool(blocks)
    pool.free_block_queue = ColumnQueue([each // column for each in range(blocks)], pool.blocks[1:])
    return kind(pool, 16)


def told_one():
    manager, grown = manager_of(), OrderedDict()
    queue = manager.block_pool.free_block_queue
    queue.is_told = tell(manager, lambda: queue, grown)
    assert queue.is_told
    return manager, grown


def reading(source):
    """A manager whose function reads so."""
    name = f"<{len(linecache.cache)} of a test>"
    linecache.cache[name] = len(source), None, f"if True:\n{source}".splitlines(keepends=True), name
    space = dict(vars(block_manager))
    exec(compile(f"if True:\n{source}", name, "exec"), space)
    return type("Manager", (BlockManager,), {"allocate_new_blocks": space["allocate_new_blocks"]})


@pytest.mark.parametrize("seed", range(3))
def test_who_is_told_of_never_gets_other_blocks_than_by_the_frame(seed):
    (told, grown), framed = told_one(), manager_of()
    chance, tokens = random.Random(seed), dict.fromkeys("abcd", 0)
    while True:
        name = chance.choice("abcd")
        tokens[name] += chance.choice([0, 1, 5, 16, 40])
        if sum(blocks_of(each, 16) for each in tokens.values()) > 255:
            break
        answers = [each.allocate_new_blocks(name, tokens[name], tokens[name]) for each in (told, framed)]

        assert [block.block_id for block in answers[0]] == [block.block_id for block in answers[1]]
        assert told.block_pool.free_block_queue.asker is None
    assert told.block_pool.free_block_queue.found_owner == 0 < framed.block_pool.free_block_queue.found_owner
    assert all(block in {each.block_id for each in told.req_to_blocks[name]} for block, name in grown.items())
    later = {block.block_id for blocks in told.req_to_blocks.values() for block in blocks}
    assert len(later) - 4 * 3 <= len(grown) <= len(later)


def test_a_partial_hit_is_never_answered_here():
    """vLLM puts a block of the request's own in the place of the shared one."""
    manager, grown = told_one()
    (shared,) = manager.allocate_new_blocks("a", 16, 16)
    manager._partial_hit_reqs["a"] = (0, shared)

    (own,) = manager.allocate_new_blocks("a", 16, 16)
    assert manager._partial_hit_reqs == {}
    assert manager.copies == [(shared.block_id, own.block_id)]
    assert (manager.req_to_blocks["a"], list(grown)) == ([own], [own.block_id])


def test_the_function_is_known_by_what_it_does_and_not_by_its_comments_and_types():
    commented = SOURCE.replace("First a block", "Another text").replace(
        "list[Any] = []", '"Blocks" = []  # and a comment'
    )
    assert commented != SOURCE

    assert tell(manager_of(reading(commented)), lambda: None, OrderedDict())


@pytest.mark.parametrize(
    ("read", "reads"),
    [
        ("lacks > 0", "lacks > 1"),
        ("- len(table)", "- len(table) + 1"),
        ("taken[0]", "taken[-1]"),
        ("            table.extend(more)\n", "            table.extend(more)\n            table.extend(taken)\n"),
        ("blocks_of(num_tokens,", "blocks_of(num_tokens_main_model,"),
        ("num_tokens_main_model: int", "num_tokens_main_model: int = 0"),
        ("taken.extend(more)", "taken.extend(table)"),
    ],
)
def test_a_function_that_reads_otherwise_is_never_followed_and_the_log_names_it(read, reads, caplog):
    """All of these use the names and parameters of the one that is known."""
    assert SOURCE.count(read) == 1
    manager = manager_of(reading(SOURCE.replace(read, reads)))

    with caplog.at_level(logging.WARNING, logger="valve"):
        assert not tell(manager, lambda: manager.block_pool.free_block_queue, OrderedDict())
    assert "allocate_new_blocks" not in vars(manager)
    assert "Manager.allocate_new_blocks" in caplog.text


def test_a_function_around_the_known_one_is_never_followed():
    """Nor one whose source is not to be had."""

    class Another(BlockManager):
        def allocate_new_blocks(self, request_id, num_tokens, num_tokens_main_model):
            return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)

    without = {}
    exec(compile(f"if True:\n{SOURCE}", "no such file", "exec"), dict(vars(block_manager)), without)
    for kind in (Another, type("Bare", (BlockManager,), without), type("None", (), {})):
        assert not asking.is_known(object.__new__(kind))


class Unknown(BlockManager):
    """As a vLLM that has changed: blocks by its own way."""

    def allocate_new_blocks(self, request_id, num_tokens, num_tokens_main_model):
        return BlockManager.allocate_new_blocks(self, request_id, num_tokens, num_tokens_main_model)


@pytest.mark.parametrize(("manager", "is_told"), [(BlockManager, True), (Unknown, False)])
def test_whether_the_engine_tells_or_not_no_answer_and_no_row_is_ever_wrong(tmp_path, monkeypatch, manager, is_told):
    monkeypatch.setenv("VALVE_ROLE", "offline")
    node = KvNode(tmp_path, columns=10)
    scheduler = hooked(node, blocks=60, manager=manager)
    hook, work, told = scheduler._valve, prompts(2, 24), []

    def rows(step):
        while hook.ledger.tend():
            pass
        book = node.rows()
        for name, table in scheduler.req_to_blocks.items():
            told.append(book[hash(name) & 0xFFFFFFFFFFFFFFFF] == [block.block_id for block in table])

    try:
        done = run(scheduler, work, depth=2, reclaim=Reclaimer(node, scheduler, 2), between=rows)
        assert (hook.ledger.grown is not None, hook.reconciler.receipts.failures) == (is_told, 0)
        assert (scheduler.pool.free_block_queue.found_owner == 0) is is_told
    finally:
        close(scheduler)
        node.stop()
    assert done == run(ToyScheduler(blocks=400), work, depth=2)
    assert len(told) > 50
    assert all(told)


def test_no_row_of_the_book_ever_waits_for_ever_while_others_grow():
    """A thousand requests take a block every sixteen steps, more than the link's thread reads: each has its turn."""
    tables = {f"r{number}": [Block(number)] for number in range(1024)}
    ledger = Ledger(block_tokens=16, current=tables.get, grown=OrderedDict())
    for name, table in tables.items():
        ledger.note((), (), [(name, table)])
    number, behind = 1024, 0
    for step in range(640):
        for name in list(tables)[step % 16 :: 16]:
            tables[name].append(Block(number))
            ledger.grown[number] = name
            number += 1
        ledger.tend()
        behind = max(len(tables[name]) - len(held.blocks) for name, held in ledger.held.items())

        assert behind <= 1024 / TENDED / 16 + 2
    assert behind > 1


def test_a_loss_is_never_judged_by_a_ledger_that_failed_while_the_engine_waited_for_it(monkeypatch):
    """The link's thread has taken in half of a note. The engine asked whether all is well before it waited."""
    table = [Block(3)]
    ledger = Ledger(block_tokens=1, current={"x": table}.get, grown=OrderedDict())
    ledger.note((), (), [("x", table)])
    ledger.tend()
    ledger.note((), ["x"], [])
    with monkeypatch.context() as patches:
        patches.setattr(HolderIndex, "end", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            ledger.tend()

    with pytest.raises(RuntimeError, match="failed"):
        ledger.judge(np.array([3], dtype=np.uint32), 10)
