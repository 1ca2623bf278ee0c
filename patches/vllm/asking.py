"""Who asks for a block: the function that knows tells the queue of free blocks, and which requests have grown.

vLLM calls `allocate_new_blocks` for each running request in each step, and most of them need no block. Those are
answered here, with what vLLM would answer and in less time than it takes. Whoever needs a block goes on to vLLM's own
function.

Only where that function reads what it is known to read. Else it stays as it is, and the queue looks at frames.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

METHOD = "allocate_new_blocks"
PARAMETERS = ("self", "request_id", "num_tokens", "num_tokens_main_model")
KNOWN = {
    *("req_to_blocks", "cdiv", "block_size", "len", "block_pool", "get_new_blocks", "extend"),
    *("_partial_hit_reqs", "pop", "_apply_cow", "new_block_ids", "append", "block_id", "_record_new_block_ids"),
}


class ToldQueue(Protocol):
    asker: Any
    is_told: bool


def tell(manager: Any, queue: Callable[[], ToldQueue | None], grown: dict[int, str]) -> bool:
    """Let this manager tell; whether it does. `queue`: who is told now. `grown`: which request took a block, said when
    it held some before.
    """
    function = getattr(type(manager), METHOD, None)
    code = getattr(function, "__code__", None)
    if code is None or code.co_varnames[: code.co_argcount] != PARAMETERS or not KNOWN.issuperset(code.co_names):
        return False
    original, tables, block_tokens = getattr(manager, METHOD), manager.req_to_blocks, int(manager.block_size)
    partial = getattr(manager, "_partial_hit_reqs", ())
    find = tables.get

    def allocate_new_blocks(request_id: str, num_tokens: int, num_tokens_main_model: int) -> Any:
        blocks = find(request_id)
        if blocks and num_tokens <= len(blocks) * block_tokens and request_id not in partial:
            return []
        told = queue()
        if told is not None:
            told.asker = blocks
        try:
            new = original(request_id, num_tokens, num_tokens_main_model)
        finally:
            if told is not None:
                told.asker = None
        if blocks:  # last, for the link's thread may look at once
            for block in new:
                grown[block.block_id] = request_id
        return new

    setattr(manager, METHOD, allocate_new_blocks)
    return True
