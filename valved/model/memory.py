"""Frozen values of the memory side: KV layouts, columns, offline requests, reservation and reclaim decisions.

Flow: the engine registers `KvTensor`s -> policy/columns turns them into `Column`s -> the engine reports
`OfflineRequest`s -> policy/eviction answers with a `ReclaimDecision` -> kv/reclaim carries it out.
Nothing here decides anything; this module imports the standard library only.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, NewType

ColumnId = NewType("ColumnId", int)
"""Index of a column in its ColumnMap; ascending ids are ascending addresses of the first plane."""
HandleIndex = NewType("HandleIndex", int)
"""Index of a VMM handle, counted through all ranges of a layout in registration order."""
RequestId = NewType("RequestId", str)
"""The offline engine's own name of a request."""


class LayoutRefused(ValueError):
    """A registration that cannot be true; `field` names what to correct in the engine plugin."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRange:
    """A reserved virtual address range backed by equal handles, one after another."""

    base_addr: int
    handle_bytes: int
    handles: int

    @property
    def end_addr(self) -> int:
        return self.base_addr + self.handle_bytes * self.handles


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTensor:
    """One registered KV tensor, read from the live tensor's pointer and strides, never from a model name.

    Block b starts at base_addr + sum(i_k * stride_k) + b * block_stride_bytes for every combination of indices i_k of
    `repeats` and is block_bytes long there. That one form covers every layout in use:
      (2, N, ..) per layer       repeats ((2, N * stride),)
      (N, 2, ..) per layer       no repeats, block_bytes == block_stride_bytes
      separate K and V           two tensors
      MLA                        one tensor, stride 73,728 or whatever it is
      layer-outermost, one buffer  repeats ((layers, layer_stride),)
      layer-packed, block-outermost  no repeats, block_bytes covers all layers
    """

    base_addr: int
    block_stride_bytes: int
    block_bytes: int
    repeats: tuple[tuple[int, int], ...] = ()
    """(count, stride in bytes), outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteSpan:
    """Addresses [first, stop)."""

    first: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpan:
    """Block ids [first, stop)."""

    first: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Everything an engine says about its KV memory on one GPU."""

    ranges: tuple[KvRange, ...]
    tensors: tuple[KvTensor, ...]
    blocks: int
    block_tokens: int
    pinned_blocks: tuple[int, ...] = ()
    """Null and padding blocks (vLLM block 0, SGLang slot 0): written by padding and graph capture, never taken."""
    unreclaimable: tuple[ByteSpan, ...] = ()
    """Spans registered with a NIC or exported: a remap would let foreign writes into memory that changed owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The handles that back one block range in every layer and both K and V: the unit of reclaim."""

    column_id: ColumnId
    handles: tuple[HandleIndex, ...]
    blocks: tuple[BlockSpan, ...]
    """Blocks with at least one byte in the handles; a block that straddles a border is in both columns."""
    is_reclaimable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRequest:
    """A request of the offline engine: its blocks in token order and how many tokens have KV in them."""

    request_id: RequestId
    blocks: tuple[int, ...]
    tokens: int


class EvictionCost(enum.Enum):
    """What losing a column costs; every choice is a sum over chains of the worst loss that a chosen column causes."""

    REQUESTS = "requests"
    """One for each request hit (baseline)."""
    TOKENS = "tokens"
    """All tokens of each request hit (the paper)."""
    PREFIX_TOKENS = "prefix-tokens"
    """Tokens behind the first lost block; shared blocks count once."""
    RECOMPUTE_NS = "recompute-ns"
    """Time to compute those tokens again, attention included (default)."""


class ColumnPick(NamedTuple):
    """One step of a selection. A tuple: a reclaim of small handles makes hundreds while a service waits."""

    column_id: ColumnId
    marginal_cost: int
    """In the unit of the decision's cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimDecision:
    """Which columns to take, in order, and why."""

    policy: str
    cost: EvictionCost | None
    picks: tuple[ColumnPick, ...]
    needed_handles: int
    freed_handles: int
    total_cost: int
    reason: str

    @property
    def columns(self) -> tuple[ColumnId, ...]:
        return tuple(pick.column_id for pick in self.picks)

    @property
    def missing_handles(self) -> int:
        """Handles that no reclaimable column could give."""
        return max(0, self.needed_handles - self.freed_handles)


class ReservationAction(enum.Enum):
    HOLD = "hold"
    TAKE = "take"
    GIVE = "give"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineMemory:
    """What one GPU's online side holds at the moment of a decision."""

    used_handles: int
    mapped_handles: int
    """Mapped for online or on the way to it; used + headroom."""
    unmet_handles: int = 0
    """Handles that an allocation asks for right now beyond what is mapped."""
    free_handles: int = 0
    """Handles that nobody uses: taking them disturbs no offline work."""
    peak_handles: int = 0
    """Most in use at once since the last look, where the caller knows it: use that came and went between two looks."""
    pool_handles: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UseHistory:
    """What `policy/usage.py` has learned of a service's use of memory, in handles and seconds."""

    noted_ns: int = 0
    """Up to when; 0: it begins at the next look."""
    recent: tuple[int, ...] = ()
    """Use in the last seconds, oldest first."""
    sums: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """Weighted over seconds: 1, use, highest use of the next seconds, use squared, use times that highest use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationState:
    """What the reservation policy remembers between decisions; survives a restart in the state file."""

    headroom_handles: int
    tau_ns: int
    quiet_since_ns: int
    """Last pressure or lowering of the headroom: tau counts from here."""
    adjusted_ns: int
    """Last additive step of tau."""
    reclaims_ns: tuple[int, ...] = ()
    """Times of the reclaims inside the sliding window, oldest first."""
    used_handles: int = 0
    """In use at the last look."""
    peaks: tuple[tuple[int, int], ...] = ()
    """(since, most handles in use) of the slices of the last tau, oldest first."""
    exact_handles: float = 0.0
    """The headroom with its fraction, where the rule moves it by less than a handle."""
    looked_ns: int = 0
    """When the rule last moved it."""
    began_ns: int = 0
    """Since when reclaims are counted."""
    history: UseHistory = UseHistory()
    handle_bytes: int = 0
    """Of what is counted here; 0: a predecessor did not say."""

    @property
    def newest_ns(self) -> int:
        """Of all times in it."""
        times = self.quiet_since_ns, self.adjusted_ns, self.looked_ns, self.began_ns
        return max(*times, *self.reclaims_ns, *(since_ns for since_ns, _ in self.peaks))


class ReservationRule(str, enum.Enum):
    """How the headroom follows the load."""

    BUDGET = "budget"  # up at a reclaim, down with time, so that reclaims come at the rate that the operator accepts
    MIAD = "miad"  # doubled at pressure, less by one each quiet tau: as published


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationDecision:
    """Take handles from offline, give some back, or hold; with the inputs that led to it."""

    action: ReservationAction
    handles: int
    is_reclaim: bool
    headroom_handles: int
    tau_ns: int
    reclaims_per_hour: float
    memory: OnlineMemory
    reason: str
