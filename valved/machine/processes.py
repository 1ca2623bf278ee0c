"""ProcessPort: identity and existence of processes, from /proc and pidfds. A process that is gone is an empty
value, never an error: it may vanish between any two lines. One that cannot be looked at (EMFILE, EACCES) is an error,
never gone.

But a machine may hide processes of other users (hidepid), and one of those may get the number of a process that we knew
and that has ended. A process that we know was readable once, so it was ours. It may hide itself later (not dumpable),
and may still be signalled then. A process that may not be signalled is another user's, so the one that we knew is gone.
Where the number went to a hidden process of our own user, that one must end first.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from valved.model.ids import ProcessId
from valved.model.plain import plain

_FIELD_STATE = 3
_FIELD_PARENT = 4
_FIELD_FLAGS = 9
_FIELD_THREADS = 20
_FIELD_START = 22
_EXITING = 0x4  # PF_EXITING of include/linux/sched.h
_NO_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)  # the last two: the number is a thread's by now
_LONGEST = 16384  # bytes of such a file: a cgroup's path may be as long as any
_THREADS = 512  # looked at of one process: some 10 us each, and a tracer keeps as many dead ones as it likes
_MOST_THREADS = 8 * _THREADS  # in looks one after the other; whoever has more of them runs
_DEPTH = 64  # no honest chain of ancestors is deeper; a torn one must not loop


def boot_shift(root: Path = Path("/proc")) -> int:
    """Ticks by which start times as this process reads them are ahead of the machine's: it may be in a time namespace,
    and others that name the same process (a command, the valved before) in another one, or in none."""
    try:
        lines = (root / "self/timens_offsets").read_text(encoding="ascii").splitlines()
    except OSError:  # before Linux 5.6
        return 0
    seconds, ns = next((line.split()[1:3] for line in lines if line.startswith("boottime")), ("0", "0"))
    ticks = os.sysconf("SC_CLK_TCK")
    return int(seconds) * ticks + int(ns) * ticks // 1_000_000_000


def _hides(root: Path) -> bool:
    """Whether this /proc was mounted with hidepid."""
    try:
        lines = (root / "self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any("hidepid=" in line and line.split()[1] == os.fspath(root) for line in lines)


class LinuxProcesses:
    """Processes as this machine's /proc shows them. `root` lets tests build a world of their own. Start times are the
    machine's."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = os.fspath(root)
        self._shift, self._hides = boot_shift(root), _hides(root)

    def _read(self, pid: int, name: str) -> str | None:
        """By plain system calls: hundreds of processes are asked for every second."""
        try:
            fd = os.open(f"{self._root}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.read(fd, _LONGEST).decode(errors="replace")
            finally:
                os.close(fd)
        except (FileNotFoundError, ProcessLookupError):
            self._check_shown(pid)
            return None

    def _check_shown(self, pid: int) -> None:
        """What /proc has no file of may be hidden instead of gone."""
        if self._hides and self._is_hidden(pid):
            raise PermissionError(errno.EACCES, "/proc hides this process", f"{self._root}/{pid}") from None

    def _is_hidden(self, pid: int) -> bool:
        """With hidepid=2 there is no such folder, as of a process that is gone; a signal still finds it."""
        if os.path.exists(f"{self._root}/{pid}"):
            return False  # it is the file that is gone: a thread ended
        try:
            os.kill(pid, 0)
        except OSError as refusal:
            return refusal.errno == errno.EPERM
        return True

    def _stat(self, pid: int, thread: int | str = 0) -> list[str] | None:
        """Fields of stat from the third on: the second, the name, may hold blanks and brackets of its own. Of the first
        thread where none is named: the file of the whole process sums up all of its threads, and takes milliseconds
        where these are thousands."""
        text = self._read(pid, f"task/{thread or pid}/stat")
        if text is None or ")" not in text:
            return None
        fields = text[text.rindex(")") + 1 :].split()
        if self._shift and len(fields) > _FIELD_START - _FIELD_STATE:
            fields[_FIELD_START - _FIELD_STATE] = str(int(fields[_FIELD_START - _FIELD_STATE]) - self._shift)
        return fields

    def start_time(self, pid: int) -> int | None:
        """None also for a zombie: nothing of it runs any more."""
        return _started(self._stat(pid))

    def is_gone(self, process: ProcessId) -> bool:
        try:
            return self.start_time(process.pid) != process.start_time
        except OSError as error:
            return _is_foreign(process.pid, error)

    def _has_thread(self, pid: int, is_one: Callable[[list[str]], bool], others: set[str]) -> bool | None:
        """A first thread says nothing of the others. `others`: those that are none, with what this look adds. None:
        there are too many for one look."""
        most = len(others) + _THREADS
        try:
            with os.scandir(f"{self._root}/{pid}/task") as threads:
                for name in (thread.name for thread in threads if thread.name not in others):
                    if len(others) == most:
                        return None
                    if (fields := self._stat(pid, name)) and is_one(fields):
                        return True
                    others.add(name)
            return False
        except (FileNotFoundError, ProcessLookupError):
            self._check_shown(pid)
            return False

    def is_ending(self, pid: int, start_time: int) -> bool:
        """A SIGKILL on its way says it all, and so does a first thread that runs. Where it cannot be read, it lives."""
        try:
            leader = self._stat(pid)
            if leader is None or int(leader[_FIELD_START - _FIELD_STATE]) != start_time:
                return True
            return self._is_killed(pid) or (not _runs(leader) and self._has_thread(pid, _runs, set()) is False)
        except OSError as error:
            return _is_foreign(pid, error)

    def _is_killed(self, pid: int) -> bool:
        """Its threads stand or run, and the next that each of them does is to end: on a busy machine that takes its
        time, and in a call of the driver as long as that takes, when its first thread may have ended already. The
        kernel keeps no SIGKILL that may be ignored. But a tracer may hold a thread at its exit for as long as it likes,
        and what the process gave the GPU runs on meanwhile."""
        text = self._read(pid, "status")
        pending = (text or "").partition("\nShdPnd:")[2].split(maxsplit=1)
        is_killed = bool(pending and int(pending[0], 16) & 1 << signal.SIGKILL - 1)
        return text is None or (is_killed and self._has_thread(pid, _is_held, set()) is False)

    def is_stopped(self, pid: int, stood: set[str] | None = None) -> bool | None:
        """A thread that the kernel keeps (D) meets the signal before it is back. Where it cannot be read, it runs."""
        stood = set() if stood is None else stood
        try:
            runs = self._has_thread(pid, lambda fields: fields[0] in ("R", "S"), stood)
        except OSError:
            return False
        return None if runs is None and len(stood) < _MOST_THREADS else runs is False

    def ancestors(self, pid: int, most: int = _DEPTH) -> Sequence[ProcessId]:
        """One file each: this is asked for every process that connects."""
        chain: list[ProcessId] = []
        for _ in range(most):
            try:
                fields = self._stat(pid) if pid > 0 else None
                started = _started(fields)
            except PermissionError:  # of another user, on a machine that hides them
                if not chain:
                    raise
                break
            if fields is None or len(fields) <= _FIELD_PARENT - _FIELD_STATE:
                break
            if started is not None:
                chain.append(ProcessId(pid=pid, start_time=started))
            pid = int(fields[_FIELD_PARENT - _FIELD_STATE])
        return chain

    def could_end_us(self, pid: int, uid: int) -> bool:
        """The kernel lets a process signal those of its user. In another pid namespace it has no number for us, and
        AppArmor or SELinux may keep one of another profile from it, as of a root container that sees all pids."""
        if uid != os.geteuid():
            return False
        ours = os.getpid()
        try:
            spaces = {os.readlink(f"{self._root}/{one}/ns/pid") for one in (pid, ours)}
            profiles = {self._profile(one) for one in (pid, ours)}
        except OSError:  # gone, or it hides itself
            return False
        return len(spaces) == len(profiles) == 1

    def _profile(self, pid: int) -> str | None:
        """What the kernel's security module calls a process; None where there is no such module."""
        try:
            return self._read(pid, "attr/current")
        except OSError as error:
            if error.errno == errno.EINVAL:
                return None
            raise

    def cgroup(self, pid: int) -> str | None:
        """The unified (v2) path, else that of the first v1 controller; on a hybrid machine the one that is not /."""
        text = self._read(pid, "cgroup")
        lines = [line.split(":", 2) for line in (text or "").splitlines() if line.count(":") >= 2]
        paths = sorted((path for _, _, path in lines), key=lambda path: path == "/")
        unified = [path for hierarchy, _, path in lines if hierarchy == "0" and path != "/"]
        return next(iter(unified or paths), None)

    def comm(self, pid: int) -> str:
        return plain((self._read(pid, "comm") or "").removesuffix("\n"))

    def open_pidfd(self, pid: int) -> int:
        try:
            return os.pidfd_open(pid)
        except OSError as error:
            if error.errno in _NO_PROCESS:
                return -1
            raise


def _is_foreign(pid: int, error: OSError) -> bool:
    """A process that we may not look at is another user's; the same rule says which one we may signal."""
    if not isinstance(error, PermissionError):
        return False
    try:
        os.kill(pid, 0)
    except OSError as refusal:
        return refusal.errno in (errno.EPERM, errno.ESRCH)
    return False


def _started(fields: list[str] | None) -> int | None:
    if fields is None or len(fields) <= _FIELD_START - _FIELD_STATE:
        return None
    if not _is_there(fields) and int(fields[_FIELD_THREADS - _FIELD_STATE]) <= 1:
        return None  # a first thread says nothing of the others: as long as there are any, they may run
    return int(fields[_FIELD_START - _FIELD_STATE])


def _is_there(fields: list[str]) -> bool:
    """Fields of a thread's stat, from the third on."""
    return fields[0] not in ("Z", "X")


def _is_held(fields: list[str]) -> bool:
    return fields[0] == "t"


def _runs(fields: list[str]) -> bool:
    return _is_there(fields) and not int(fields[_FIELD_FLAGS - _FIELD_STATE]) & _EXITING
