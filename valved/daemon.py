"""Runs the daemon: start, what runs beside the loop, and the two ends. What it is made of: compose.py.

Order of the start: native gate, books, what a predecessor left, link socket, API. There are two ends. `valve drain
--stop` ends the daemon when no offline process is left. SIGTERM, SIGHUP and SIGUSR2 (`valved --replace`) hand over:
offline work on GPUs that online services use is stopped and stays so until a successor is there, so none runs unwatched
in between; without one it stays stopped by the lease of its shims. Both write the state.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valved import paths
from valved.clients.server import LinkServer
from valved.compose import Daemon, Outer, build
from valved.config import Config, group_id
from valved.fds import forget_name
from valved.machine.cards import CardReader
from valved.machine.clock import LoopClock
from valved.machine.driver import driver_state
from valved.machine.helpers import Closer, Helpers, Prompt, Worker, heard
from valved.machine.kept import kept_bytes
from valved.machine.notify import Notify
from valved.machine.ports import GatePort, ProcessPort, ProverPort, WorkPort
from valved.machine.possession import RmProver
from valved.machine.signals import Signals
from valved.machine.startpages import give_back_start_pages
from valved.machine.tasks import few_tasks
from valved.machine.thawer import Thawer
from valved.machine.uvm import UvmDoors
from valved.machine.watch import FolderWatch
from valved.model.events import EventKind
from valved.model.ids import Mode
from valved.model.plain import plain
from valved.node.api import Node
from valved.node.brake import Brake
from valved.node.upkeep import (
    LoopBeat,
    Upkeep,
    end,
    keep_going,
    keep_reading,
    leave_at_once,
    leave_nobody_standing,
    settled,
)
from valved.state import pending
from valved.state import saved as state
from valved.state.trace import LineFile

if TYPE_CHECKING:
    from valved.kube.host import KubeBooks
    from valved.kube.room import Room

PARTING_NS = 2_000_000_000  # the last state may be written for so long, and names removed


def _outer(
    config: Config,
    folder: state.RunFolder,
    gate: GatePort,
    processes: ProcessPort,
    prover: ProverPort,
    stop: Callable[[], None],
    books: KubeBooks | None,
) -> Outer:
    loop = asyncio.get_running_loop()
    clock = LoopClock(loop)
    return Outer(
        gate=gate,
        processes=processes,
        clock=clock,
        reactor=loop,
        prover=prover,
        uvm=UvmDoors(loop),
        work=Worker(loop),
        disk=Worker(loop, Helpers("valved-disk", 1)),
        prompt=Prompt(),
        event_disk=Worker(loop, Helpers("valved-events", 1)),
        closer=Closer(),
        signals=Signals(processes, clock, Thawer(loop)),
        fd_limit=raise_fd_limit() if config.memory.enabled else 0,
        driver=driver_state(gate.driver_version()),
        boot=state.boot_id(),
        stop=stop,
        version=_version(),
        is_ours=folder.is_ours,
        kept_bytes=partial(kept_bytes, folder.path, config.trace_file),
        files=_files(config, folder.path),
        pods=books.pods if books is not None else None,
        shares=books.offline.levels if books is not None else None,
    )


def take_over(daemon: Daemon, config: Config, run_dir: Path, mode_flag: Mode | None = None) -> None:
    """Pick up what a predecessor left, then apply mode, pause and drain. A mode on the command line wins for good over
    one that was set while a predecessor ran.
    """
    saved, problem = state.load(run_dir / paths.STATE_FILE)  # a disk that hangs delays a start that has no answer yet
    daemon.come_back.begin(config.link.come_back_s, is_first=saved is None and not problem)
    if problem:
        daemon.journal.emit(EventKind.NOTED, reason=problem)
    if saved is not None:
        daemon.handover.restore(saved, config.link.come_back_s)
    is_overruled = mode_flag is not None and daemon.handover.policy.mode is not None
    if is_overruled:
        daemon.handover.keep(mode=None)
    if saved is None or is_overruled or not daemon.handover.is_own(saved):
        daemon.handover.save()  # what no valved after us may believe stands for as short a time as can be
    mode = daemon.handover.policy.mode or mode_flag or config.mode
    _pause_if_unknown(daemon, mode, mode_flag)
    daemon.brake.set_mode(mode, "start")
    daemon.brake.look_at_file()
    daemon.sharing.begin()


def _pause_if_unknown(daemon: Daemon, mode: Mode, mode_flag: Mode | None) -> None:
    """Somebody set a mode of which this version does not know what it forbids. A pause forbids as much as any, and ends
    no job. It is a file, and so outlives us."""
    word = plain(daemon.handover.policy.unknown_mode)
    if word and mode is Mode.HARVEST and mode_flag is None:
        text = f"the mode that was set, {word}, is unknown to this version: paused until valve resume"
        daemon.journal.emit(EventKind.NOTED, reason=text)
        daemon.brake.pause(f"valved: the mode that was set is unknown: {word}")
    if word and not daemon.brake.unwritten():
        daemon.handover.keep(unknown_mode="")
        daemon.handover.save()


async def run(
    config: Config, folder: state.RunFolder, gate: GatePort, processes: ProcessPort, mode_flag: Mode | None = None
) -> bool:
    """Whether no offline process is left at the end: the gate is to be closed then, once the loop has ended, for what
    still waits in the loop asks the gate."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    run_dir = folder.path
    closer = Closer()
    kube = _kube_books(config)
    outer = _outer(config, folder, gate, processes, RmProver(loop, closer), stop.set, kube)
    daemon = build(config, run_dir, outer)
    folder.keep_while(daemon.handover.is_writing)
    link = LinkServer(loop, daemon.register, run_dir / paths.LINK_SOCKET, config.quota.hello_s, closer)
    loop.add_reader(gate.stamps_fd(), daemon.gating.drain)
    take_over(daemon, config, run_dir, mode_flag)
    pending.make_folder(run_dir, group_id(config.group))
    notify = Notify()
    beat = LoopBeat(daemon.clock, gate.alive, notify.alive, daemon.note)
    watch = FolderWatch(run_dir)
    if watch.fd >= 0:
        loop.add_reader(watch.fd, _look_at_folder, watch, daemon.brake)
    room = _kube_room(config, run_dir, daemon, processes, kube)  # before the link opens: it guards every GPU
    link.start()
    servers = await _open_api(config, daemon.node, run_dir)
    metrics = await _start_metrics(config, daemon, room)
    if text := few_tasks():  # now: its own threads are there
        _tell(daemon, text)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, state.HAND_OVER):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            loop.add_signal_handler(number, stop.set)
    daemon.journal.emit(EventKind.STARTED, reason=f"mode {daemon.brake.mode.value}", pid=os.getpid())
    outer.work.do(give_back_start_pages, lambda *_: None)
    upkeep = Upkeep(gate, daemon.gating, daemon.handover, daemon.brake, folder, outer.prompt, has_watch=watch.fd >= 0)
    parts: dict[str, Callable[[], Awaitable[None]]] = {"upkeep": upkeep.run, "steps of engines": daemon.worths.run}
    if daemon.kv is not None or daemon.bystanders is not None:
        memory = daemon.kv.service if daemon.kv is not None else None
        parts["reading the cards"] = partial(keep_reading, memory, daemon.bystanders, CardReader())
    if room is not None:
        parts["the Kubernetes node"] = room.run
    beside = [asyncio.create_task(keep_going(name, make, daemon.note)) for name, make in parts.items()]
    await stop.wait()
    daemon.brake.hand_over()
    await end(beside)  # the room takes its slots back
    is_answering = await _end(daemon, outer.disk, link, servers, metrics)
    loop.remove_reader(gate.stamps_fd())
    notify.close()
    beat.stop()
    if not is_answering:  # the lock ends with the process: no thread removes a successor's name
        leave_at_once(0)
    return not daemon.brake.leaving.present()  # asked again: the link is closed, and a process may have come meanwhile


