"""What a successor must know, in one file; and the lock that says which valved owns this run folder.

Handles of channels mean something only within one boot and one driver: the file names both, and a reader that finds
others keeps the counters and forgets the rest. Written whole to a new file and renamed: a torn file cannot exist.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from valved import paths
from valved.errors import AlreadyRunning, told
from valved.fds import MOST_BYTES, Fds, is_scarce, read_file, write_private
from valved.model.figures import fits
from valved.model.ids import Mode, ProcessId, ServiceId
from valved.model.memory import ReservationState

VERSION = 1
CLIENTS_BYTES = MOST_BYTES // 4 * 3  # of a state, which a successor reads only up to that size
LOCK_FILE = "valved.lock"
BAD = ".bad"
NEXT_FILE = "valved.next"  # locked by a successor that waits
PID_FILE = "valved.pid"
REPLACE_S = 10.0
HAND_OVER = signal.SIGUSR2  # end, but leave the gates as they are: a successor waits for the lock


class SavedChannel(msgspec.Struct, frozen=True, array_like=True):
    gpu: int
    h_client: int
    h_channel: int
    cid: int
    h_tsg: int
    engine: int
    compute: bool


class SavedClient(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    start_time: int
    role: int
    service: int
    channels: list[SavedChannel]  # of an offline client, less those that the application switched itself

    @property
    def process(self) -> ProcessId:
        return ProcessId(pid=self.pid, start_time=self.start_time)


class SavedRequests(msgspec.Struct, frozen=True, array_like=True):
    """What one process had told of its requests."""

    pid: int
    start_time: int
    role: int
    started: int
    ended: int
    open_hits: list[tuple[int, int]]  # preemptions so far, of how many open requests


class SavedService(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    name: str
    role: int
    root: ProcessId | None  # the claimed process
    cgroup: str = ""
    gpus: list[int] = []
    cooldown: tuple[int, int, int] | None = None  # mark_ns, age_ns, gaps
    breaker: tuple[int, int] | None = None  # until when it is open (CLOCK_MONOTONIC, ns; 0: never was), trips
    preemptions: int = 0
    delay_ns: int = 0
    held_ns: int = 0
    unseen_ns: int = 0
    freed_ns: int = 0
    harvest_ns: int = 0
    tokens: list[tuple[int, int, int]] = []  # useful ones: pid and start time of the process, how many
    requests: int = 0
    most_preempted: int = 0
    preempted: list[int] = []
    told: list[SavedRequests] = []
    slo: str = ""  # its launcher's words
    grant: str = ""
    share_weights: str = ""


class SavedGpu(msgspec.Struct, frozen=True, kw_only=True):
    uuid: str
    harvest_ns: int
    gated_ns: int
    gates: int
    latency: list[int]
    latency_sum_ns: int


class SavedHistogram(msgspec.Struct, frozen=True, kw_only=True):
    counts: list[int]
    sum_ns: int


class SavedPeak(msgspec.Struct, frozen=True, array_like=True):
    """The most memory that online services of a name had on a GPU, and when it was last so much."""

    gpu: int
    name: str
    plain: tuple[int, int]
    kv: tuple[int, int]
    last: tuple[int, int] = (0, 0)  # plain and KV, by the last look at the card


class SavedMemory(msgspec.Struct, frozen=True, kw_only=True):
    counters: dict[str, int] = {}
    phases: dict[str, SavedHistogram] = {}
    reservations: dict[ServiceId, ReservationState] = {}  # of online services
    reclaims: dict[str, tuple[int, ...]] = {}  # of each GPU, by uuid: when
    peaks: list[SavedPeak] = []


class SavedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody set while valved ran: it outlives a restart."""

    mode: Mode | None = None
    unknown_mode: str = ""  # a word that this version does not know: what somebody set is not known
    cooldown: tuple[int, int, int, float, int] | None = None  # start, floor, ceiling, factor, window


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    boot_id: str
    driver: str
    counters: dict[str, int]
    refusals: dict[str, int]
    gpus: list[SavedGpu]
    services: list[SavedService]
    clients: list[SavedClient]
    next_client: int
    next_service: int
    policy: SavedPolicy = SavedPolicy()
    memory: SavedMemory = SavedMemory()
    frozen: list[ProcessId] = []  # processes stopped by signal: somebody must let them go
    ending: list[ProcessId] = []  # processes that are stopped, or to be, and then killed


def boot_id() -> str:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


