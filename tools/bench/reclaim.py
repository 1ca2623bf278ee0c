"""Bench `reclaim`: a GiB moves from an offline to an online engine, per handle size and layout, under H100-like costs.

Our own share is the wall time from the KV_NEED of the online engine's hook up to the last mapping call, less the time
in which some process of the node stood in a driver call: the gate, unmapping, mapping. The daemon's event says when the
hook rang, by the hook's clock; the emulator's pages give the calls; the product knows of neither. The note of a row has
the share of each hop (bench/hops.py). Behind the last mapping call only the card is at work, zeroing: that stretch is
reported apart (an H100 takes 0.4 ms a GiB). What comes first is zeroed while the rest is taken: the emulator zeroes
nothing there, as it would with this host's cores, but for `sparse`. What the driver takes is what the choice of a
handle size is about: `model` is the cost model's sum, one call after the other, without what the emulator adds.

Layouts: `packed`, all layers of a block side by side, one handle holds whole blocks; `layers`, sixteen planes (8
layers, K and V), so that a column is sixteen handles. `helper`, the default here, has the offline process's own thread
map; `sparse` takes the memory from outside it.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from valve.v1 import node_pb2
from valve_tools.bench.hops import HOPS, hops_ns
from valve_tools.bench.row import Row, row_of
from valve_tools.demo import kv_batch, kv_service
from valve_tools.demo.node import EmulatedNode
from valve_tools.emulator.node import Options
from valve_tools.emulator.process import ProcessPage, ThreadCall, union_ns

from valved.state.trace import read_lines

MIB, GIB = 1 << 20, 1 << 30
BLOCK_MIB = 2  # a block over all its planes: 16 tokens of an 8B model
TAG_KIB = 128  # with a tag on each page of 4 KiB the host takes 7 ms to unmap what takes the model 0.35
SAMPLES = 14  # reclaims in one run: runs of four differed by half. The first one pays for cold caches and is left out
GAP_S = 1.5  # between two of them; offline work has all memory back within one
OWN_BUDGET_MS = 1.0
SMALL_BUDGET_MS = 2.0  # with handles of 2 MiB: 512 of them
KNOBS = {"helper": {"fills": "silent"}}  # a trial of `sparse` reads what was filled
CONFIG = """
trace_file = "{trace}"
[memory]
handle_mib = {handle_mib}
pool_mib = {pool_mib}
remap = "{remap}"
headroom_min_mib = 1
headroom_max_mib = 1
keep_s = 0.2
spare_mib = 0
order_s = 20.0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    layout: str
    handle_mib: int
    planes: int
    remap: str = "helper"
    gib: float = 1.0  # that one reclaim moves

    @property
    def name(self) -> str:
        return f"{self.layout}-{self.handle_mib}mib" + ("" if self.remap == "helper" else f"-{self.remap}")

    @property
    def budget_ms(self) -> float:
        return SMALL_BUDGET_MS if self.handle_mib < 16 else OWN_BUDGET_MS

    @property
    def column_mib(self) -> int:
        return self.handle_mib * self.planes

    @property
    def blocks(self) -> int:
        """Room for what one request takes, and a column of reserve."""
        return int(self.gib * 1024 + 2 * self.column_mib) // BLOCK_MIB