async def _end(daemon: Daemon, disk: WorkPort, link: LinkServer, servers: list[Any], metrics: Any) -> bool:
    """Whether the disk of the run folder answers."""
    is_empty = not daemon.brake.leaving.present()
    daemon.journal.emit(
        EventKind.STOPPED, reason="no offline work" if is_empty else "GPUs stay stopped until the next valved starts"
    )
    is_answering = await _forget(disk, [name for server in servers for name in server.names])
    for server in servers if is_answering else ():
        await server.stop(grace=0.5)
    if metrics is not None:
        metrics.close()
    await leave_nobody_standing(daemon.gate, daemon.brake)
    daemon.handover.save()
    await heard(partial(daemon.handover.when_saved, within_ns=PARTING_NS, is_last=True))
    is_answering = is_answering and await _forget(disk, link.names)
    await _close(daemon, link)
    return is_answering


async def _forget(disk: WorkPort, names: list[Path]) -> bool:
    """Sockets, by a thread, and before they close: `valve tune` knows by the name that no valved is here. False: the
    disk does not answer."""
    is_done = asyncio.Event()
    disk.do(lambda: [*map(forget_name, names)], lambda *_: is_done.set())
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(is_done.wait(), PARTING_NS / 1e9)
    return is_done.is_set()


async def _close(daemon: Daemon, link: LinkServer) -> None:
    link.stop()
    daemon.register.close()
    if daemon.kv is not None:
        daemon.kv.close()
    await settled(daemon.leaving.owes_signals)  # what waited for a descriptor has one now
    daemon.journal.close()


