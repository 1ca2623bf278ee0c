"""How much memory of a GPU offline work must leave for online services that do not have it yet. Pure.

A service needs again what it had. What offline work has as KV memory it gets back on demand, and nothing else. So the
two kinds are counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What the processes of one name have on one GPU. Also what is missing, and what must stay free."""

    plain_bytes: int = 0  # weights, activations, contexts, a KV cache that Valve does not manage
    kv_bytes: int = 0  # handles of the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineNeed:
    """All online services of one name, on one GPU."""

    had: MemoryUse  # at most, of late
    has: MemoryUse
    bare_bytes: int = 0  # of its KV ranges: backed from the pool when it needs them


def keep(services: Iterable[OnlineNeed], stated_bytes: int) -> MemoryUse:
    """What must be left for them. `stated_bytes`: what the operator wants for all services of this GPU together."""
    plain = kv = has = bare = 0
    for one in services:
        plain += max(0, one.had.plain_bytes - one.has.plain_bytes)
        kv += max(0, one.had.kv_bytes - one.has.kv_bytes)
        has += one.has.plain_bytes + one.has.kv_bytes
        bare += one.bare_bytes
    more = max(0, stated_bytes - has - plain - kv)
    more_kv = min(more, max(0, bare - kv))
    return MemoryUse(plain_bytes=plain + more - more_kv, kv_bytes=kv + more_kv)
