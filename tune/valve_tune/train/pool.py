"""The stash as a borrower of the node's KV pool: one range, backed as far as valved lends, with the engine hook's own
state machine between.

valved sees an offline engine with one request, the micro-batch. It takes blocks that hold nothing first; what it takes
from under the micro-batch costs that micro-batch. With CUDA this has been read, not run.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import torch

from valve_tune.base.lent import REQUEST, LentMemory
from valve_tune.base.weights import BadBase

BLOCK_BYTES = 2 << 20  # what a card maps at least
ANSWER_S = 30.0  # of valved, at the start; the hook waits on where it was met before
HOW = "start the job by valve run --offline or valve tune run where valved answers, or set it to 0"


class NoPool(BadBase):
    """Why this process borrows nothing."""

    def __init__(self, why: str) -> None:
        super().__init__(f"stash_mib: {why}; {HOW}")


def on_card(size: int) -> torch.Tensor:
    """Asked of the driver by torch, so that the shim sees it."""
    from valve_hook.torch_pool import own_pool

    with contextlib.ExitStack() as stack:
        if not own_pool(torch, stack):
            raise NoPool("torch makes no pool of its own for it")
        return torch.empty(size, dtype=torch.uint8, device="cuda")


def borrow(mib: int, allocate: Callable[[int], torch.Tensor] = on_card) -> LentMemory:
    """A range of that size. `allocate` gets it from the driver, as bytes."""
    try:
        from valve_hook import link, shim, wire
        from valve_hook.ledger import Ledger
        from valve_hook.reconciler import Reconciler
    except ImportError as error:
        raise NoPool(f"the engine hook is not here ({error})") from None
    begin, end, step = (shim.shim_call(f"valve_kv_{name}") for name in ("begin", "end", "step"))
    connection = link.process_link()
    if begin is None or end is None or step is None or connection is None:
        raise NoPool("no valved is here")
    if connection.wanted is not None:
        raise NoPool("another job of this process has a stash there already")
    blocks = -(-(mib << 20) // BLOCK_BYTES)
    before = shim.kv_ranges() or 0
    begin(ctypes.c_uint32(wire.KV_ELASTIC))
    try:
        bytes_ = allocate(blocks * BLOCK_BYTES)
    finally:
        end()
    if (shim.kv_ranges() or 0) <= before:
        raise NoPool("the driver gave ordinary memory")
    tensor = link.Tensor(base=bytes_.data_ptr(), block_stride=BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    connection.register_layout(link.BlockLayout(blocks=blocks, block_tokens=1, tensors=[tensor], pinned=()))
    wanted = link.Attach(
        engine="valve-tune",
        mode=wire.Mode.FULL,
        blocks=blocks,
        block_tokens=1,
        rows=1,
        row_blocks=blocks,
        ranks=1,
    )
    if connection.attach(wanted, ANSWER_S) is None:
        raise NoPool(f"valved lends nothing to it ({connection.said})")
    memory = LentMemory(bytes_, BLOCK_BYTES)
    ledger = Ledger(block_tokens=1)
    hook = Reconciler(link=connection, engine=memory, ledger=ledger, blocks=blocks, mode=wire.Mode.FULL)

    def look() -> None:
        if not hook.guard(hook.sync):
            hook.recover()

    def border() -> None:
        held = memory.held()
        hook.guard(lambda: ledger.admit(REQUEST, held) if held else ledger.dismiss(REQUEST))
        look()
        step()
        look()
        hook.guard(hook.publish)

    memory.look, memory.at_border = look, border
    border()
    return memory