def _kube_books(config: Config) -> KubeBooks | None:
    if not config.kube.node:
        return None
    from valved.kube.host import KubeBooks  # numpy: only on such a node
    from valved.kube.pods import PodBook

    return KubeBooks(pods=PodBook(all_gpu_pods=config.kube.all_gpu_pods))


def _kube_room(
    config: Config, run_dir: Path, daemon: Daemon, processes: ProcessPort, books: KubeBooks | None
) -> Room | None:
    if books is None:
        return None
    from valved.kube.host import Host
    from valved.kube.room import Room  # and the API client

    host = Host(
        gate=daemon.gate,
        books=daemon.books,
        gating=daemon.gating,
        register=daemon.register,
        brake=daemon.brake,
        ladder=daemon.ladder,
        endings=daemon.endings,
        journal=daemon.journal,
        clock=daemon.clock,
        processes=processes,
        run_dir=run_dir,
        version=_version(),
        kv=daemon.kv,
        consents=daemon.consents,
    )
    return Room(host, config.kube, books)


async def _open_api(config: Config, node: Node, run_dir: Path) -> list[Any]:
    from valved.rpc.server import serve, serve_view  # grpc is the heaviest import: only a daemon that starts pays

    servers = [await serve(node, run_dir / paths.API_SOCKET, config.group)]
    if config.view_group:
        servers.append(await serve_view(node, run_dir / paths.VIEW_SOCKET, config.view_group))
    return servers


async def _start_metrics(config: Config, daemon: Daemon, room: Room | None) -> Any:
    if not config.metrics_port:
        return None
    from valved.scraping import serve_metrics

    more, missing = (room.metrics, room.reports.missing) if room is not None else (None, None)
    try:
        node, address = daemon.node, (config.metrics_host, config.metrics_port)
        return await serve_metrics(*address, node.status, more, missing, node.save)
    except (OSError, ValueError) as error:  # nobody goes ungated for want of a page; UnicodeError: no name of a host
        why = getattr(error, "strerror", None) or error
        text = f"no metrics on {config.metrics_host}:{config.metrics_port}: {why}"
        _tell(daemon, text)
        return None


def _tell(daemon: Daemon, trouble: str) -> None:
    daemon.note(trouble)
    daemon.node.troubles.append(trouble)


def _look_at_folder(watch: FolderWatch, brake: Brake) -> None:
    watch.clear()
    brake.look_at_file()


def _files(config: Config, run_dir: Path) -> list[tuple[LineFile, bool]]:
    files = []
    if config.audit_bytes:
        files.append((LineFile(run_dir / "audit.jsonl", config.audit_bytes), False))
    if config.trace_file:
        files.append((LineFile(Path(config.trace_file), config.trace_bytes), True))
    return files


def raise_fd_limit() -> int:
    """Every handle of the memory pool is a descriptor: take as many as we may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _version() -> str:
    """By the name of the folder that pip made. importlib.metadata says the same, and stays in memory with 1 MB: it is
    asked where that folder is elsewhere (`pip install -e`)."""
    for folder in Path(__file__).parent.parent.glob("valve-*.dist-info"):
        return folder.name.removeprefix("valve-").removesuffix(".dist-info")
    from importlib import metadata

    try:
        return metadata.version("valve")
    except metadata.PackageNotFoundError:
        return "0"
