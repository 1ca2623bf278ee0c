"""The composition root: the only file that constructs things; read it to see what the daemon is made of.

Order of the start: native gate, books, what a predecessor left, link socket, API. There are two ends. `valve drain
--stop` ends the daemon when no offline process is left. SIGTERM, and SIGUSR2 (sent by `valved --replace`), hand over:
offline work on GPUs that online services use is stopped and stays so until a successor is there, so none runs unwatched
in between; without one it stays stopped by the lease of its shims. Both write the state.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import msgspec

from valved import paths
from valved.clients.consents import Consents
from valved.clients.register import Register
from valved.clients.server import LinkServer
from valved.clients.sharing import SharedWeights
from valved.config import Config, group_id
from valved.errors import ValveError
from valved.gate.freeze import Ladder
from valved.gate.granting import Granting
from valved.gate.slices import Slices
from valved.gate.wake import GateService, GateSettings
from valved.gate.worth import Worths
from valved.machine import signals
from valved.machine.clock import Clock, LoopClock
from valved.machine.driver import driver_state
from valved.machine.helpers import Closer, Worker
from valved.machine.notify import Notify
from valved.machine.ports import GatePort, ProcessPort
from valved.machine.possession import RmProver
from valved.machine.uvm import UvmDoors
from valved.machine.watch import FolderWatch
from valved.model.consent import Said
from valved.model.events import EventKind
from valved.model.ids import Mode, ProcessId, Role
from valved.node.api import Node
from valved.node.brake import Brake
from valved.node.bystanders import Bystanders
from valved.node.comeback import ComeBack
from valved.node.handover import Handover
from valved.node.kv import Kv, put_together
from valved.node.leaving import Leaving
from valved.node.status import Reporter
from valved.node.upkeep import LoopBeat, Upkeep, end, keep_going, read_cards, settled
from valved.state import pending
from valved.state import saved as state
from valved.state.journal import Journal
from valved.state.lived import Lived
from valved.state.registry import Books
from valved.state.stats import NodeCounters
from valved.state.trace import LineFile


@dataclass(slots=True, kw_only=True)
class Daemon:
    """Everything that lives as long as the process does."""

    loop: asyncio.AbstractEventLoop
    gate: GatePort
    journal: Journal
    books: Books
    gating: GateService
    register: Register
    handover: Handover
    come_back: ComeBack
    brake: Brake
    ladder: Ladder
    node: Node
    consents: Consents
    sharing: SharedWeights
    worths: Worths
    link: LinkServer
    kv: Kv | None
    bystanders: Bystanders | None
    stop: asyncio.Event

    def note(self, text: str) -> None:
        self.journal.emit(EventKind.NOTED, reason=text)


def build(
    config: Config,
    folder: state.RunFolder,
    gate: GatePort,
    processes: ProcessPort,
    loop: asyncio.AbstractEventLoop,
) -> Daemon:
    run_dir = folder.path
    clock, stop = LoopClock(loop), asyncio.Event()
    journal = Journal(clock, config.ring_events, _files(config, run_dir))
    books = Books()
    gating = GateService(gate, books, journal, clock, _settings(config), NodeCounters())
    closer = Closer()
    prover = RmProver(loop, closer)
    rooms = (gate, books, gating, journal, clock, processes)
    register = Register(*rooms, loop, config.quota, config.link, prover, Lived(run_dir))

    def send(process: ProcessId, number: signal.Signals) -> bool:
        return signals.send(process, number, processes)

    ladder = Ladder(books, gating, journal, clock, config.ladder, send, register.leave)
    kv = _memory(config, gate, books, gating, register, ladder, journal, clock, processes, loop, closer=Closer())
    leaving = Leaving.of(config, gate, books, register, journal, clock, processes, send)
    brake = Brake(gating, register, ladder, leaving, journal, run_dir / paths.PAUSE_FILE, kv)
    handover = Handover(
        run_dir / state.STATE_FILE,
        gate,
        books,
        gating,
        register,
        journal,
        clock,
        processes,
        state.boot_id(),
        ladder,
        kv,
        is_ours=folder.is_ours,
    )
    ladder.changed = handover.save_soon
    bystanders = _bystanders(config, gate, books, gating, register, processes, journal, ladder)
    consents, granting, worths = _granting(config, gate, books, gating, register, journal, clock)
    reporter = Reporter(
        gate,
        books,
        gating,
        register,
        brake,
        journal,
        clock,
        version=_version(),
        run_dir=run_dir,
        lease_ns=config.lease_ns,
        driver=driver_state(gate.driver_version()),
        bystanders=bystanders,
        kv=kv,
        granting=granting,
    )
    node = Node(gating, register, brake, reporter, handover, journal, consents, lease_ns=config.lease_ns, stop=stop.set)
    link = LinkServer(loop, register, run_dir / paths.LINK_SOCKET, config.quota.hello_s, closer)
    return Daemon(
        loop=loop,
        gate=gate,
        journal=journal,
        books=books,
        gating=gating,
        register=register,
        handover=handover,
        come_back=ComeBack(books, gating, register, journal, clock, processes, bystanders),
        brake=brake,
        ladder=ladder,
        node=node,
        consents=consents,
        sharing=_sharing(books, gating, consents, run_dir),
        worths=worths,
        link=link,
        kv=kv,
        bystanders=bystanders,
        stop=stop,
    )


def _settings(config: Config) -> GateSettings:
    return GateSettings(
        cooldown=config.cooldown_settings(), wake=config.wake_settings(), breaker=config.breaker_settings()
    )


def _memory(
    config: Config,
    gate: GatePort,
    books: Books,
    gating: GateService,
    register: Register,
    ladder: Ladder,
    journal: Journal,
    clock: LoopClock,
    processes: ProcessPort,
    loop: asyncio.AbstractEventLoop,
    *,
    closer: Closer,
) -> Kv | None:
    """`closer`: of its own, as descriptors of strangers may hang for ever, and memory must go back."""
    if not config.memory.enabled:
        return None
    return put_together(
        gate,
        books,
        gating,
        register,
        ladder,
        journal,
        clock,
        processes,
        loop,
        config,
        fd_limit=raise_fd_limit(),
        outside_port=UvmDoors(loop),
        work=Worker(loop),
        closer=closer,
    )


def _granting(
    config: Config,
    gate: GatePort,
    books: Books,
    gating: GateService,
    register: Register,
    journal: Journal,
    clock: Clock,
) -> tuple[Consents, Granting, Worths]:
    consents = Consents(books, gating, journal, config.granted.said())
    leftovers = register.channels.leftovers
    slices = Slices(gate.granting, books, config.granted.slices(), gate.driver_version())
    register.channels.keeps_files = slices.is_on
    worths = Worths(gate.granting, gating, books, clock)
    granting = Granting(gate.granting, gating, books, consents.of, lambda: len(leftovers) > 0, slices, worths)
    consents.changed = granting.refresh
    return consents, granting, worths


def _sharing(books: Books, gating: GateService, consents: Consents, run_dir: Path) -> SharedWeights:
    sharing = SharedWeights(books, gating, consents.of, run_dir / paths.WEIGHTS_FILE)
    consents.changed = sharing.after(consents.changed)
    gating.clients_changed = sharing.after(gating.clients_changed)
    return sharing


def _bystanders(
    config: Config,
    gate: GatePort,
    books: Books,
    gating: GateService,
    register: Register,
    processes: ProcessPort,
    journal: Journal,
    ladder: Ladder,
) -> Bystanders | None:
    """On a Kubernetes node valved/kube looks, with pods."""
    if config.kube.node or not config.guard_bystanders:
        return None
    expected = register.channels.leftovers.expected
    return Bystanders(books, gating, processes, journal, gate.gpus(), ladder.freeze_stranger, expected)


def take_over(daemon: Daemon, config: Config, run_dir: Path, mode_flag: Mode | None = None) -> None:
    """Pick up what a predecessor left, then apply mode, pause and drain. A mode on the command line wins for good over
    one that was set while a predecessor ran.
    """
    saved, problem = state.load(run_dir / state.STATE_FILE)
    daemon.come_back.begin(config.link.come_back_s, is_first=saved is None and not problem)
    if problem:
        daemon.journal.emit(EventKind.NOTED, reason=problem)
    if saved is not None:
        daemon.handover.restore(saved, config.link.come_back_s)
    if mode_flag is not None:
        daemon.handover.policy = msgspec.structs.replace(daemon.handover.policy, mode=None)
    daemon.brake.set_mode(daemon.handover.policy.mode or mode_flag or config.mode, "start")
    daemon.brake.look_at_file()
    daemon.sharing.begin()


async def run(
    config: Config, folder: state.RunFolder, gate: GatePort, processes: ProcessPort, mode_flag: Mode | None = None
) -> None:
    loop = asyncio.get_running_loop()
    run_dir = folder.path
    daemon = build(config, folder, gate, processes, loop)
    loop.add_reader(gate.stamps_fd(), daemon.gating.drain)
    take_over(daemon, config, run_dir, mode_flag)
    pending.make_folder(run_dir, group_id(config.group))
    daemon.register.look_for_claims = lambda: _pick_up_claims(daemon, run_dir)
    notify = Notify()
    beat = LoopBeat(LoopClock(loop), gate.alive, notify.alive, daemon.note)
    watch = FolderWatch(run_dir)
    if watch.fd >= 0:
        loop.add_reader(watch.fd, _look_at_folder, watch, daemon.brake)
    room = _kube_room(config, run_dir, daemon, processes)  # before the link opens: it guards every GPU
    daemon.link.start()
    servers = await _open_api(config, daemon.node, run_dir)
    metrics = await _start_metrics(config, daemon, room)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop.set)
    loop.add_signal_handler(state.HAND_OVER, daemon.stop.set)
    daemon.journal.emit(EventKind.STARTED, reason=f"mode {daemon.brake.mode.value}", pid=os.getpid())
    upkeep = Upkeep(gate, daemon.gating, daemon.handover, daemon.brake, daemon.sharing, folder, has_watch=watch.fd >= 0)
    parts: dict[str, Callable[[], Awaitable[None]]] = {"upkeep": upkeep.run, "steps of engines": daemon.worths.run}
    if daemon.kv is not None:
        parts["reading the cards"] = partial(read_cards, daemon.kv.service)
    if daemon.bystanders is not None:
        parts["who uses GPUs without Valve"] = daemon.bystanders.run
    if room is not None:
        parts["the Kubernetes node"] = room.run
    beside = [asyncio.create_task(keep_going(name, make, daemon.note)) for name, make in parts.items()]
    await daemon.stop.wait()
    daemon.brake.hand_over()
    await end(beside)  # the room takes its slots back
    is_empty = not daemon.brake.leaving.present()
    daemon.journal.emit(EventKind.STOPPED, reason="no offline work" if is_empty else "gates stay for a successor")
    for server in servers:
        await server.stop(grace=0.5)
    if metrics is not None:
        metrics.close()
    await settled(gate)
    daemon.handover.save()
    daemon.link.stop()
    daemon.register.close()
    if daemon.kv is not None:
        daemon.kv.close()
    daemon.journal.close()
    loop.remove_reader(gate.stamps_fd())
    notify.close()
    beat.stop()
    if not daemon.brake.leaving.present():  # asked again: the link is closed, and somebody may have come meanwhile
        gate.close()


def _kube_room(config: Config, run_dir: Path, daemon: Daemon, processes: ProcessPort) -> Any:
    if not config.kube.node:
        return None
    from valved.kube.host import Host
    from valved.kube.room import Room  # numpy and the API client: only on such a node

    host = Host(
        gate=daemon.gate,
        books=daemon.books,
        gating=daemon.gating,
        register=daemon.register,
        brake=daemon.brake,
        ladder=daemon.ladder,
        journal=daemon.journal,
        clock=LoopClock(daemon.loop),
        processes=processes,
        run_dir=run_dir,
        version=_version(),
        kv=daemon.kv,
        consents=daemon.consents,
    )
    room = Room(host, config.kube)
    daemon.consents.pods = room.book
    look = room.book.changed
    room.book.changed = lambda: (daemon.consents.changed(), look())[1]
    return room


async def _open_api(config: Config, node: Node, run_dir: Path) -> list[Any]:
    from valved.rpc.server import serve, serve_view  # grpc is the heaviest import: only a daemon that starts pays

    servers = [await serve(node, run_dir / paths.API_SOCKET, config.group)]
    if config.view_group:
        servers.append(await serve_view(node, run_dir / paths.VIEW_SOCKET, config.view_group))
    return servers


async def _start_metrics(config: Config, daemon: Daemon, room: Any) -> Any:
    if not config.metrics_port:
        return None
    from valved.metrics import serve_metrics

    more, missing = (room.metrics, room.reports.missing) if room is not None else (None, None)
    try:
        return await serve_metrics(config.metrics_host, config.metrics_port, daemon.node.status, more, missing)
    except OSError as error:  # nobody goes ungated for want of a page
        daemon.note(f"no metrics on {config.metrics_host}:{config.metrics_port}: {error.strerror or error}")
        return None


def _pick_up_claims(daemon: Daemon, run_dir: Path) -> None:
    """What `valve run --online` left while no valved answered."""
    for claim in pending.take(run_dir):
        try:
            said = Said(slo=claim.slo, grant=claim.grant, share_weights=claim.share_weights)
            daemon.node.launch(claim.pid, claim.start_time, Role.ONLINE, claim.name, said)
        except (ValveError, OSError) as error:
            daemon.note(f"claim of process {claim.pid}, left while no valved answered: {error}")


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
    try:
        return version_of("valve")
    except PackageNotFoundError:
        return "0"
