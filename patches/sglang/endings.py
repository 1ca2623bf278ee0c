"""Requests that are to end when they are sent back: their client has left, or something else has ended them.

SGLang notes such an end on the request and carries it out with its next output, or before the next chunk of its prompt.
A request that is sent back has neither: in the queue it would wait for memory only to end, or the end is forgotten.
"""

from __future__ import annotations

from typing import Any


def ends(scheduler: Any, request: Any) -> bool:
    """Of a request that holds no pages: whether it was to end. Then it has ended, and is not to be queued."""
    if request is scheduler._pending_chunked_abort_req:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        request.to_finish = request.to_finish or FINISH_ABORT("Aborted")
    if request.to_finish is None:
        return False
    tell(scheduler, request)
    return True


def tell(scheduler: Any, request: Any) -> None:
    """Its client is told why it ends."""
    from sglang.srt.managers.io_struct import AbortReq

    why = request.to_finish.to_json()
    scheduler.send_abort_output(AbortReq(rid=request.rid, finished_reason=why), request)
