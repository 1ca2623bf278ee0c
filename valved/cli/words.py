"""How times, counts and roles are written for people: one way in every command."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
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
    """Bytes with the unit that fits: 64 MiB, 1.5 GiB."""
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"


MOMENTS = ("seen_ns", "ioctl_ns", "done_ns")
"""Points of CLOCK_MONOTONIC in an event's detail, told as the time since its launch. Other `_ns` are durations."""
TOLD = ("epoch", "status")  # the one says something to the shim alone, and of the other the reason says what it means
TIMES_NS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}
FLAGS = ("is_reclaim", "hinted", "compute")


def details(detail: Mapping[str, str]) -> str:
    """An event's detail in words: "stopped 0.42 ms after the launch", "gap 12.3 ms", "pid 4711"."""
    values = dict(detail)
    launch_ns = number(values.pop("launch_ns", "")) or 0
    parts = []
    status = number(values.get("status", ""))
    done_ns = number(values.get("done_ns", ""))
    if launch_ns and done_ns:
        stopped = "not stopped yet" if status else "stopped"
        parts.append(f"{stopped} {duration(done_ns - launch_ns)} after the launch")
    for name in (*MOMENTS, *TOLD):
        values.pop(name, None)
    return ", ".join([*parts, *(_fact(name, value) for name, value in sorted(values.items()))])


def _fact(name: str, value: str) -> str:
    """One of an event's figures: the end of its name says its unit."""
    count = number(value)
    stem, _, unit = name.rpartition("_")
    if count is None or not stem:
        said = value
    elif unit in TIMES_NS:
        name, said = stem, duration(TIMES_NS[unit] * count)
    elif unit == "bytes":
        name, said = stem, gib(count)
    elif unit == "ppm":
        name, said = stem, f"{count / 1e4:.3g} %"
    elif name.startswith("h_"):  # as the driver and its log write it
        said = f"{count:#x}"
    else:
        said = value
    if name in FLAGS and value in ("0", "1"):
        name, said = name.removeprefix("is_"), "yes" if value == "1" else "no"
    return f"{name.replace('_', ' ')} {said}"


def number(value: str) -> int | None:
    """What valved wrote as a number. Strangers choose names, and a name may look like one: 007, ²."""
    with contextlib.suppress(ValueError):
        if str(found := int(value)) == value:
            return found
    return None


def lock(driver: Any) -> str:
    """How the driver stops several GPUs, as far as it has shown."""
    if not driver.HasField("device_only_lock"):
        return "lock not measured yet"
    return "per-GPU lock (patched)" if driver.device_only_lock else "stock lock: GPUs are gated one after another"


MOST_NAME = 32  # cells of a terminal: some characters take two


def short(name: str) -> str:
    """A name in a table: its ends tell it from others, and nobody's name takes the room of all other columns."""
    if cell_len(name) <= MOST_NAME:
        return name
    half = MOST_NAME // 2
    end = set_cell_size(name[::-1], half)[::-1].lstrip()
    while end and not cell_len(end[0]):  # an accent of the last letter that was left out
        end = end[1:]
    return f"{set_cell_size(name, half - 1).rstrip()}…{end}"


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


def at_most(histogram: Any, q: float) -> str:
    """The quantile in words; beyond the last bucket it is known to be longer than that."""
    bound_us = quantile_us(histogram, q)
    if bound_us is None:
        return "-"
    beyond = bound_us == float("inf")
    return f"> {duration(histogram.bound_us[-1] * 1e3)}" if beyond else f"<= {duration(bound_us * 1e3)}"


MOST_S = 1e9  # thirty years: what waits so long is never mistaken, and no clock overflows


def seconds(text: str) -> float:
    """An option that is a time in seconds."""
    value = float(text)
    if not 0 <= value <= MOST_S:  # false for nan, too
        raise argparse.ArgumentTypeError(f"{text[:20]} is not a time in seconds")
    return value


def whole(least: int, most: int = 1_000_000_000) -> Callable[[str], int]:
    """An option that is a whole number."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):  # of very many digits, too
            if least <= (found := int(text)) <= most:
                return found
        raise argparse.ArgumentTypeError(f"{text[:20]} is not a whole number from {least} to {most}")

    return read


def sparkline(shares: Sequence[float]) -> str:
    """One character per share (0 to 1), newest last."""
    return "".join(BARS[min(8, max(0, round(share * 8)))] for share in shares)
