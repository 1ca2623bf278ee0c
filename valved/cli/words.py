"""How times, counts and roles are written for people: one way in every command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from valve.v1 import node_pb2

ROLES: dict[int, str] = {
    node_pb2.ROLE_ONLINE: "online",
    node_pb2.ROLE_OFFLINE: "offline",
    node_pb2.ROLE_HOOK: "hook",
}
MODES: dict[int, str] = {node_pb2.MODE_OFF: "off", node_pb2.MODE_OBSERVE: "observe", node_pb2.MODE_HARVEST: "harvest"}
BARS = " ▁▂▃▄▅▆▇█"


def duration(nanoseconds: float) -> str:
    """3 significant figures with the unit that fits: 850 ns, 12.3 us, 4.56 ms, 7.89 s, 2 h 03 min."""
    for limit, scale, unit in ((1e3, 1, "ns"), (1e6, 1e3, "us"), (1e9, 1e6, "ms"), (120e9, 1e9, "s")):
        if abs(nanoseconds) < limit:
            return f"{nanoseconds / scale:.3g} {unit}"
    minutes = int(nanoseconds / 60e9)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


def gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def lock(driver: Any) -> str:
    """How the driver stops several GPUs, as far as it has shown."""
    if not driver.HasField("device_only_lock"):
        return "lock not measured yet"
    return "per-GPU lock (patched)" if driver.device_only_lock else "stock lock: GPUs are gated one after another"


def role(value: int) -> str:
    return ROLES.get(value, "unknown")


def mode(status: Any) -> str:
    """The mode in force, with the brake that overrides it."""
    word = MODES.get(status.mode, "unknown")
    if status.draining:
        return f"{word}, draining"
    return f"{word}, paused by {status.paused_by or 'a file'}" if status.paused else word


def quantile_us(histogram: Any, q: float) -> float | None:
    """The upper bound of the bucket that holds the quantile: what a histogram can honestly say. None when empty."""
    total = sum(histogram.count)
    if not total:
        return None
    seen = 0
    for bound, count in zip([*histogram.bound_us, float("inf")], histogram.count, strict=False):
        seen += count
        if seen >= q * total:
            return float(bound)
    return float("inf")


def at_most(bound_us: float | None) -> str:
    if bound_us is None:
        return "-"
    return "> last bucket" if bound_us == float("inf") else f"<= {duration(bound_us * 1e3)}"


def sparkline(shares: Sequence[float]) -> str:
    """One character per share (0 to 1), newest last."""
    return "".join(BARS[min(8, max(0, round(share * 8)))] for share in shares)
