"""`valve` in processes that fork from one that has loaded it: no command waits for an interpreter to start.

What a command finds is what it finds without: its own environment, arguments, standard streams or none, and the
interpreter's end. As a program it is the process that forks; nobody but WarmValve starts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


@dataclass(frozen=True, slots=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


class WarmValve:
    def __init__(self, folder: Path) -> None:
        self._outputs = (folder / "stdout", folder / "stderr")
        asked, ask = os.pipe()
        told, tell = os.pipe()
        argv = [sys.executable, __file__, str(asked), str(tell)]
        self._process = subprocess.Popen(argv, pass_fds=(asked, tell), stdin=subprocess.DEVNULL)
        os.close(asked)
        os.close(tell)
        self._ask, self._told = os.fdopen(ask, "w"), os.fdopen(told)

    def run(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        *,
        are_closed: bool = False,
        output: str = "",
        deadline_s: float = 0.0,
    ) -> Ended:
        """`are_closed`: all three streams. `output`: where it writes what nobody reads here. `deadline_s`: how long
        valved is waited for; 0: as long as usual."""
        for path in self._outputs:
            path.write_text("")
        paths = [output or str(self._outputs[0]), str(self._outputs[1])]
        asked = {"argv": list(arguments), "env": dict(env), "closed": are_closed, "deadline_s": deadline_s}
        print(json.dumps({**asked, "outputs": paths}), file=self._ask, flush=True)
        code = json.loads(self._told.readline())
        out, err = ("", "") if are_closed else (path.read_text(errors="replace") for path in self._outputs)
        return Ended(os.waitstatus_to_exitcode(code), out, err)

    def close(self) -> None:
        self._ask.close()
        self._told.close()
        self._process.wait()


def become(asked: Mapping[str, object]) -> None:
    """This process as `valve` would find itself."""
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv = ["valve", *asked["argv"]]
    for fd in range(3):  # closing Python's streams would leave them open
        os.close(fd)
    if asked["closed"]:
        sys.stdin = sys.stdout = sys.stderr = None
        return
    os.open(os.devnull, os.O_RDONLY)
    for path in asked["outputs"]:
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for fd, (name, mode) in enumerate(STREAMS):
        os.set_inheritable(fd, True)
        errors = "backslashreplace" if name == "stderr" else None
        setattr(sys, name, open(fd, mode, errors=errors, closefd=False))  # noqa: SIM115 - as long as it lives


def serve(asked_fd: int, tell_fd: int) -> Mapping[str, object] | None:
    """Returns in each process that is to become a command, and None at the end."""
    asked, tell = os.fdopen(asked_fd), os.fdopen(tell_fd, "w")
    for line in asked:
        pid = os.fork()
        if not pid:
            asked.close()
            tell.close()
            return json.loads(line)
        print(os.waitpid(pid, 0)[1], file=tell, flush=True)
    return None


if __name__ == "__main__":
    from valved.cli import client
    from valved.cli.main import main

    if command := serve(int(sys.argv[1]), int(sys.argv[2])):
        if command["deadline_s"]:
            client.NodeClient.call.__kwdefaults__["deadline_s"] = command["deadline_s"]
        become(command)
        sys.exit(main())
