"""One object that cannot be handled never ends a round for all others: it is logged and counted, and the next comes."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from valve_kube.client import Json
from valve_kube.objects import Object

from valve_scheduler import metrics

log = logging.getLogger(__name__)

Found = TypeVar("Found")


@contextmanager
def apart(item: Object) -> Iterator[None]:
    """Guards what is done for one object, which a tenant may have written."""
    try:
        yield
    except Exception:
        metadata = item.get("metadata") or {}
        kind = str(item.get("kind") or "Pod")
        metrics.invalid.labels(kind).inc()
        found = {"kind": kind, "object": f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"}
        log.exception("object left out of the round", extra=found)


def each(items: Iterable[Json], read: Callable[[Json], Found | None]) -> list[tuple[Json, Found]]:
    """What could be made of each, without those of which nothing could."""
    found = []
    for item in items:
        with apart(item):
            if (one := read(item)) is not None:
                found.append((item, one))

    return found
