"""`valve top`: the status, live, with sparklines per GPU and service; keys order, hold and end it."""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text
from valve.v1 import node_pb2

from valved.cli import words
from valved.cli.client import NodeClient, node
from valved.cli.exits import OK, CliError
from valved.cli.keys import Keys, is_live, keys
from valved.cli.status import gpu_state, head, memory, no_gpus, notes
from valved.cli.tables import FittingTable, Paper

WIDTH = 20
LEAST_ROWS = 16  # that show a service below the GPUs, beside one for each GPU
HELD_S = 1.0  # a held view is drawn anew so often, for a terminal whose size has changed
ORDERS: dict[str, Callable[[Any], Any]] = {
    "id": lambda service: service.id,
    "name": lambda service: service.name,
    "stops": lambda service: -service.preemptions,
    "delay": lambda service: -service.delay_ns,
    "harvested": lambda service: -service.harvest_ns,
}
HELP = "q end   s next order   r reverse   space hold"


@dataclass(slots=True, kw_only=True)
class View:
    """What the keys have chosen, and why what is shown is old."""

    order: str = "id"
    reverse: bool = False
    held: bool = False
    silence: str = ""

    def press(self, key: str) -> bool:
        """False: the view ends."""
        if key == "s":
            names = list(ORDERS)
            self.order = names[(names.index(self.order) + 1) % len(names)]
        elif key == "r":
            self.reverse = not self.reverse
        elif key == " ":
            self.held = not self.held
        return key not in ("q", "Q", "\x03", "\x04")

    def sorted(self, services: Sequence[Any]) -> list[Any]:
        return sorted(services, key=ORDERS[self.order], reverse=self.reverse)