CASES = (
    Case(layout="packed", handle_mib=2, planes=1),
    Case(layout="packed", handle_mib=16, planes=1),
    Case(layout="packed", handle_mib=64, planes=1),
    Case(layout="layers", handle_mib=2, planes=16),
    Case(layout="layers", handle_mib=16, planes=16),
    Case(layout="layers", handle_mib=64, planes=16),
    Case(layout="layers", handle_mib=2, planes=16, remap="sparse"),
    Case(layout="layers", handle_mib=16, planes=16, remap="sparse"),
    Case(layout="layers", handle_mib=64, planes=16, remap="sparse"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimTimes:
    """One reclaim, in ms."""

    own_ms: float
    model_ms: float
    zero_ms: float
    total_ms: float
    mib: float
    hops_ms: dict[str, float]  # of `own_ms`


def run(case: Case, folder: Path) -> list[ReclaimTimes]:
    trace, requests = folder / "trace.jsonl", folder / "requests.csv"
    pool_mib = case.blocks * BLOCK_MIB + case.column_mib
    config = CONFIG.format(trace=trace, handle_mib=case.handle_mib, pool_mib=pool_mib, remap=case.remap)
    tokens = int(case.gib * 1024) // BLOCK_MIB * 16 - 64
    lines = [f"{3 + GAP_S * i},{tokens},20" for i in range(SAMPLES)]
    requests.write_text("\n".join(["t_s,in_tokens,out_tokens", *lines, ""]))
    cache = ["--kv-blocks", str(case.blocks), "--kv-planes", str(case.planes)]
    cache += ["--block-kib", str(BLOCK_MIB * 1024 // case.planes), "--tag-kib", str(TAG_KIB)]
    with EmulatedNode(folder, options=Options(knobs=KNOBS.get(case.remap, {})), config=config) as node:
        node.start_valved()
        offline = node.run("offline", [*kv_batch.COMMAND, *cache], name="batch", out=folder / "off")
        node.wait_for(lambda: _is_full(node, case), "the offline engine has all the memory")
        duration = str(3 + GAP_S * SAMPLES)
        argv = [*kv_service.COMMAND, *cache, "--trace", str(requests), "--duration", duration, "--prefill-us", "1"]
        online = node.run("online", argv, name="chat", out=folder / "on")
        samples: list[ReclaimTimes] = []
        clients: dict[int, int] = {}
        seen = 0
        while online.poll() is None:
            time.sleep(0.5)  # each page keeps the last calls only: read them soon
            told = read_lines(trace) if trace.exists() else ()  # it begins with the first event
            events = [event for event in told if event["kind"] == "reclaimed"]
            clients |= {client.role: client.pid for client in node.status().clients}  # the service may have ended
            for event in events[seen:]:
                samples += _sample(event, node, clients, case)
            seen = len(events)
        offline.kill()
        offline.wait()
    whole = [sample for sample in samples if sample.mib >= case.gib * 1024 * 0.8]
    return whole[1:] or whole


def _is_full(node: EmulatedNode, case: Case) -> bool:
    engines = node.status().memory.engines
    return bool(engines) and engines[0].backed_blocks == case.blocks and engines[0].state == "lends and borrows"


def model_ms(handles: float, case: Case) -> float:
    """What the H100-like model asks for: unmap and map one after the other on the offline side, map on the other, with
    one call of cuMemUnmap and cuMemSetAccess for each run of neighbours (tools/emulator/README.md has the costs). Made
    sparse, the offline side costs a call for each run."""
    out = 25.2 + 0.2 * case.handle_mib + 1.45 + 35 + 0.5 * case.handle_mib
    if case.remap == "sparse":  # one call for neighbours: no less than one for each plane
        out = case.planes * 24 / max(handles, 1) + 0.05 * case.handle_mib
    back = 25.2 + 0.2 * case.handle_mib + 1.45 + 35 + 0.5 * case.handle_mib
    return handles * (out + back) / 1e3


def _sample(event: Mapping[str, Any], node: EmulatedNode, clients: Mapping[int, int], case: Case) -> list[ReclaimTimes]:
    """`clients`: processes by role."""
    detail = event["detail"]
    if "take_ns" not in detail:
        return []
    end_ns = event["t_ns"]
    total_ns = int(detail["total_ns"]) + int(detail["heard_ns"])
    pids = [*clients.values(), node.valved.pid] if node.valved is not None else []
    try:
        calls = {pid: _calls(node, pid, end_ns - total_ns, end_ns, pids) for pid in pids}
    except LookupError:  # more calls than the page keeps
        return []
    everything = [call for of in calls.values() for call in of]
    mapped_ns = max((call.end_ns for call in everything if call.kind == "access"), default=end_ns)
    hops = hops_ns(detail, end_ns, calls, clients[node_pb2.ROLE_ONLINE], mapped_ns)
    inside_ns = union_ns(((call.begin_ns, call.end_ns) for call in everything), end_ns - total_ns, mapped_ns)
    return [
        ReclaimTimes(
            own_ms=(mapped_ns - end_ns + total_ns - inside_ns) / 1e6,
            model_ms=model_ms(int(detail["freed"]), case),
            zero_ms=(end_ns - mapped_ns) / 1e6,
            total_ms=total_ns / 1e6,
            mib=int(detail["bytes"]) / MIB,
            hops_ms={name: spent_ns / 1e6 for name, spent_ns in hops.items()},
        )
    ]


def _calls(node: EmulatedNode, pid: int, begin_ns: int, end_ns: int, pids: Collection[int]) -> list[ThreadCall]:
    """An engine's own thread may wait for its own work all the while; the shim's threads wait for zeroing."""
    if not (node.folder / "emu" / f"process-{pid}").exists():
        return []
    calls = ProcessPage(node.folder / "emu", pid).intervals(begin_ns)
    return [call for call in calls if call.begin_ns < end_ns and (call.kind != "wait" or call.thread not in pids)]


def bench_reclaim() -> Iterator[Row]:
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="valve-bench-") as folder:
            samples = run(case, Path(folder))
        name = case.name
        if not samples:
            note = f"no reclaim of {case.gib:g} GiB: a column is {case.column_mib} MiB"
            yield row_of("reclaim", f"{name}-own", "ms", [float("nan")], case.budget_ms, judged="p50", note=note)
            continue
        moved = sum(sample.mib for sample in samples) / len(samples) / 1024
        hops = " ".join(f"{hop} {median(one.hops_ms[hop] for one in samples):.2f}" for hop in HOPS)
        driver = (
            f"model {median(one.model_ms for one in samples):.1f} zero {median(one.zero_ms for one in samples):.1f}"
        )
        note = f"{moved:.2f} GiB in columns of {case.column_mib} MiB; ms: {hops}; {driver}"
        own = [sample.own_ms for sample in samples]
        yield row_of("reclaim", f"{name}-own", "ms", own, case.budget_ms, judged="p50", note=note)
        total = [sample.total_ms for sample in samples]
        yield row_of("reclaim", f"{name}-total", "ms, driver included", total, None, judged="p50")


BENCHES: dict[str, Callable[[], Iterable[Row]]] = {"reclaim": bench_reclaim}


def main() -> None:
    """One case for a look at its samples: python -m valve_tools.bench.reclaim NAME, such as layers-16mib-sparse."""
    import sys
    from dataclasses import asdict

    case = next(one for one in CASES if one.name == sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="valve-bench-") as folder:
        for sample in run(case, Path(folder)):
            print(json.dumps(asdict(sample)))


if __name__ == "__main__":
    main()
