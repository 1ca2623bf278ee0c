"""What the output of a vLLM's step says that is out of the ordinary, for the asking half of granted time.

Between most steps nothing changes: the same requests are in both, and each reads. Such a step is looked at for ends
alone, which costs a third of looking at each request's name and tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from valve_hook.followed import Row


class StepRows:
    """Of one Scheduler. What must hold of it: no drafts (pauses.why_not), so that an output has one token at most; and
    no output for a request that got none and goes on.
    """

    def __init__(self) -> None:
        self._steady: list[str] = []  # the step before was for these: all readers, and no other reads
        self._reading: Collection[str] = ()  # whose readers they are

    def told(
        self, scheduled: Collection[str], batches: Collection[Any], reading: Collection[str]
    ) -> tuple[list[Row], int, Collection[str]]:
        """What is out of the ordinary in a step's output, how many of `reading` got one token and go on, and, unless
        all of them did, the requests that the output is for: one that is at its prompt again is in the step, and gets
        none."""
        names, count = list(scheduled), sum(len(batch.outputs) for batch in batches)
        is_whole = count == len(names) == len(reading)
        if is_whole and self._reading is reading and names == self._steady:
            odd = [row(each) for batch in batches for each in batch.outputs if each.finish_reason is not None]
        else:
            odd = [
                row(each)
                for batch in batches
                for each in batch.outputs
                if each.finish_reason is not None or len(each.new_token_ids) != 1 or each.request_id not in reading
            ]
        self._steady, self._reading = names if is_whole and not odd else [], reading
        plain = count - len(odd)
        # A request that ends got a token: no reason to look at all others by name.
        if plain + sum(tokens > 0 and name in reading for name, tokens, _ in odd) >= len(reading):
            return odd, plain, ()
        return odd, plain, {each.request_id for batch in batches for each in batch.outputs}


def row(output: Any) -> Row:
    return output.request_id, len(output.new_token_ids), output.finish_reason is not None
