"""Processes as /proc shows them: parents and children, what they map, at which sockets they listen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

LISTENS = 1 << 16  # __SO_ACCEPTCON in the flags of /proc/net/unix


def start_of(pid: int) -> int | None:
    """None: it is gone, or dead and only not yet buried."""
    try:
        words = _words(pid)
    except OSError:
        return None
    return None if words[0] in (b"Z", b"X") else int(words[19])


def with_children(roots: Iterable[tuple[int, int]]) -> list[int]:
    """Of roots, (pid, start time), that are still the same processes."""
    stats = dict(_stats())
    found = [pid for pid, start in roots if stats.get(pid, (0, 0))[1] == start]
    for parent in found:  # it grows meanwhile
        found.extend(pid for pid, (of, _) in stats.items() if of == parent and pid not in found)
    return found


def mapped_by(pid: int) -> Iterator[Path]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:  # gone, or another user's
        return
    for name in dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if line.count(" /")):
        yield Path(name)


def sockets_of(pids: Iterable[int]) -> Iterator[Path]:
    """Unix sockets at which they listen, by their paths."""
    held = {link for pid in pids for link in _descriptors(pid)}
    for line in Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()[1:]:
        words = line.split(maxsplit=7)  # address, references, protocol, flags, type, state, inode, path
        if len(words) == 8 and int(words[3], 16) & LISTENS and f"socket:[{words[6]}]" in held:
            yield Path(words[7])


def _descriptors(pid: int) -> Iterator[str]:
    """What they are. One that is closed meanwhile, such as that of the listing itself, hides no other."""
    with suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                yield str(each.readlink())


def _stats() -> Iterator[tuple[int, tuple[int, int]]]:
    """(pid, (parent, start time)) of all processes."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = _words(int(entry.name))
            except OSError:
                continue
            yield int(entry.name), (int(words[1]), int(words[19]))


def _words(pid: int) -> list[bytes]:
    """From the state on. The name before it may hold blanks and brackets: read from its end."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