class StateEncoder:
    """Encodes states of one daemon, one after another. Clients with their channels are most of a state, and seldom
    change."""

    def __init__(self) -> None:
        self._clients: list[SavedClient] = []
        self._encoded = msgspec.Raw(b"[]")

    def encode(self, state: SavedState) -> bytes:
        """ValueError: a successor could not read it (JSON has no inf)."""
        rest = msgspec.json.encode(msgspec.structs.replace(state, clients=[]))
        msgspec.json.decode(rest, type=SavedState)  # ValidationError is a ValueError
        if state.clients != self._clients:  # which compares those that are the same objects for nothing
            self._clients, self._encoded = [], msgspec.Raw(b"[]")  # the old ones go before there are new ones
            parts = [msgspec.json.encode(client) for client in state.clients]
            for part in parts:  # one at a time: all of them as objects are megabytes
                msgspec.json.decode(part, type=SavedClient)
            if sum(map(len, parts)) > CLIENTS_BYTES:  # no real channels: a client may tell of any
                most = CLIENTS_BYTES // len(parts)
                bare = [msgspec.json.encode(msgspec.structs.replace(one, channels=[])) for one in state.clients]
                parts = [part if len(part) <= most else less for part, less in zip(parts, bare, strict=True)]
            self._clients, self._encoded = state.clients, msgspec.Raw(b"[" + b",".join(parts) + b"]")
        return msgspec.json.encode(msgspec.structs.replace(state, clients=self._encoded))


def save(path: Path, state: SavedState, encoder: StateEncoder | None = None) -> None:
    """On the disk when it returns, which may take as long as that likes. ValueError: a successor could not read it,
    and the file stays as it is."""
    data = (encoder or StateEncoder()).encode(state)
    fresh = path.with_name(f".{path.name}.new")
    write_private(fresh, data, sync=True)
    fresh.replace(path)
    with contextlib.suppress(OSError), Fds() as fds:  # some file systems know no such thing
        os.fsync(fds.own(os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)))


def load(path: Path) -> tuple[SavedState | None, str]:
    """The predecessor's state, or why there is none; and what is wrong with it. An unreadable file is set aside, never
    a reason not to start. One that cannot be opened for want of a descriptor is no unreadable one (OSError): the next
    start may read it."""
    problem = ""
    try:
        data = read_file(path)
        said = msgspec.json.decode(data)
        version = said.get("version") if isinstance(said, dict) else None
        if isinstance(version, int) and version != VERSION:
            keep_bad(path)
            text = f"{path} is of version {version}, this valved reads {VERSION}: only settings and claims"
            return _of_another_version(said), f"{text} were taken over; {path.name}{BAD} has the rest"
        try:
            state = msgspec.json.decode(data, type=SavedState)
            if not fits(said):
                raise msgspec.ValidationError("a number is too large")
        except msgspec.ValidationError as error:  # values of a hand
            state = sensible(said)
            problem = f"{path}: what makes no sense was left out: {error}"
            keep_bad(path)
    except FileNotFoundError:
        return None, ""
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and is_scarce(error):
            raise
        with contextlib.suppress(OSError):
            path.replace(path.with_name(path.name + BAD))
        fate = "cannot be" if os.path.lexists(path) else "was"
        return None, f"{path} is unreadable and {fate} set aside: {told(error)}"
    return state, problem


def _of_another_version(said: dict[str, Any]) -> SavedState:
    """What an operator set, who was claimed and who was here, as far as its words are ours: an upgrade that is taken
    back must not begin to harvest, and its services stay what they are and keep their GPUs until they are back. No
    channels, whose numbers may mean something else there."""
    kept: dict[str, Any] = {name: said[name] for name in ("version", "policy", "services") if name in said}
    if isinstance(clients := said.get("clients"), list):
        kept["clients"] = [{**client, "channels": []} for client in clients if isinstance(client, dict)]
    for name in ("boot_id", "driver"):
        kept[name] = text if isinstance(text := said.get(name), str) else ""
    return sensible(kept)


def sensible(said: object) -> SavedState:
    """What of it can be read: a field, an entry of a map or a record of a list without sense costs itself alone.
    ValidationError: it is no state at all, or does not say of which boot, driver and version."""
    if not isinstance(said, dict):
        raise msgspec.ValidationError("this is no state")
    empty = {
        "counters": {},
        "refusals": {},
        "gpus": [],
        "services": [],
        "clients": [],
        "next_client": 1,
        "next_service": 1,
    }
    return msgspec.convert({**empty, **_readable(said, SavedState)}, SavedState, str_keys=True)


