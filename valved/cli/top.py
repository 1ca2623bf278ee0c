"""`valve top`: the status, live, with a sparkline per GPU of how much of each second offline work was let run."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict, deque
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live

from valved.cli import words
from valved.cli.client import node
from valved.cli.exits import OK
from valved.cli.status import gpu_state, head, memory, notes, services
from valved.cli.tables import FittingTable

WIDTH = 30


class History:
    """Shares of harvested time between successive looks, per GPU."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}
        self.shares: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WIDTH))

    def take(self, answer: Any) -> None:
        for gpu in answer.gpus:
            now, harvest = answer.monotonic_ns, gpu.harvest_ns
            if gpu.index in self._last:
                then, before = self._last[gpu.index]
                if now > then:
                    self.shares[gpu.index].append(max(0.0, min(1.0, (harvest - before) / (now - then))))
            self._last[gpu.index] = (now, harvest)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("top", help="live view of this node")
    parser.add_argument("--interval", type=interval, default=1.0, help="seconds between looks (default 1)")
    parser.add_argument("--looks", type=int, default=0, help="end after this many looks (default: until Ctrl-C)")
    parser.set_defaults(run=top)


def interval(text: str) -> float:
    """Seconds between two looks."""
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600 seconds")
    return seconds


def gpus(answer: Any, history: History) -> FittingTable:
    columns = ("gpu", "offline work", "now", "last looks", "stops", "p99", "memory")
    title = "GPUs: share of time that offline work ran, newest right"
    table = FittingTable(title, columns, spare=("memory", "p99", "stops"))
    for gpu in answer.gpus:
        shares = history.shares[gpu.index]
        now = f"{shares[-1]:.0%}" if shares else "-"
        p99 = words.at_most(words.quantile_us(gpu.preempt_latency, 0.99))
        memory = f"{words.gib(gpu.used_bytes)} of {words.gib(gpu.total_bytes)}" if gpu.total_bytes else "-"
        line = words.sparkline(list(shares)).rjust(WIDTH)
        table.add_row(str(gpu.index), gpu_state(gpu), now, f"[cyan]{line}[/]", str(gpu.preemptions), p99, memory)
    return table


def render(answer: Any, history: History) -> RenderableType:
    return Group(head(answer), gpus(answer, history), services(answer), *memory(answer), *notes(answer))


def top(options: argparse.Namespace) -> int:
    history = History()
    with node() as connection, Live(console=Console(), auto_refresh=False, screen=False) as live:
        looks = 0
        while True:
            answer = connection.status()
            history.take(answer)
            live.update(render(answer, history), refresh=True)
            looks += 1
            if options.looks and looks >= options.looks:
                return OK
            time.sleep(options.interval)
