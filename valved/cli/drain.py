"""`valve drain`: stop all offline work, end its processes, say when none is left. With --stop valved ends then.

Meanwhile it says what is waited for and how long that takes at most, again whenever that changes; and at once when
valved does not answer any more. A valved that is started again goes on with the drain, but not with one of --stop.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valve.v1 import node_pb2

from valved.cli import words
from valved.cli.client import NodeClient, must_last, node, unwritten
from valved.cli.exits import FAILED, NOT_RUNNING, OK, REFUSED, STILL_THERE, CliError
from valved.paths import DRAIN_FILE

LOOK_S = 0.2
AWAY_S = 60.0  # longer than systemd takes to end a valved that hangs, and to start the next
MOST_LINES = 8


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "drain", help="End all offline work on this node and accept none until `valve resume`."
    )
    parser.add_argument("--stop", action="store_true", help="End valved when no offline process is left.")
    parser.add_argument(
        "--timeout",
        type=words.seconds,
        default=120.0,
        help="Wait this many seconds for the processes to end. Default: %(default)g.",
    )
    parser.set_defaults(run=drain)


def drain(options: argparse.Namespace) -> int:
    try:
        return drained(options)
    except KeyboardInterrupt:  # which ends this command alone
        print("a drain that has begun goes on and ends offline processes; undo it: valve resume", file=sys.stderr)
        raise


def drained(options: argparse.Namespace) -> int:
    """Once no offline process is left."""
    end_s = time.monotonic() + options.timeout
    silence = Unanswered(ends=options.stop)
    with node() as connection:
        request = node_pb2.DrainRequest(stop=options.stop, by="valve drain")
        try:
            status, told = connection.call(connection.stub.Drain, request), None
            must_drain(status)
        except CliError as error:
            if error.code != NOT_RUNNING:
                raise
            step = "does offline work run here all the same? Then: valve up, and valve drain again"
            raise CliError(f"{error}: nothing was ended", NOT_RUNNING, step) from None
        while left := staying(status):
            if told != (told := [(one.pid, one.waits_for) for one in status.leavers]):
                print("\n".join(waiting(status, left)), file=sys.stderr, flush=True)
            if time.monotonic() > end_s:
                silence.check()
                step = "they stay stopped; see valve explain, the log, and on Kubernetes the disruption budgets"
                raise CliError(f"still there after {options.timeout:g} s: {', '.join(left)}", STILL_THERE, step)
            time.sleep(LOOK_S)
            status = look(connection, status, silence)
    text = "drained: no offline process is left"
    print(text + (", valved ends" if options.stop else "; none runs until: valve resume"), flush=True)
    must_last(status, DRAIN_FILE, "this node is drained")
    return OK


@dataclass(slots=True)
class Unanswered:
    """Of a valved that is busy, or has died: it may go on, and whoever waits for it should know."""

    ends: bool = False  # valved, once it is empty: no file tells its successor to drain
    is_unwritten: bool = False  # nor does one that could not be made
    error: CliError | None = None
    since_s: float = 0.0

    def note(self, error: CliError) -> None:
        if self.error is None:
            self.since_s = time.monotonic()
        if self.error is None or self.error.code != error.code:
            is_lost = self.ends or self.is_unwritten
            goes_on = "One that is started anew does not drain" if is_lost else "One that runs again drains on"
            text = "offline work is not ended meanwhile, and may run again"
            print(f"{error}: {text}; {error.next_step}. {goes_on}", file=sys.stderr, flush=True)
        self.error = error
        if time.monotonic() - self.since_s > AWAY_S:
            self.check()

    def end(self) -> None:
        if self.error is not None:
            print("valved answers again", file=sys.stderr, flush=True)
        self.error = None

    def check(self) -> None:
        """Raises where it is silent now: it is not known who is left."""
        if self.error is not None:
            text = (
                f"{self.error}, for {time.monotonic() - self.since_s:.0f} s: it is not known which processes are left"
            )
            raise CliError(text, self.error.code, f"{self.error.next_step}; then drain again")


def look(connection: NodeClient, before: Any, silence: Unanswered) -> Any:
    """An empty status once valved has ended, as it does when none is left. What was before, while it is silent."""
    try:
        status = connection.status()
        silence.end()
        silence.is_unwritten = unwritten(status, DRAIN_FILE) is not None
    except CliError as error:
        if not error.is_silence:
            raise
        if not silence.ends or error.code != NOT_RUNNING:  # busy for once, or starting again: the drain outlives both
            silence.note(error)
            return before
        if alive := [pid for pid in before.offline_pids if runs(pid)]:
            text = f"valved ended before the offline processes {', '.join(map(str, alive))}"
            raise CliError(text, FAILED, "start it again and drain again: valve up, valve drain --stop") from None
        return node_pb2.Status(draining=True)
    if not status.draining and status.pid != before.pid:
        text = f"valved {before.pid} ended, and {status.pid} does not drain: offline work goes on"
        raise CliError(text, FAILED, f"drain again: valve drain{' --stop' if silence.ends else ''}")
    must_drain(status)
    return status


def must_drain(status: Any) -> None:
    if not status.draining:
        raise CliError("the drain was taken back: offline work goes on", REFUSED, "see: valve events")


def runs(pid: int) -> bool:
    """Whether it is there and no zombie. One that cannot be read is there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True


def waiting(status: Any, left: list[str]) -> list[str]:
    """What is waited for, and how long at most."""
    if not status.leavers:  # an older valved does not say more
        return [f"offline work is stopped; waiting for its end: {', '.join(left)}"]
    names = {pid: service.name for service in status.services for pid in service.pids}
    until_ns = [leaver.until_ns for leaver in status.leavers]
    lasts = f"{seconds(max(until_ns), status.monotonic_ns)} s at most" if all(until_ns) else "nobody can say how long"
    lines = [f"offline work is stopped; {len(until_ns)} of its processes must end, {lasts}:"]
    for leaver in status.leavers[:MOST_LINES]:
        bound = f", killed in {seconds(leaver.until_ns, status.monotonic_ns)} s" if leaver.until_ns else ""
        name = names.get(leaver.pid, "not connected")
        lines.append(f"  process {leaver.pid} ({name}): {leaver.waits_for}{bound}")
    return [*lines, f"  and {len(until_ns) - MOST_LINES} more"] if len(until_ns) > MOST_LINES else lines


def seconds(until_ns: int, now_ns: int) -> int:
    """As many as will have passed by then."""
    return max(0, -((now_ns - until_ns) // 1_000_000_000))


def staying(status: Any) -> list[str]:
    """Offline services that are still there, with their processes; else processes of none."""
    services = [
        f"{service.name} ({', '.join(map(str, service.pids)) or 'not connected'})"
        for service in status.services
        if service.role == node_pb2.ROLE_OFFLINE
    ]
    return services or [f"process {pid}" for pid in status.offline_pids]
