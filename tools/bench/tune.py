"""Bench `tune-idle`: what share of the time in which a service is idle a finetuning job has a tile on the GPU.

A real job (`valve tune`, its arithmetic on the CPU, each tile a kernel of the emulated GPU) beside drawn requests.
Time, not speed: a tile counts while it is on the card and the gate is open, however slow the processor is. Two parts
make the share: how much of the idle time the gate is open, and how much of that the job uses. Where more wants to run
than there are cores, what is between two tiles is the time of others, and the row is void. The row `host` is not: what
the job computes between two tiles in CPU time, against the time of the tiles. It leaves out waiting for a disk. Needs
.venv-tune.
"""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from valve_tools.bench.row import Row, row_of
from valve_tools.demo.figures import OnlineRun, parse_online
from valve_tools.demo.node import EmulatedNode
from valve_tools.demo.rounds import ONLINE
from valve_tools.demo.tune import PROGRAM

from valved.state.trace import read_lines

NAME = "tune-idle"
PYTHON = Path(".venv-tune/bin/python")
ROUNDS, SECONDS, RATE, OUT_TOKENS = 5, 12, 1.5, 20
TILE_US = 20_000
MARK = 0.95
Span = tuple[float, float]


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def common(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """Where both are; each in order and without overlaps."""
    found, at = [], 0
    for begin, end in left:
        while at < len(right) and right[at][1] <= begin:
            at += 1
        for low, high in right[at:]:
            if low >= end:
                break
            found.append((max(begin, low), min(end, high)))
    return found


def rest(whole: Span, spans: Iterable[Span]) -> list[Span]:
    """What is left of the whole."""
    found, at = [], whole[0]
    for begin, end in sorted(spans):
        if begin > at:
            found.append((at, min(begin, whole[1])))
        at = max(at, end)
    if at < whole[1]:
        found.append((at, whole[1]))
    return [(begin, end) for begin, end in found if end > begin]


def closed(records: Iterable[Mapping[str, object]], end_s: float) -> list[Span]:
    """From the first channel that stopped to the wake after it, in the order of the trace."""
    found: list[Span] = []
    since = None
    for record in records:
        at_s = int(str(record["t_ns"])) / 1e9
        if record["kind"] == "gate" and since is None:
            since = at_s
        elif record["kind"] == "wake" and since is not None:
            found.append((since, at_s))
            since = None
    return found if since is None else [*found, (since, end_s)]


def shares(served: OnlineRun, tiles: Sequence[Span], stopped: Sequence[Span]) -> tuple[float, float]:
    """(share of idle time in which the gate is open, share of that in which a tile is on the card)"""
    window = served.start_s, served.start_s + served.wall_s
    busy = [(served.start_s + each.arrival_s, served.start_s + each.done_s) for each in served.requests]
    idle = rest(window, busy)
    open_ = common(idle, rest(window, stopped))
    return length(open_) / length(idle), length(common(open_, tiles)) / length(open_)


def between_ms(tiles: Sequence[Span]) -> list[float]:
    return [1e3 * (begin - end) for (_, end), (begin, _) in itertools.pairwise(tiles)]


def lines_of(path: Path) -> list[tuple[float, ...]]:
    """(begin, end, time of a card, CPU time since the last one); the last line may be torn."""
    return [tuple(map(float, line.split())) for line in path.read_text().split("\n")[:-1]]


def spans_of(path: Path) -> list[Span]:
    return [(begin, end) for begin, end, _, _ in lines_of(path)]


def host_shares(lines: Sequence[tuple[float, ...]], parts: int) -> list[float]:
    """Share of the time of the tiles in that and the CPU time between them, for each part of the run."""
    size = max(1, len(lines) // parts)
    pieces = [lines[at : at + size] for at in range(0, size * min(parts, len(lines)), size)]
    sums = [(sum(each[2] for each in piece), sum(each[3] for each in piece)) for piece in pieces]
    return [card / (card + between) for card, between in sums]


def bench_tune_idle() -> Iterator[Row]:
    if not PYTHON.exists():
        raise RuntimeError(f"no {PYTHON}: make test-tune sets it up")
    with tempfile.TemporaryDirectory(prefix="valve-bench-") as scratch:
        seen = list(_rounds(Path(scratch)))
        lines = lines_of(Path(scratch) / "tiles")[1:]  # before the first the program starts
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    note = f"{ROUNDS} rounds of {SECONDS} s, tiles of {TILE_US // 1000} ms, load {load:.1f} on {cores} cores"
    whole = [gate * used for gate, used in seen]
    judged = {"better": "higher", "judged": "p50", "is_void": load > cores}
    yield row_of(NAME, "got", "share of idle time", whole, MARK, note=note, **judged)
    yield row_of(NAME, "open", "share of idle time", [gate for gate, _ in seen], None)
    yield row_of(NAME, "used", "share of open time", [used for _, used in seen], None)
    between = between_ms([(begin, end) for begin, end, _, _ in lines])
    yield row_of(NAME, "between", "ms from one tile to the next", between, None)
    host = host_shares(lines, ROUNDS)
    yield row_of(NAME, "host", "share of a tile's time, CPU time", host, MARK, better="higher", judged="p50")


def _rounds(folder: Path) -> Iterator[tuple[float, float]]:
    python = str(PYTHON.absolute())
    with EmulatedNode(folder) as node:
        trace, tiles = folder / "trace", folder / "tiles"
        node.config = f'trace_file = "{trace}"\n'
        node.run("", [python, str(PROGRAM), "make", str(folder)], name="make", out=folder / "make.log").wait()
        node.start_valved()
        argv = [python, str(PROGRAM), "train", str(folder), str(folder / "out"), "1000000", str(TILE_US)]
        env = {"VALVE_DEMO_TILES": str(tiles), "XDG_STATE_HOME": str(folder / "state")}
        child = node.run("offline", argv, name="valve-tune", env=env, out=folder / "train.log")
        for number in range(ROUNDS):
            _after(node, tiles, time.monotonic() + 1)
            out = folder / f"online-{number}"
            online = [ONLINE, "--duration", SECONDS, "--rate", RATE, "--out-tokens", OUT_TOKENS, "--seed", number + 1]
            node.run("online", [str(each) for each in online], name=f"chat-{number}", out=out).wait()
            served = parse_online(out.read_text().splitlines())
            end_s = served.start_s + served.wall_s
            _after(node, tiles, end_s)
            yield shares(served, spans_of(tiles), closed(read_lines(trace), end_s))
        os.kill(child.pid, signal.SIGKILL)


def _after(node: EmulatedNode, tiles: Path, when_s: float) -> None:
    node.wait_for(lambda: tiles.exists() and spans_of(tiles)[-1:] > [(when_s, 0.0)], "a tile after the service")


BENCHES: dict[str, Callable[[], Iterable[Row]]] = {NAME: bench_tune_idle}
