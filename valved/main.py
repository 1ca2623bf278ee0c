"""valved: the composition root. The only file that constructs things; read it to see what the daemon is made of.

Order of the start: folder and lock, native gate, books, what a predecessor left, link socket, API. There are two ends.
SIGTERM drains: every channel is enabled and the shims are told to pass through, because nobody may come after us.
SIGUSR2 (sent by `valved --replace`), or SIGTERM while a `valved --wait` stands in line, hands over: gates stay as they
are for the successor, so offline work never runs beside a busy service in between. Both write the state.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import msgspec

from valved import logs, paths
from valved.config import Config, effective, load_config
from valved.errors import ValveError
from valved.mechanism import signals, state, turn
from valved.mechanism.cards import CardReader
from valved.mechanism.clock import LoopClock
from valved.mechanism.outside import UvmDoors
from valved.mechanism.ports import GatePort, ProcessPort
from valved.mechanism.stats import NodeCounters
from valved.mechanism.trace import LineFile
from valved.mechanism.watch import FolderWatch
from valved.model.events import EventKind
from valved.model.ids import Mode
from valved.model.states import DriverState
from valved.policy.cooldown import CooldownSettings
from valved.service.books import Books
from valved.service.brake import Brake
from valved.service.gate import GateService, GateSettings
from valved.service.handover import Handover
from valved.service.journal import Journal
from valved.service.kv import Kv, put_together, tell_others
from valved.service.ladder import Ladder
from valved.service.link_server import LinkServer
from valved.service.node import Node
from valved.service.register import Register
from valved.service.report import Reporter

log = logging.getLogger("valved")

EXIT_FAILED, EXIT_CONFIG = 1, 78  # EX_CONFIG of sysexits.h: a restart would not help
KNOWN_BRANCHES = range(535, 596)  # NV_BRANCH_FIRST to NV_BRANCH_LAST of proto/abi/nvrm.h
GC_THRESHOLDS = (20_000, 20, 50)  # our values hold no cycles; full collections over thousands of channels cost most
TICK_S = 2.0  # lost stamps, leftovers, unfinished frozen processes: nothing that is in a hurry
SAVE_EVERY_TICKS = 30
CARDS_S = 1.0


@dataclass(slots=True, kw_only=True)
class Daemon:
    """Everything that lives as long as the process does."""

    loop: asyncio.AbstractEventLoop
    gate: GatePort
    journal: Journal
    books: Books
    keeper: GateService
    register: Register
    handover: Handover
    brake: Brake
    ladder: Ladder
    node: Node
    link: LinkServer
    kv: Kv | None
    stop: asyncio.Event


def build(
    config: Config, run_dir: Path, gate: GatePort, processes: ProcessPort, loop: asyncio.AbstractEventLoop
) -> Daemon:
    clock = LoopClock(loop)
    stop = asyncio.Event()
    journal = Journal(clock, config.ring_events, _files(config, run_dir))
    books = Books()
    settings = GateSettings(
        cooldown=config.cooldown_settings(), wake=config.wake_settings(), breaker=config.breaker_settings()
    )
    keeper = GateService(gate, books, journal, clock, settings, NodeCounters())
    register = Register(gate, books, keeper, journal, clock, processes, loop, config.quota, config.link)
    kv = None
    if config.memory.enabled:
        kv = put_together(
            gate,
            books,
            keeper,
            register,
            journal,
            clock,
            processes,
            loop,
            config,
            fd_limit=raise_fd_limit(),
            outside_port=UvmDoors(loop),
        )
    ladder = Ladder(
        books,
        keeper,
        journal,
        clock,
        config.ladder,
        lambda process, number: signals.send(process, number, processes),
        register.leave,
    )
    brake = Brake(gate, keeper, register, ladder, journal, run_dir / paths.PAUSE_FILE)
    handover = Handover(
        run_dir / state.STATE_FILE, gate, books, keeper, register, journal, clock, processes, state.boot_id()
    )
    ladder.changed = handover.save_soon
    handover.frozen, handover.let_go = ladder.frozen, ladder.release
    reporter = Reporter(
        gate,
        books,
        keeper,
        register,
        brake,
        journal,
        clock,
        version=_version(),
        run_dir=run_dir,
        lease_ns=config.lease_ns,
        driver=_driver(gate.driver_version()),
    )
    node = Node(keeper, register, brake, reporter, handover, journal, lease_ns=config.lease_ns, stop=stop.set)
    if kv is not None:
        tell_others(kv, reporter, node, handover, brake, config)
    link = LinkServer(loop, register, run_dir / paths.LINK_SOCKET, config.quota.hello_s)
    return Daemon(
        loop=loop,
        gate=gate,
        journal=journal,
        books=books,
        keeper=keeper,
        register=register,
        handover=handover,
        brake=brake,
        ladder=ladder,
        node=node,
        link=link,
        kv=kv,
        stop=stop,
    )


def take_over(daemon: Daemon, config: Config, run_dir: Path) -> None:
    """Pick up what a predecessor left, then apply mode and pause."""
    saved, problem = state.load(run_dir / state.STATE_FILE)
    if problem:
        daemon.journal.emit(EventKind.NOTED, reason=problem)
    mode = config.mode
    if saved is not None:
        daemon.handover.restore(saved, config.link.come_back_s)
        mode = saved.policy.mode or mode
        if saved.policy.cooldown is not None:
            start, floor, ceiling, factor, window = saved.policy.cooldown
            daemon.keeper.settings.cooldown = CooldownSettings(
                start_ns=start, floor_ns=floor, ceiling_ns=ceiling, factor=factor, window_ns=window
            )
    daemon.brake.set_mode(mode, "start")
    daemon.brake.look_at_file()


async def run(config: Config, folder: state.RunFolder, gate: GatePort, processes: ProcessPort) -> None:
    from valved.rpc.server import serve  # grpc is the heaviest import: only a daemon that really starts pays for it

    loop = asyncio.get_running_loop()
    run_dir = folder.path
    daemon = build(config, run_dir, gate, processes, loop)
    daemon.handover.is_ours = folder.is_ours
    loop.add_reader(gate.stamps_fd(), daemon.keeper.drain)
    take_over(daemon, config, run_dir)
    watch = FolderWatch(run_dir)
    if watch.fd >= 0:
        loop.add_reader(watch.fd, _look_at_folder, watch, daemon.brake)
    room = _kube_room(config, run_dir, daemon, processes)  # before the link opens: it guards every GPU
    daemon.link.start()
    server = await serve(daemon.node, run_dir / paths.API_SOCKET)
    metrics = await _start_metrics(config, daemon, room)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _leave, daemon, run_dir, number.name)
    loop.add_signal_handler(state.HAND_OVER, daemon.stop.set)
    daemon.journal.emit(EventKind.STARTED, reason=f"mode {daemon.brake.mode.value}", pid=os.getpid())
    reading = asyncio.create_task(_read_cards(daemon.kv)) if daemon.kv is not None else None
    ticking = asyncio.create_task(_tick(daemon, folder, has_watch=watch.fd >= 0))
    neighbours = asyncio.create_task(room.run()) if room is not None else None
    await daemon.stop.wait()
    ticking.cancel()
    if reading is not None:
        reading.cancel()
    if neighbours is not None:
        neighbours.cancel()
        await asyncio.wait({neighbours})
    daemon.journal.emit(
        EventKind.STOPPED, reason="drained" if daemon.brake.is_draining else "gates stay for a successor"
    )
    await server.stop(grace=0.5)
    if metrics is not None:
        metrics.close()
    daemon.handover.save()
    daemon.link.stop()
    daemon.register.close()
    if daemon.kv is not None:
        daemon.kv.close()
    daemon.journal.close()
    loop.remove_reader(gate.stamps_fd())
    if daemon.brake.is_draining:
        gate.close()


def _import_early(config: Config) -> None:
    """A second of imports, done while the predecessor still gates: shims act by themselves when a lease is over."""
    import_module("valved.rpc.server")
    if config.kube.node:
        import_module("valved.kube.room")


def _kube_room(config: Config, run_dir: Path, daemon: Daemon, processes: ProcessPort) -> Any:
    if not config.kube.node:
        return None
    from valved.kube.room import Host, Room  # numpy and the API client: only on such a node

    host = Host(
        gate=daemon.gate,
        books=daemon.books,
        keeper=daemon.keeper,
        register=daemon.register,
        brake=daemon.brake,
        journal=daemon.journal,
        clock=LoopClock(daemon.loop),
        processes=processes,
        run_dir=run_dir,
        version=_version(),
        kv=daemon.kv,
    )
    return Room(host, config.kube)


def raise_fd_limit() -> int:
    """Every handle of the memory pool is a descriptor: take as many as we may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _leave(daemon: Daemon, run_dir: Path, by: str) -> None:
    if daemon.brake.is_draining or state.has_successor(run_dir):
        daemon.stop.set()
    else:
        daemon.brake.drain(by, daemon.stop.set)


