"""One object that cannot be handled never ends a round for all others: it is logged and counted, and the next comes.
Nor do many objects hold up the loop that renews the lease."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from valve_kube.client import Json
from valve_kube.failures import leave_out
from valve_kube.objects import Object

Found = TypeVar("Found")
Item = TypeVar("Item")
SLICE_S = 0.005


@contextmanager
def apart(item: Object) -> Iterator[None]:
    """Guards what is done for one object, which a tenant may have written."""
    try:
        yield
    except Exception:
        metadata = item.get("metadata") or {}
        kind = str(item.get("kind") or "Pod")
        name = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
        leave_out(kind, name, "object left out of the round")


async def unhurried(items: Iterable[Item], clock_s: Callable[[], float] = time.perf_counter) -> AsyncIterator[Item]:
    """The items as they are now; every few milliseconds of work on them the loop runs what else there is."""
    end_s = clock_s() + SLICE_S
    for item in tuple(items):
        yield item
        if clock_s() >= end_s:
            await asyncio.sleep(0)
            end_s = clock_s() + SLICE_S


async def each(items: Iterable[Json], read: Callable[[Json], Found | None]) -> list[tuple[Json, Found]]:
    """What could be made of each, without those of which nothing could."""
    found = []
    async for item in unhurried(items):
        with apart(item):
            if (one := read(item)) is not None:
                found.append((item, one))

    return found
