"""Which weights a trainer may map: valved writes the services that consent into a file of its run folder.

A service is found by its name, its weights by what its processes map. A file that a service maps is that service's,
however it was named. A user without the right to see either cannot open the file: only its owner can.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valve_tune.base.processes import mapped_by, sockets_of, with_children

ENV_RUN_DIR = "VALVE_RUN_DIR"
SYSTEM_RUN_DIR = Path("/run/valve")
NAME = "weights.json"
SOCKETS = ("link.sock", "valved.sock")  # of a valved (valved/paths.py)
LOOK_S = 1.0  # between two looks for the processes that map a file: each reads all of /proc
MAGIC = b"VALVEWTS"  # what a file of shared weights begins with
DAEMONS = ("vllm_weight_cache_", "sglang_weight_cache_")  # how the engines name their sockets, one a GPU
HOW = "the owner consents by valve run --online --share-weights, or by the annotation valve.gpu/share-weights"


class NotShared(ValueError):
    """Why weights may not be mapped, or no longer."""

    def __init__(self, why: str) -> None:
        super().__init__(f"share_weights: {why}")


def run_dir() -> Path:
    """As valved and the shim choose it (valved/paths.py)."""
    asked = os.environ.get(ENV_RUN_DIR)
    if asked:
        return Path(asked)
    if os.geteuid() == 0 or os.access(SYSTEM_RUN_DIR / "link.sock", os.F_OK):
        return SYSTEM_RUN_DIR
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "valve") if runtime else Path(f"/tmp/valve-{os.geteuid()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingService:
    id: int
    name: str
    shares: bool
    processes: tuple[tuple[int, int], ...]  # pid, start time

    def __str__(self) -> str:
        return f"service {self.id}" + (f" ({self.name})" if self.name else "")  # one that shares nothing is not named


class Owners:
    """What valved says of the online services here, read anew at each question: two changes may share a time stamp."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or run_dir()
        self._content = b""
        self._services: tuple[SharingService, ...] | None = None

    def services(self) -> tuple[SharingService, ...] | None:
        """None: not said, or not in full."""
        try:
            content = (self._folder / NAME).read_bytes()
            if content != self._content:
                self._services = tuple(map(_service, json.loads(content)["services"]))
                self._content = content
        except (OSError, ValueError, KeyError, TypeError):
            self._content, self._services = b"", None
        return self._services

    def said(self) -> tuple[SharingService, ...]:
        """Where no valved is, there is no service. One that does not say whose the files are refuses them all."""
        services = self.services()
        if services is None and any(_may_exist(self._folder / name) for name in (NAME, *SOCKETS)):
            raise NotShared(f"{self._folder / NAME}: cannot be read, so the owner of the weights is unknown")
        return services or ()

    def named(self, word: str) -> SharingService:
        found = [one for one in self.services() or () if word in (one.name, str(one.id))]
        if not found:
            raise NotShared(f"{word}: no online service of that name shares its weights here, and it is no file; {HOW}")
        if len(found) > 1:
            raise NotShared(f"{word}: {', '.join(map(str, found))} have that name; give the number")
        return found[0]

    def mapping(self, path: Path) -> tuple[SharingService, ...]:
        """Those that map this very file."""
        return tuple(one for one in self.said() if any(path.samefile(each) for each in weights_of(one)))


class Permit:
    """The consent of the weights' owner, asked at each tile. A service that maps the file later must consent, too."""

    def __init__(self, owners: Owners, services: Iterable[SharingService], path: Path | None = None) -> None:
        self._owners, self._path = owners, path
        self._of = {one.id: one for one in services}
        self._next_look = 0.0

    def check(self) -> None:
        self._ask()
        if self._path is None:
            return
        self._owners.said()
        if time.monotonic() >= self._next_look:
            self._of |= {one.id: one for one in self._owners.mapping(self._path)}
            self._next_look = time.monotonic() + LOOK_S
            self._ask()

    def covers(self, pid: int) -> bool:
        """Is it a process of one of those?"""
        return any(pid in with_children(one.processes) for one in self._of.values())

    def _ask(self) -> None:
        if not self._of:
            return
        sharing = {one.id for one in self._owners.services() or () if one.shares}
        for one in self._of.values():
            if one.id not in sharing:
                raise NotShared(f"{one} does not consent to trainers that map its weights; {HOW}")


FREE = Permit(Owners(Path("/nowhere")), ())


def find(word: str, owners: Owners | None = None) -> tuple[Path, Permit]:
    """`word` is a file of shared weights, or the name or number of an online service. The path is that of such a file,
    or of the socket of the service's weight daemon.
    """
    owners = owners or Owners()
    if "/" in word:
        path = Path(word)
        if not path.is_file():
            raise NotShared(f"{word} is no file of valve tune share; a service is named as valve status shows it")
        permit = Permit(owners, (), path)
        permit.check()
        return path, permit
    service = owners.named(word)
    permit = Permit(owners, [service])
    permit.check()
    files = sorted(set(weights_of(service)))
    found = files or sorted(set(daemons_of(service)))
    if not found:
        raise NotShared(
            f"{service} consents, but maps no file of valve tune share that this user may see, and none of its "
            "processes is a weight daemon (vllm preload, python -m sglang.srt.weight_cache.daemon)"
        )
    if len(found) > 1:
        raise NotShared(
            f"{service} consents, but "
            + (
                "maps several files of weights; name one"
                if files
                else f"has {len(found)} weight daemons: a base on several GPUs is not shared"
            )
        )
    permit = Permit(owners, [service], files[0] if files else None)
    permit.check()
    return found[0], permit


def _service(said: dict[str, Any]) -> SharingService:
    processes = tuple((int(pid), int(start)) for pid, start in said["processes"])
    return SharingService(
        id=int(said["id"]), name=str(said["name"]), shares=said["shares"] is True, processes=processes
    )


def _may_exist(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # where we may not look
        pass
    return True


def weights_of(service: SharingService) -> Iterator[Path]:
    """Files of shared weights that its processes, and those that they started, map."""
    for pid in with_children(service.processes):
        yield from filter(_is_weights, mapped_by(pid))


def daemons_of(service: SharingService) -> Iterator[Path]:
    """Sockets of the engines' weight daemons among its processes. One of a draft model holds no base."""
    for path in sockets_of(with_children(service.processes)):
        if path.name.startswith(DAEMONS) and not path.name.endswith("_draft.sock"):
            yield path


def _is_weights(path: Path) -> bool:
    try:
        if not path.is_file():  # a device is never opened
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