def _look_at_folder(watch: FolderWatch, brake: Brake) -> None:
    watch.clear()
    brake.look_at_file()


async def _tick(daemon: Daemon, folder: state.RunFolder, *, has_watch: bool) -> None:
    ticks = 0
    while True:
        await asyncio.sleep(TICK_S)
        ticks += 1
        if not folder.is_ours():
            _end_unreachable(daemon)
        daemon.keeper.resync()
        daemon.handover.settle(patience_over=True)
        if not has_watch:
            daemon.brake.look_at_file()
        if ticks % SAVE_EVERY_TICKS == 0:
            daemon.handover.save()


def _end_unreachable(daemon: Daemon) -> None:
    """Nobody finds us any more, and another valved may gate these GPUs soon: let everything go and be gone.

    At once: whatever ends in good order removes sockets by their names, and those are our successor's.
    """

    def leave() -> None:
        daemon.gate.close()
        log.error("failed", extra={"facts": {"error": "the run folder was removed"}})
        os._exit(EXIT_FAILED)

    daemon.brake.drain("the run folder was removed", leave)


async def _read_cards(kv: Kv) -> None:
    """Free memory of the cards, while memory is managed. In a thread: NVML may take milliseconds."""
    reader = CardReader()
    try:
        while True:
            if kv.reserve.is_in_use:
                kv.reserve.see_cards(await asyncio.get_running_loop().run_in_executor(None, reader.look))
            await asyncio.sleep(CARDS_S)
    finally:
        reader.close()


