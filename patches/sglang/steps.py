"""Which pages the steps in flight read and write: looked at when something is lost, and until then hardly noted.

Rows of SGLang's page table are on the device and change under a step: a request that leaves frees its row, and one
whose prompt turns out to be cached already has its pages replaced by the cache's. Both are rare, and both go through
the pool. So a step keeps only which rows it uses, and a row is copied when it is about to change under a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from valve_hook.ledger import Judgement, Ledger
from valve_hook.shared import Blocks

Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]
NOTHING_WRITTEN = 1 << 40  # index of the first page that is written, where none is


@dataclass(slots=True, kw_only=True)
class Launched:
    """One step, from its launch until a loss can have been noticed after its output came in."""

    requests: list[Any]
    rows: Numbers  # of each request, in the page table
    lengths: Numbers  # tokens of each request after this step
    starts: Sequence[int] | None  # where each begins to write; None: its last token only
    kept: dict[int, Any] = field(default_factory=dict)  # row -> its pages as the step has them, where it has changed
    dropped: set[str] = field(default_factory=set)  # retracted since: their output of it is not to be believed
    ended: int = 0  # requests that ended while this step of theirs was in flight
    is_in: bool = False  # its output has come in
    is_read: bool = True  # False: what it reads and writes is not known
    number: int = 0  # of all steps


def launched(batch: Any) -> Launched:
    requests = batch.reqs[:]
    return Launched(
        requests=requests,
        rows=batch.req_pool_indices_cpu.numpy()[: len(requests)],
        lengths=batch.seq_lens_cpu.numpy()[: len(requests)],
        starts=list(batch.prefix_lens) if batch.forward_mode.is_extend() else None,
    )


def note_computed(requests: Iterable[Any]) -> None:
    """They are sent back, and have computed so much; the note goes with the request, however it ends."""
    for each in requests:
        each._valve_computed = each.kv.kv_committed_len


def computed_again(step: Launched) -> int:
    """By requests that were sent back and begin anew in this step: what they had, less what the cache still holds."""
    starts = zip(step.requests, step.starts or (), strict=False)
    return sum(max(0, vars(each).pop("_valve_computed", 0) - start) for each, start in starts)


def on_device(table: Any, mask: Mask) -> Any:
    """The mask beside the table, so that it is looked up there and only the answer comes back."""
    return table[:0].bool().new_tensor(mask)


def look_up(mask: Any, pages: Any) -> Any:
    """Flat. On a CPU indexing by a matrix takes three times as long as this."""
    return mask.index_select(0, pages.reshape(-1))


@dataclass(slots=True, kw_only=True)
class Holders:
    """Requests that hold pages now: their page table rows as one matrix on the device, with junk behind a row's end."""

    names: list[str]
    pages: Any
    counts: Numbers
    first: Numbers  # index of the first page that a step in flight writes

    def written(self) -> tuple[Numbers, Numbers]:
        """(row, page) of all that steps in flight write."""
        lengths = np.maximum(self.counts - self.first, 0)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + self.first[rows]
        return rows, self._at(rows, columns)

    def find(self, wanted: Mask) -> tuple[Numbers, Numbers, Numbers]:
        """(row, column, page) wherever one of these stands, row by row. The only look at the whole matrix."""
        width = int(self.pages.shape[1])
        if not (self.names and width):
            return (np.zeros(0, dtype=np.int64),) * 3
        found = np.flatnonzero(look_up(on_device(self.pages, wanted), self.pages).cpu().numpy())
        rows, columns = np.divmod(found, width)
        is_in_row = columns < self.counts[rows]
        rows, columns = rows[is_in_row], columns[is_in_row]
        return rows, columns, self._at(rows, columns)

    def _at(self, rows: Numbers, columns: Numbers) -> Numbers:
        return np.asarray(self.pages[rows, columns].cpu().numpy(), dtype=np.int64)


