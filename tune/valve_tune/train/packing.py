"""Which examples share a row: best fit, longest first. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of indices whose lengths add up to at most `capacity`: each goes where the least room is left over."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)  # room left -> rows
    rooms: list[int] = []  # the keys of with_room in order
    for index in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"example {index} has {length} tokens, a row {capacity}")
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        rows[row].append(index)
        left = room - length
        if left and not with_room.get(left):
            insort(rooms, left)
        if left:
            with_room[left].append(row)
    return [sorted(row) for row in rows]
