"""What selection and hand-out keep for any pool, checked against plain references."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from valve_tools.sim import eviction_rivals

from valved.model.memory import EvictionCost, KvLayout, KvRange, KvTensor, OfflineRequest, RequestId
from valved.policy.columns import ColumnMap, columns_of, uniform_columns
from valved.policy.eviction import BlockTables, EvictionSettings, index_requests, select
from valved.policy.handout import ColumnFreeList, choose_column

BLOCK_TOKENS = 16
COSTS = st.sampled_from(list(EvictionCost))


@st.composite
def pools(draw: st.DrawFn, max_columns: int = 8) -> tuple[ColumnMap, list[OfflineRequest]]:
    """Requests with private blocks in any order, some behind a shared and possibly branching prefix."""
    columns = draw(st.integers(1, max_columns))
    straddling = draw(st.booleans())
    column_map = mla_columns(columns) if straddling else uniform_columns(columns, 4, pinned=draw(st.integers(0, 1)))
    order = draw(st.permutations(range(column_map.blocks)))
    cuts = draw(st.lists(st.integers(1, 9), max_size=8))
    pieces: list[tuple[int, ...]] = []
    for length in cuts:
        start = sum(map(len, pieces))
        pieces.append(tuple(order[start : start + length]))
    pieces = [piece for piece in pieces if piece]
    requests: list[OfflineRequest] = []
    prefixes: list[tuple[int, ...]] = [()]
    for number, piece in enumerate(pieces):
        prefix = draw(st.sampled_from(prefixes))
        if draw(st.integers(0, 3)) == 0 and number < len(pieces) - 1:
            prefixes.append(prefix + piece)
            continue
        blocks = prefix + piece
        spare = draw(st.integers(0, BLOCK_TOKENS - 1))
        requests.append(
            OfflineRequest(request_id=RequestId(str(number)), blocks=blocks, tokens=len(blocks) * BLOCK_TOKENS - spare)
        )
    return column_map, requests


def mla_columns(handles: int) -> ColumnMap:
    """Blocks of 3 bytes on handles of 8: every third handle border falls inside a block."""
    tensor = KvTensor(base_addr=0, block_stride_bytes=3, block_bytes=3)
    blocks = handles * 8 // 3
    kv = KvRange(base_addr=0, handle_bytes=8, handles=handles)
    return columns_of(KvLayout(ranges=(kv,), tensors=(tensor,), blocks=blocks, block_tokens=BLOCK_TOKENS))


def reference_cost(
    column_map: ColumnMap, requests: list[OfflineRequest], taken: list[int], priced: EvictionSettings
) -> int:
    """The definition, block by block: what must be computed again when these columns are lost."""
    lost = {
        block
        for column in taken
        for span in column_map.columns[column].blocks
        for block in range(span.first, span.stop)
    }
    hit = [one for one in requests if lost.intersection(one.blocks)]
    if priced.cost is EvictionCost.REQUESTS:
        return len(hit)
    if priced.cost is EvictionCost.TOKENS:
        return sum(one.tokens for one in hit)
    again: dict[int, tuple[int, int]] = {}
    for one in hit:
        first = min(i for i, block in enumerate(one.blocks) if block in lost)
        for i, block in enumerate(one.blocks[first:], start=first):
            again[block] = (min(i * BLOCK_TOKENS, one.tokens), min((i + 1) * BLOCK_TOKENS, one.tokens))
    return sum(price(stop, priced) - price(start, priced) for start, stop in again.values())


def price(tokens: int, priced: EvictionSettings) -> int:
    if priced.cost is EvictionCost.PREFIX_TOKENS:
        return tokens
    return priced.token_ns * tokens + priced.attention_ps_per_pair * tokens * tokens // 2000


@given(pool=pools(), cost=COSTS, needed=st.integers(0, 10))
@settings(deadline=None, max_examples=150)
def test_every_step_takes_a_cheapest_column(
    pool: tuple[ColumnMap, list[OfflineRequest]], cost: EvictionCost, needed: int
) -> None:
    column_map, requests = pool
    priced = EvictionSettings(cost=cost, attention_ps_per_pair=2000)

    decision = select(index_requests(column_map, BlockTables.of(requests), priced), needed)

    taken: list[int] = []
    for pick in decision.picks:
        so_far = reference_cost(column_map, requests, taken, priced)
        left = [i for i in range(len(column_map.columns)) if column_map.is_reclaimable[i] and i not in taken]
        marginal = {i: reference_cost(column_map, requests, [*taken, i], priced) - so_far for i in left}
        assert pick.column_id in marginal
        assert marginal[pick.column_id] == min(marginal.values()) == pick.marginal_cost
        taken.append(pick.column_id)


@given(pool=pools(), cost=COSTS, needed=st.integers(0, 10), seed=st.integers(0, 5))
@settings(deadline=None)
def test_the_books_of_every_policy_balance(
    pool: tuple[ColumnMap, list[OfflineRequest]], cost: EvictionCost, needed: int, seed: int
) -> None:
    """No column twice, none that is pinned, as many handles as asked for or all there are, cost as by definition."""
    column_map, requests = pool
    priced = EvictionSettings(cost=cost, attention_ps_per_pair=2000)
    index = index_requests(column_map, BlockTables.of(requests), priced)

    for decision in (
        select(index, needed),
        eviction_rivals.shuffled(index, seed, needed),
        eviction_rivals.exact(index, needed),
    ):
        assert len(decision.columns) == len(set(decision.columns))
        assert all(column_map.is_reclaimable[column] for column in decision.columns)
        assert decision.freed_handles == sum(len(column_map.columns[one].handles) for one in decision.columns)
        at_most = int(column_map.handles_of_column[column_map.is_reclaimable].sum())
        assert decision.freed_handles >= min(needed, at_most)
        assert decision.missing_handles == max(0, needed - at_most)
        assert decision.total_cost == reference_cost(column_map, requests, list(decision.columns), priced)


@given(pool=pools(max_columns=6), cost=COSTS, needed=st.integers(1, 5))
@settings(deadline=None)
def test_greedy_never_beats_the_exact_optimum(
    pool: tuple[ColumnMap, list[OfflineRequest]], cost: EvictionCost, needed: int
) -> None:
    index = index_requests(pool[0], BlockTables.of(pool[1]), EvictionSettings(cost=cost))

    best = eviction_rivals.exact(index, needed)

    assert best.total_cost <= select(index, needed).total_cost
    assert best.total_cost <= eviction_rivals.shuffled(index, 0, needed).total_cost


@given(
    stride=st.integers(1, 50),
    block=st.integers(1, 50),
    handle=st.integers(8, 64),
    blocks=st.integers(1, 60),
    base=st.integers(0, 30),
    halves=st.integers(1, 3),
)
@settings(deadline=None)
def test_columns_say_exactly_which_blocks_a_handle_backs(
    stride: int, block: int, handle: int, blocks: int, base: int, halves: int
) -> None:
    """Against a byte-by-byte reference: handles are split among columns, blocks stand where their bytes are."""
    stride = min(max(stride, block), block + block // 3)  # up to a quarter of it is padding
    size = blocks * stride
    count = -(-(base + halves * size) // handle)
    tensor = KvTensor(base_addr=base, block_stride_bytes=stride, block_bytes=block, repeats=((halves, size),))
    kv = KvRange(base_addr=0, handle_bytes=handle, handles=count)

    columns = columns_of(KvLayout(ranges=(kv,), tensors=(tensor,), blocks=blocks, block_tokens=1)).columns

    backed: dict[int, set[int]] = {}
    for half in range(halves):
        for b in range(blocks):
            start = base + half * size + b * stride
            for touched in range(start // handle, (start + block - 1) // handle + 1):
                backed.setdefault(touched, set()).add(b)
    assert sorted(backed) == sorted(one for column in columns for one in column.handles)
    for column in columns:
        said = {b for span in column.blocks for b in range(span.first, span.stop)}
        assert said == set().union(*(backed[one] for one in column.handles))


class FreeList(RuleBasedStateMachine):
    """An engine that takes, grows, frees, and loses and regains columns."""

    @initialize(columns=st.integers(1, 6), per_column=st.integers(1, 5), reserved=st.integers(0, 1))
    def begin(self, columns: int, per_column: int, reserved: int) -> None:
        self.column_of = [i // per_column for i in range(columns * per_column)]
        self.free = ColumnFreeList(self.column_of, reserved=range(reserved))
        self.held: list[list[int]] = []
        self.withheld: set[int] = set()

    @rule(count=st.integers(1, 8))
    def admit(self, count: int) -> None:
        if count <= len(self.free):
            self.held.append(self.take(count, None))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100), count=st.integers(1, 3))
    def grow(self, which: int, count: int) -> None:
        blocks = self.held[which % len(self.held)]
        if count <= len(self.free):
            blocks += self.take(count, blocks[-1])

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def finish(self, which: int) -> None:
        self.free.give(self.held.pop(which % len(self.held)))

    @rule(column=st.integers(0, 5))
    def lose_or_regain(self, column: int) -> None:
        if column >= len(self.free.free_counts()):
            return
        if column in self.withheld:
            self.free.restore(column)
        else:
            self.free.withhold(column)
        self.withheld ^= {column}

    def take(self, count: int, last: int | None) -> list[int]:
        expected: list[int] = []
        counts = self.free.free_counts()
        current = None if last is None else self.column_of[last]
        for _ in range(count):
            current = choose_column(counts, current)
            assert current is not None
            counts[current] -= 1
            expected.append(current)
        taken = self.free.take(count, last)
        assert expected == [self.column_of[block] for block in taken], "the list departs from the rule"
        return taken

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "free"):
            self.free.check_integrity([block for blocks in self.held for block in blocks])
            assert not any(self.free.free_counts()[column] for column in self.withheld)


TestFreeList = FreeList.TestCase
TestFreeList.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
