"""Every state that a small model can reach, and what is wrong in any."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

State = TypeVar("State", bound=Hashable)


def explore(
    start: State,
    work: Callable[[State], Iterable[State]],
    whims: Callable[[State], Iterable[State]],
    wrong: Callable[[State, bool], str],
    enough: str = "",
) -> tuple[int, set[str]]:
    """`work` is what must happen some time, `whims` what may at any time or never. A state without work is still:
    `wrong` is told so. How many states there are, and all that was found; once `enough` was found the search ends."""
    seen, todo, found = {start}, [start], set()
    while todo and not (enough and enough in found):
        state = todo.pop()
        due = list(work(state))
        found.add(wrong(state, not due))
        for following in (*due, *whims(state)):
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return len(seen), found - {""}