class History:
    """Shares of time between successive looks: per GPU that offline work might run, per service that it worked."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], tuple[int, int]] = {}
        self.gpus: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WIDTH))
        self.services: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WIDTH))

    def take(self, answer: Any) -> None:
        now = answer.monotonic_ns
        for gpu in answer.gpus:
            self._add(("gpu", gpu.index), now, gpu.harvest_ns, self.gpus[gpu.index])
        for service in answer.services:
            if service.role == node_pb2.ROLE_ONLINE:
                self._add(
                    ("service", service.id),
                    service.busy_ns + service.idle_ns,
                    service.busy_ns,
                    self.services[service.id],
                )
            else:  # its time is summed over its GPUs
                harvested = service.harvest_ns // max(1, len(service.gpus))
                self._add(("service", service.id), now, harvested, self.services[service.id])

    def _add(self, name: tuple[str, int], now: int, value: int, shares: deque[float]) -> None:
        if name in self._last:
            then, before = self._last[name]
            if now > then:
                shares.append(max(0.0, min(1.0, (value - before) / (now - then))))
        self._last[name] = (now, value)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "top", help="Show a live view of this node.", epilog=f"keys: {HELP.replace('   ', ', ')}"
    )
    parser.add_argument(
        "--interval", type=interval, default=1.0, help="Refresh after this many seconds. Default: %(default)g."
    )
    parser.add_argument(
        "--looks",
        type=words.whole(0),
        default=0,
        help="End after this number of looks. 0 means: run until q or Ctrl-C. Default: %(default)s.",
    )
    parser.add_argument(
        "--sort", choices=list(ORDERS), default="id", help="The order of the services. Default: %(default)s."
    )
    parser.set_defaults(run=top)


def interval(text: str) -> float:
    """Seconds between two looks."""
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600 seconds")
    return seconds


def line(shares: deque[float]) -> Text:
    return Text(words.sparkline(list(shares)).rjust(WIDTH), style="cyan")


def gpus(answer: Any, history: History) -> RenderableType:
    if not answer.gpus:
        return no_gpus()
    columns = ("gpu", "offline work", "now", "last looks", "stops", "p99", "memory")
    title = "GPUs: time in which offline work was allowed to run, newest right"
    table = FittingTable(title, columns, spare=("memory", "p99", "stops", "last looks"))
    for gpu in answer.gpus:
        shares = history.gpus[gpu.index]
        now = f"{shares[-1]:.0%}" if shares else "-"
        p99 = words.at_most(gpu.preempt_latency, 0.99)
        used = f"{words.gib(gpu.used_bytes)} of {words.gib(gpu.total_bytes)}" if gpu.total_bytes else "-"
        table.add_row(str(gpu.index), gpu_state(gpu), now, line(shares), str(gpu.preemptions), p99, used)
    return table


def services(answer: Any, history: History, view: View, rows: int) -> RenderableType:
    if not answer.services:
        return Text("Services: none yet (valve run --online -- CMD)\n")
    columns = ("id", "name", "role", "now", "last looks", "stops", "delay", "harvested", "granted", "state")
    count = f" ({len(answer.services)})" if len(answer.services) > rows else ""
    title = f"Services{count}: share of time busy (offline: let run), newest right"
    table = FittingTable(
        title, columns, spare=("state", "granted", "delay", "harvested", "id", "stops", "role", "last looks")
    )
    for service in view.sorted(answer.services)[:rows]:
        shares = history.services[service.id]
        online = service.role == node_pb2.ROLE_ONLINE
        table.add_row(
            str(service.id),
            words.short(service.name),
            words.role(service.role),
            f"{shares[-1]:.0%}" if shares else "-",
            line(shares),
            str(service.preemptions) if online else "-",
            words.duration(service.delay_ns) if online else "-",
            "-" if online else words.duration(service.harvest_ns),
            granted(service.granted),
            service.state,
        )
    return table


def granted(offer: Any) -> str:
    """How long pauses were given to offline work, and how often a launch fell into one."""
    if not offer.grant:
        return "-"
    return words.duration(offer.granted_ns) + (f", {offer.broken} broken" if offer.broken else "")


def keys_line(view: View) -> Text:
    order = f"by {view.order}{', reversed' if view.reverse else ''}{', held' if view.held else ''}"
    return Text(f"{HELP}   ({order})", style="dim", no_wrap=True, overflow="ellipsis")


def render(
    answer: Any, history: History, view: View, *, has_keys: bool = False, rows: int = sys.maxsize
) -> RenderableType:
    """What is shown. The line of the keys comes second, where no table can push it off the screen. `rows`: of it, of
    which no service beyond is seen, nor drawn each second. One too low for GPUs and a service has services first."""
    is_low = rows < LEAST_ROWS + len(answer.gpus)
    middle = [keys_line(view), *([] if is_low else [Text()])] if has_keys else []
    if view.silence:
        middle.append(Text(f"{view.silence}: below is what it said last\n", style="red"))
    tables = (gpus(answer, history), services(answer, history, view, rows))
    return Group(head(answer), *middle, *(reversed(tables) if is_low else tables), *memory(answer), *notes(answer))


def top(options: argparse.Namespace) -> int:
    console = Paper()
    with node() as connection, keys(console) as pressed:
        if is_live(console):
            with Live(console=console, auto_refresh=False, screen=pressed.is_there) as live:
                follow(live, pressed, connection, options)
        else:
            pages = Pages(console, options.looks)
            follow(pages, pressed, connection, options)
    return OK


class Pages:
    """Looks one below the other, where nothing can be drawn anew: all, or the last one of a number of looks."""

    def __init__(self, console: Console, looks: int) -> None:
        self.console = console
        self._left = looks

    def update(self, view: RenderableType, *, refresh: bool) -> None:
        del refresh
        self._left -= 1
        if self._left <= 0:
            self.console.print(view)


def follow(live: Live | Pages, pressed: Keys, connection: NodeClient, options: argparse.Namespace) -> None:
    """A valved that answered once is waited for: it may be starting again."""
    history, view = History(), View(order=options.sort)
    answer, looks = None, 0
    while True:
        try:
            answer, view.silence = connection.status(), ""
            history.take(answer)
        except CliError as error:
            if answer is None or not error.is_silence:
                raise
            view.silence = str(error)
        looks += 1
        if options.looks and looks >= options.looks:
            draw(live, pressed, view, answer, history)
            return
        if not stay(live, pressed, view, answer, history, options.interval):
            return


def draw(live: Live | Pages, pressed: Keys, view: View, answer: Any, history: History) -> None:
    rows = live.console.height if pressed.is_there else sys.maxsize
    live.update(render(answer, history, view, has_keys=pressed.is_there, rows=rows), refresh=True)


def stay(live: Live | Pages, pressed: Keys, view: View, answer: Any, history: History, seconds: float) -> bool:
    """Show one answer until it is time for the next look, or as long as it is held; False: the view ends."""
    until_s = time.monotonic() + seconds
    while True:
        draw(live, pressed, view, answer, history)
        left_s = HELD_S if view.held else max(0.0, until_s - time.monotonic())
        heard = pressed.wait(left_s)
        if not all(map(view.press, heard)):
            return False
        if not heard and not view.held:
            return True