@dataclass(slots=True, kw_only=True)
class StepLedger(Ledger):
    """A ledger that keeps no accounts: it looks at the engine's page table when asked, and at what steps have kept."""

    requests: Callable[[], list[Any]]  # those that hold pages now
    page_table: Any
    flying: list[Launched] = field(default_factory=list)
    ended: int = 0  # requests, ever
    begun: int = 0  # steps, ever
    _is_blind: bool = False
    _last: tuple[Blocks, Judgement] | None = None  # valid until a row or the steps in flight change

    def begin_unread(self, requests: Iterable[Any]) -> None:
        """A step that cannot be read runs all the same. One that is not in flight counts as over, and what it touches
        would be offered.
        """
        none = np.zeros(0, dtype=np.int64)
        self._launch(Launched(requests=list(requests), rows=none, lengths=none, starts=None, is_read=False))

    def begin_step(self, step: Launched) -> int:
        """Returns how many tokens are computed a second time in it."""
        self._launch(step)
        return computed_again(step)

    def _launch(self, step: Launched) -> None:
        """Two are in flight at most; should one's output never come, it is not kept for ever."""
        step.number = self.begun + 1
        self.flying, self._last = [*self.flying[-3:], step], None
        self.begun = step.number

    @property
    def launched(self) -> int:
        return self.begun

    def is_over(self, launched: int) -> bool:
        return all(step.is_in or step.number > launched for step in self.flying)

    def end_steps(self, in_flight: int) -> None:
        """Those whose output has come in and was judged; and all but the last `in_flight`: an output that could not be
        told from another one's leaves no step in flight for ever.
        """
        flying = [step for step in self.flying if not step.is_in]
        self.flying, self._last = flying[max(0, len(flying) - in_flight) :], None

    def clear(self) -> None:
        """Nothing is in flight."""
        self.flying, self._last, self._is_blind = [], None, False

    def settle(self, names: set[str]) -> None:
        """What they wrote in steps in flight has been judged; output of theirs that still comes in is not believed."""
        self._last = None
        for step in self.flying:
            step.dropped |= names

    def keep(self, row: int, *, has_ended: bool = False) -> None:
        """This row is about to change. SGLang calls us here: nothing is raised, but the next loss counts for all."""
        self._last = None
        self.ended += has_ended
        try:
            for step in self.flying:
                self._keep(step, row, has_ended)
        except Exception:
            self._is_blind = True

    def _keep(self, step: Launched, row: int, has_ended: bool) -> None:
        found = np.flatnonzero(step.rows == row)
        if not len(found):
            return
        place = int(found[0])
        step.ended += has_ended and not step.is_in
        if row not in step.kept and step.requests[place].rid not in step.dropped:
            step.kept[row] = self.page_table[row, : step.lengths[place] : self.block_tokens].clone()

    def judge(self, lost: Blocks, blocks: int) -> Judgement:
        """As `losses.spread`, on a matrix. Asked again about the same with nothing changed, the answer is at hand."""
        if self._is_blind:
            raise RuntimeError("a row of the page table changed unseen")
        if not all(step.is_read for step in self.flying):
            raise RuntimeError("it is not known what a step in flight writes")
        if self._last is not None and np.array_equal(self._last[0], lost):
            return self._last[1]
        now, left = self._holders()
        writers, written = now.written()
        bad, wanted = np.zeros(blocks, dtype=bool), np.zeros(blocks, dtype=bool)
        wanted[lost] = wanted[written] = True
        for _, pages, first in left:
            wanted[pages[first:]] = True
        rows, columns, found = now.find(wanted)
        is_hit = np.zeros(len(now.names), dtype=bool)
        hit_left: set[str] = set()
        fresh = lost
        while len(fresh):
            bad[fresh], bad[0] = True, False
            is_hit[rows[bad[found]]] = True
            spoilt = [written[is_hit[writers]]]
            for name, pages, first in left:
                if bad[pages].any():
                    hit_left.add(name)
                    spoilt.append(pages[first:])
            fresh = np.concatenate(spoilt)
            fresh = fresh[~bad[fresh] & (fresh != 0)]
        hit, where = np.unique(rows[bad[found]], return_index=True)
        answer = Judgement(
            running={now.names[row]: int(sound) for row, sound in zip(hit, columns[bad[found]][where], strict=True)},
            left=frozenset(hit_left),
            bad=np.flatnonzero(bad).astype(np.uint32),
        )
        self._last = lost.copy(), answer
        return answer

    def _holders(self) -> tuple[Holders, list[tuple[str, Numbers, int]]]:
        """Requests that hold pages now, and (name, pages, index of the first that is written) if a step has others."""
        requests = self.requests()
        rows = np.array([each.kv.req_pool_idx for each in requests], dtype=np.int64)
        lengths = np.array([each.kv.kv_allocated_len for each in requests], dtype=np.int64)
        slots = self.page_table[:, : int(lengths.max(initial=0)) : self.block_tokens]
        slots = slots.index_select(0, self.page_table.new_tensor(rows))
        counts = -(-lengths // self.block_tokens)
        first = np.full(len(rows), NOTHING_WRITTEN)
        place_of = np.full(len(self.page_table), -1)
        place_of[rows] = np.arange(len(rows))
        left = []
        for step in self.flying:
            for place in self._others(step, place_of, first):
                pages = step.kept.get(int(step.rows[place]))
                if pages is None:
                    pages = self.page_table[step.rows[place], : step.lengths[place] : self.block_tokens]
                pages = pages.cpu().numpy().astype(np.int64) // self.block_tokens
                left.append((step.requests[place].rid, pages, int(self._first_written(step)[place])))
        pages = slots // self.block_tokens if self.block_tokens > 1 else slots
        return Holders(names=[each.rid for each in requests], pages=pages, counts=counts, first=first), left

    def _others(self, step: Launched, place_of: Numbers, first: Numbers) -> list[int]:
        """The places of a step whose row is not what a holder has now; the rest tells the holder what it writes."""
        places = place_of[step.rows]
        if step.kept:
            places[np.isin(step.rows, list(step.kept))] = -1
        is_meant = np.ones(len(places), dtype=bool)
        if step.dropped:
            is_meant = np.array([each.rid not in step.dropped for each in step.requests])
        same = is_meant & (places >= 0)
        written = self._first_written(step)
        first[places[same]] = np.minimum(first[places[same]], written[same])
        return [int(place) for place in np.flatnonzero(is_meant & ~same)]

    def _first_written(self, step: Launched) -> Numbers:
        """Of each request, the index of the first page that this step writes."""
        last = step.lengths - 1
        return (last if step.starts is None else np.minimum(step.starts, last)) // self.block_tokens
