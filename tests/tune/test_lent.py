"""Memory that valved lends and takes back: a reclaim costs one micro-batch at most, and never a byte of the adapter."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_job import model, undisturbed
from valve_tune.base.lent import REQUEST, LentMemory
from valve_tune.base.memory import NoRoom
from valve_tune.train.build import open_model
from valve_tune.train.job import Trainer
from valve_tune.train.report import Answer, End
from valve_tune.train.spec import JobSpec

BLOCK = 4096
__all__ = ["model", "undisturbed"]  # fixtures


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


def resident(model: Path, out: Path, **more: Any) -> JobSpec:
    return jobs.job(model, out, resident_layers=3, **more)


def test_a_reclaim_of_resident_layers_costs_one_micro_batch_and_changes_no_byte(
    model: Path, tmp_path: Path, undisturbed
) -> None:
    """At every border of the job in turn; sometimes a block of the stash is hit, sometimes one of the weights."""
    right, _ = undisturbed
    for first in (2, 5, 7, 9, 10):
        memory, events = Reclaiming(lambda border, first=first: border % 11 == first % 11), []
        spec = resident(model, tmp_path / str(first))
        memory.take_away = (
            lambda blocks, memory=memory, first=first: Reclaiming.take_away(  # type: ignore[method-assign]
                memory, memory.held()[first % len(memory.held() or [0]) :][:1] or blocks
            )
        )
        assert jobs.finished(spec, events=events, make_model=with_memory(memory)) == right, first
        lost = [event.message for event in events if event.kind == "lost"]
        assert memory.taken_from
        assert 0 < len(lost) <= memory.taken_from


def test_layers_taken_before_the_stash_begins_are_never_read(model: Path, tmp_path: Path, undisturbed) -> None:
    right, _ = undisturbed
    memory, events, made = Reclaiming(lambda border: False), [], []

    def make(spec: JobSpec) -> Any:
        built = open_model(spec, memory=memory)
        start = built.start

        def late(*given: Any, **named: Any) -> Any:
            made.append(built)
            if len(made) == 3:
                memory.take_away(memory.held()[:2])  # after room was found, before the stash reads its generation
            return start(*given, **named)

        built.start = late
        return built

    assert jobs.finished(resident(model, tmp_path), events=events, make_model=make) == right
    (lost,) = [event.message for event in events if event.kind == "lost"]
    assert lost.endswith("memory of resident layers was reclaimed; it is done again")


def blocks_a_layer(model: Path, out: Path) -> int:
    return -(-open_model(resident(model, out), memory=Reclaiming(lambda border: False)).weights.least_bytes // BLOCK)


def test_the_window_is_what_is_lent_beside_the_stash(model: Path, tmp_path: Path, undisturbed) -> None:
    """Little is lent at first: one layer at a time is there; then more, until all are and nothing is read again."""
    right, _ = undisturbed
    memory = Reclaiming(lambda border: False, blocks=256, returns=False)
    built: list[Any] = []
    seen: list[int] = []

    def make(spec: JobSpec) -> Any:
        built.append(open_model(spec, memory=memory))
        return built[0]

    spec = resident(model, tmp_path)
    layer = blocks_a_layer(model, tmp_path)
    memory.withhold(np.arange(24 + layer, 256, dtype=np.uint32))

    def lend(event: Any) -> None:
        if event.kind == "step":
            seen.append(built[0].weights.window)
            memory.release(np.arange(24 + (1 + event.step) * layer, dtype=np.uint32))

    assert Trainer(spec, jobs.Counting(spec), events=lend, make_model=make).run().end is End.DONE
    assert jobs.adapter_bytes(spec) == right
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (1, 3)
    assert all(0 <= start < end <= memory.limit() for start, end in memory._taken)


def test_a_job_follows_what_is_lent_and_waits_while_that_is_nothing(model: Path, tmp_path: Path, undisturbed) -> None:
    """Between two steps, what is lent is another amount: for a moment nothing, then enough for a random window."""
    right, _ = undisturbed
    memory, chance = Reclaiming(lambda border: False, blocks=256, returns=False), random.Random(1)
    events: list[Any] = []
    windows: list[int] = []
    built: list[Any] = []
    layer = blocks_a_layer(model, tmp_path)

    def make(spec: JobSpec) -> Any:
        built.append(open_model(spec, memory=memory))
        return built[0]

    def lend() -> None:
        if not memory.room() and not memory.held():
            memory.release(np.arange(24 + chance.randint(1, 3) * layer, dtype=np.uint32))

    def see(event: Any) -> None:
        events.append(event)
        if event.kind == "step":
            windows.append(built[0].weights.window)
            memory.take_away(list(range(256)))

    memory.at_border = lend
    spec = resident(model, tmp_path)
    assert Trainer(spec, jobs.Counting(spec), events=see, make_model=make).run().end is End.DONE
    assert jobs.adapter_bytes(spec) == right
    assert [event.kind for event in events].count("waits") == len(windows) - 1
    assert len(set(windows)) > 1, windows


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_lent_window_loads_what_lies_outside_it_twice_a_micro_batch_and_nothing_else(
    model: Path, tmp_path: Path, window: int
) -> None:
    memory, built = Reclaiming(lambda border: False, blocks=256), []

    def make(spec: JobSpec) -> Any:
        built.append(open_model(spec, memory=memory))
        return built[0]

    spec = jobs.job(model, tmp_path / "lent", resident_layers=window, span=0)
    assert jobs.finished(spec, make_model=make) == jobs.finished(jobs.job(model, tmp_path / "own", span=0))
    layers, micro_batches = built[0].layers, 8
    assert built[0].weights.loads == window + micro_batches * 2 * (layers - window)


def test_a_window_without_a_pool_is_of_the_size_that_was_asked_for(model: Path, tmp_path: Path, undisturbed) -> None:
    spec = jobs.job(model, tmp_path, resident_layers=2)
    assert jobs.finished(spec) == undisturbed[0]
    made = open_model(spec)
    assert (made.weights.resident, made.weights.lent_bytes) == ([0, 1], 0)


def test_a_window_over_a_family_that_is_not_written_out_is_refused_by_name(tmp_path: Path) -> None:
    import test_autograd

    test_autograd.loaded("olmo2").save_pretrained(tmp_path / "base")
    outcome = jobs.train(jobs.job(tmp_path / "base", tmp_path / "out", span=0, resident_layers=1))
    assert outcome.end is End.FAILED
    assert outcome.message.startswith("resident_layers: ")