async def _start_metrics(config: Config, daemon: Daemon, room: Any) -> Any:
    if not config.metrics_port:
        return None
    from valved.metrics import serve_metrics

    host, port, look = config.metrics_host, config.metrics_port, daemon.node.status
    return await (
        serve_metrics(host, port, look, room.metrics, room.missing) if room else serve_metrics(host, port, look)
    )


def _files(config: Config, run_dir: Path) -> list[tuple[LineFile, bool]]:
    files = []
    if config.audit_bytes:
        files.append((LineFile(run_dir / "audit.jsonl", config.audit_bytes), False))
    if config.trace_file:
        files.append((LineFile(Path(config.trace_file), config.trace_bytes), True))
    return files


def _driver(version: str) -> DriverState:
    first = version.partition(".")[0]
    branch = int(first) if first.isdigit() else 0
    text = ""
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    return DriverState(
        version=version,
        branch=branch,
        known=branch in KNOWN_BRANCHES,
        open_modules="Open Kernel" in text,
        device_only_lock=False,
    )


def _version() -> str:
    try:
        return version_of("valve")
    except PackageNotFoundError:
        return "0"


def native_gate(config: Config) -> GatePort:
    from valved.mechanism.gate import GateSettings as NativeSettings
    from valved.mechanism.gate import NativeGate

    return NativeGate(
        NativeSettings(
            lease_ns=config.lease_ns,
            hang_ns=round(config.hang_ms * 1e6),
            spin_ns=round(config.spin_us * 1e3),
            quiet_us=config.quiet_us,
            fifo_priority=config.fifo_priority,
        )
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="valved", description="Valve's node daemon")
    parser.add_argument("--run-dir", type=Path, help="sockets and state (default: /run/valve, or the user's own)")
    parser.add_argument("--config", type=Path, help="TOML file (docs/configuration.md)")
    parser.add_argument("--mode", choices=[mode.value for mode in Mode], help="how far it may go")
    parser.add_argument("--metrics-port", type=int, help="serve Prometheus metrics on this port of loopback; 0: off")
    parser.add_argument("--trace-file", help="record every event and decision there")
    parser.add_argument("--node", help="name of the Kubernetes node this is; without one there is no Kubernetes here")
    parser.add_argument("--wait", action="store_true", help="wait until the valved that runs here now has left")
    parser.add_argument("--replace", action="store_true", help="take over from the valved that runs here now")
    parser.add_argument("--foreground", action="store_true", help="accepted for units: valved never forks")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    flags = {"mode": options.mode, "metrics_port": options.metrics_port, "trace_file": options.trace_file}
    if options.run_dir is not None:
        flags["run_dir"] = str(options.run_dir)
    try:
        config = load_config(options.config, flags)
        if options.node:
            config = msgspec.structs.replace(config, kube=msgspec.structs.replace(config.kube, node=options.node))
        logs.set_up(config.log_level)
        folder = state.RunFolder(Path(config.run_dir) if config.run_dir else paths.run_dir())
        if options.wait:
            _import_early(config)
            asyncio.run(turn.wait_for_turn(folder, config.metrics_host, config.metrics_port))
        else:
            folder.take(replace=options.replace)
    except (ValveError, OSError) as error:
        next_step = getattr(error, "next_step", "")
        print(f"valved: {error}" + (f"\n  next: {next_step}" if next_step else ""), file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ValveError) else EXIT_FAILED
    log.info("settings", extra={"facts": {**effective(config), "run_dir": str(folder.path)}})
    folder.sign()
    gc.freeze()  # what the imports made lives for ever
    gc.set_threshold(*GC_THRESHOLDS)
    from valved.mechanism.process import LinuxProcesses

    try:
        asyncio.run(run(config, folder, native_gate(config), LinuxProcesses()))
    except OSError as error:
        log.error("failed", extra={"facts": {"error": str(error)}})
        return EXIT_FAILED
    finally:
        folder.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
