"""Memory that valved lends and takes back: a reclaim costs one micro-batch at most, and never a byte of the adapter."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from valve_tune.base.lent import REQUEST, LentMemory
from valve_tune.base.memory import NoRoom
from valve_tune.train.build import open_model
from valve_tune.train.report import Answer, End
from valve_tune.train.spec import JobSpec


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return jobs.model_folder(tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory) -> tuple[bytes, int]:
    """(adapter bytes, tiles)"""
    spec, control = jobs.job(model, tmp_path_factory.mktemp("whole")), jobs.At()
    return jobs.finished(spec, control=control), control.asked


BLOCK = 4096


class Reclaiming(LentMemory):
    """A range from which blocks are taken at the borders that `plan` names, as the hook tells it: spoilt and gone at
    once, lent again at the next border. `borders` are counted over the whole job.
    """

    def __init__(self, plan: Callable[[int], bool], blocks: int = 64, returns: bool = True) -> None:
        super().__init__(torch.zeros(blocks * BLOCK, dtype=torch.uint8), BLOCK)
        self.plan, self.returns, self.borders, self.taken_from = plan, returns, 0, 0
        self.at_border = self.reclaim

    def reclaim(self) -> None:
        self.borders += 1
        if self.returns:
            self.release(np.arange(self.blocks, dtype=np.uint32))
        if self.plan(self.borders):
            self.take_away(self.held()[:1] or [0])

    def take_away(self, blocks: list[int]) -> None:
        is_used = bool(set(blocks) & set(self.held()))
        self.taken_from += is_used
        for block in blocks:
            self._range[block * BLOCK : (block + 1) * BLOCK] = 0xFF  # NaN as a float of any width
        if is_used:
            self.discard({REQUEST: 0}, ())
        self.withhold(np.array(blocks, dtype=np.uint32))


def with_memory(memory: LentMemory) -> Callable[[JobSpec], Any]:
    return lambda spec: open_model(spec, memory=memory)


def test_a_reclaim_at_any_tile_costs_one_micro_batch_and_changes_no_byte(
    model: Path, tmp_path: Path, undisturbed
) -> None:
    """Micro-batch k is hit at its tile k + 1, then done again in peace."""
    right, tiles = undisturbed
    each = tiles // 8
    assert each == 8, "one micro-batch for each tile of one"
    hits, at = set(), 0
    for number in range(each):
        if number:  # nothing is kept before the first tile
            hits.add(at + number + 1)
            at += number + 1
        at += each
    memory, events = Reclaiming(hits.__contains__), []
    assert jobs.finished(jobs.job(model, tmp_path), events=events, make_model=with_memory(memory)) == right
    lost = [event.message for event in events if event.kind == "lost"]
    assert memory.taken_from == len(lost) == each - 1
    assert memory.borders == at
    assert memory.held() == []


def test_what_the_last_tile_read_is_never_counted_after_a_reclaim(model: Path, tmp_path: Path, undisturbed) -> None:
    right, tiles = undisturbed
    memory, events, looks = Reclaiming(lambda border: False), [], []

    def late() -> None:
        if memory.borders == tiles // 8:
            looks.append(memory.borders)
            if len(looks) == 2:  # the first was before the last tile
                memory.take_away(memory.held()[:1])

    memory.look = late
    assert jobs.finished(jobs.job(model, tmp_path), events=events, make_model=with_memory(memory)) == right
    assert memory.taken_from == 1
    assert [event.kind for event in events].count("lost") == 1


def test_a_job_without_room_waits_until_more_is_lent_and_can_be_stopped_meanwhile(
    model: Path, tmp_path: Path, undisturbed
) -> None:
    right, _ = undisturbed
    memory, events = Reclaiming(lambda border: False, returns=False), []
    memory.withhold(np.arange(2, 64, dtype=np.uint32))
    looks: list[int] = []

    def lend() -> None:
        memory.reclaim()
        if any(event.kind == "waits" for event in events):
            looks.append(memory.borders)
            if len(looks) == 3:
                memory.release(np.arange(64, dtype=np.uint32))

    memory.at_border = lend
    assert jobs.finished(jobs.job(model, tmp_path / "waits"), events=events, make_model=with_memory(memory)) == right
    assert [event.kind for event in events].count("waits") == 1

    starved = Reclaiming(lambda border: False, returns=False)
    starved.withhold(np.arange(2, 64, dtype=np.uint32))
    events.clear()

    class Until(jobs.At):
        def answer(self) -> Answer:
            return Answer.STOP if any(event.kind == "waits" for event in events) else Answer.GO

    spec = jobs.job(model, tmp_path / "stopped")
    outcome = jobs.train(spec, Until(), events=events, make_model=with_memory(starved))
    assert outcome.end is End.STOPPED
    assert jobs.finished(spec) == right


def test_a_range_too_small_for_one_micro_batch_is_named_and_never_waited_for(model: Path, tmp_path: Path) -> None:
    outcome = jobs.train(jobs.job(model, tmp_path), make_model=with_memory(Reclaiming(lambda border: False, blocks=2)))
    assert outcome.end is End.FAILED
    assert outcome.message.startswith("stash_mib: ")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(1, 5 * BLOCK)),
            st.tuples(st.sampled_from(["give", "withhold", "release"]), st.integers(0, 15)),
        ),
        max_size=40,
    )
)
def test_lent_tensors_never_overlap_and_never_lie_where_nothing_is_lent(acts: list[tuple[str, int]]) -> None:
    memory = LentMemory(torch.zeros(16 * BLOCK, dtype=torch.uint8), BLOCK)
    out: list[torch.Tensor] = []
    lent = set(range(16))
    for act, number in acts:
        if act == "take":
            try:
                out.append(memory.take((number,), torch.uint8, torch.device("cpu")))
            except NoRoom:
                continue
            start = out[-1].data_ptr() - memory._range.data_ptr()
            assert {at // BLOCK for at in range(start, start + number)} <= lent
        elif act == "give" and out:
            memory.give(out.pop(number % len(out)))
        elif act == "withhold":
            memory.withhold(np.array([number], dtype=np.uint32))
            lent.discard(number)
        elif act == "release":
            memory.release(np.array([number], dtype=np.uint32))
            lent.add(number)
        places = sorted((each.data_ptr(), each.data_ptr() + each.numel()) for each in out)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    for each in out:
        memory.give(each)
    memory.settle()
    assert memory.held() == []
    assert memory.room() == len(lent) * BLOCK
