"""Which request asks for a block: vLLM's own function tells the queue of free blocks, and which requests have grown.

vLLM calls `allocate_new_blocks` for each running request in each step, and most of them need no block. Those are
answered here, with what vLLM would answer and in less time than it takes. A request that needs a block goes on to
vLLM's own function.

Only where that function is, statement by statement, the one that was read (KNOWN). Else it stays as it is, the log
names it, and the queue looks at frames.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import logging
import textwrap
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger("valve")
METHOD = "allocate_new_blocks"
KNOWN = {"4e49f5f07d1372dd"}  # of vLLM 0.29 to 0.33
TYPES = {"annotation", "returns"}


class ToldQueue(Protocol):
    asker: Any
    is_told: bool


def digest(source: str) -> str:
    """Of what a function does: its statements, without comments, types and what it says of itself. The same for every
    Python.
    """
    (tree,) = ast.parse(textwrap.dedent(source)).body
    if isinstance(tree, ast.FunctionDef) and ast.get_docstring(tree) is not None:
        del tree.body[0]
    return hashlib.sha256(_text(tree).encode()).hexdigest()[:16]


def _text(node: Any) -> str:
    if isinstance(node, list):
        return f"[{' '.join(map(_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in TYPES and value not in (None, []))
    return f"({type(node).__name__} {' '.join(f'{name}={_text(value)}' for name, value in fields)})"


def is_known(manager: Any) -> bool:
    function = getattr(type(manager), METHOD, None)
    try:  # of the code that runs: what wraps another function has its own
        return function is not None and digest(inspect.getsource(function.__code__)) in KNOWN
    except (AttributeError, OSError, SyntaxError, ValueError):  # it has none, or none that can be read
        return False


def tell(manager: Any, queue: Callable[[], ToldQueue | None], grown: dict[int, str]) -> bool:
    """Let this manager tell; whether it does. `queue`: the queue that is told now. `grown`: which request took a
    block, said when it held some before.
    """
    if not is_known(manager):
        name = f"{type(manager).__name__}.{METHOD}"
        log.warning("valve: %s is not as in the releases that the hook knows: each step costs a little more", name)
        return False
    original, tables, block_tokens = getattr(manager, METHOD), manager.req_to_blocks, int(manager.block_size)
    partial = manager._partial_hit_reqs
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