def _readable(said: dict[str, Any], kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    parts = {name: _part(said[name], hints[name]) for name in hints if name in said}
    return {name: part for name, part in parts.items() if part is not msgspec.UNSET}


def _part(value: Any, kind: Any) -> Any:
    """UNSET: none of it makes sense."""
    if _is_a(value, kind):
        return value
    within = get_args(kind)
    if isinstance(value, list) and get_origin(kind) is list:
        return [one for one in value if _is_a(one, within[0])]
    if isinstance(value, dict) and get_origin(kind) is dict:
        return {name: one for name, one in value.items() if _is_a({name: one}, kind)}
    if kind is SavedPolicy:
        said = value if isinstance(value, dict) else {"mode": value}
        parts = _readable(said, kind)
        return parts if "mode" in parts or "mode" not in said else {**parts, "unknown_mode": str(said["mode"])}
    if isinstance(value, dict) and kind is SavedMemory:
        return _readable(value, kind)
    return msgspec.UNSET


def _is_a(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError:
        return False
    return fits(value)


def keep_bad(path: Path) -> None:
    """Parts of it made no sense: keep it for people, before the next save writes it anew."""
    with contextlib.suppress(OSError):
        write_private(path.with_name(path.name + BAD), read_file(path))


class RunFolder:
    """The run folder and its lock, held for the life of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        paths.make(path)
        self._lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._next = -1
        self._is_writing: Callable[[], bool] = lambda: False

    def take(self, *, replace: bool) -> None:
        """Become the valved of this folder; `replace` ends the present one first (it hands over its state)."""
        if self._try_lock():
            return
        if not replace:
            pid = self._owner()
            raise AlreadyRunning(
                f"valved {pid or ''} already runs in {self.path}",
                field="--run-dir",
                next_step=f"use it, or take over from it: valved --run-dir {self.path} --replace",
            )
        deadline, told = time.monotonic() + REPLACE_S, 0
        while not self._try_lock():
            if (pid := self._owner()) not in (0, told):
                told = pid
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, HAND_OVER)
            if time.monotonic() > deadline:
                raise AlreadyRunning(f"valved {told or ''} did not leave {self.path} within {REPLACE_S:.0f} s")
            time.sleep(0.01)

    def queue(self) -> bool:
        """Take the lock if it is free, else stand next in line for it (`has_successor`). True: it is ours."""
        if self._next < 0:
            self._next = self._stand_in_line()
        if self._next < 0 or not self._try_lock():
            return False
        self._leave_line()
        return True

    def _stand_in_line(self) -> int:
        """-1: somebody else is next."""
        with Fds() as fds:
            fd = fds.own(os.open(self.path / NEXT_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            if not _lock(fd):
                return -1
            fds.keep()
        return fd

    def _leave_line(self) -> None:
        fd, self._next = self._next, -1
        if fd >= 0:
            os.close(fd)

    def sign(self) -> None:
        write_private(self.path / PID_FILE, b"%d\n" % os.getpid())

    def is_ours(self) -> bool:
        """False once somebody removed the folder: what stands at its path now is nobody's, or another valved's."""
        try:
            return os.path.samestat(os.fstat(self._lock), os.stat(self.path / LOCK_FILE))
        except (FileNotFoundError, NotADirectoryError):  # or a file stands at its path
            return False

    def keep_while(self, is_writing: Callable[[], bool]) -> None:
        """A thread that still writes the state would put it over a successor's. Then the lock ends with the process."""
        self._is_writing = is_writing

    def release(self) -> None:
        """Safe to call again."""
        self._leave_line()
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):
            if self.is_ours():
                (self.path / PID_FILE).unlink(missing_ok=True)
        if self._is_writing():
            return
        fd, self._lock = self._lock, -1
        os.close(fd)

    def _try_lock(self) -> bool:
        return _lock(self._lock)

    def _owner(self) -> int:
        """0: not known now. The file may name a valved that was killed, and its number may be a stranger's by now."""
        try:
            pid = int(read_file(self.path / PID_FILE))
            files = (os.stat(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd"))
            return pid if any(os.path.samestat(file, os.fstat(self._lock)) for file in files) else 0
        except (OSError, ValueError):
            return 0


def has_successor(path: Path) -> bool:
    """Somebody waits to become the valved of this folder."""
    with contextlib.suppress(FileNotFoundError), Fds() as fds:
        return not _lock(fds.own(os.open(path / NEXT_FILE, os.O_RDWR | os.O_CLOEXEC)))
    return False


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
