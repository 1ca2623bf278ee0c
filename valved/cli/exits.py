"""Exit codes of every `valve` command, documented in docs/cli.md."""

from __future__ import annotations

OK = 0
FAILED = 1  # the operation was tried and did not work
USAGE = 2  # the arguments make no sense
NOT_RUNNING = 3  # no valved answers on this node
REFUSED = 4  # valved understood and said no
FINDINGS = 5  # doctor found something that must be fixed
STILL_THERE = 6  # `valve drain`: offline processes are here yet; they stay stopped
UNREAD = 141  # whoever read the output has closed it, as `head` does: as a shell says of SIGPIPE
NOT_FOUND = 127  # `valve run`: the command does not exist, as in a shell


class CliError(Exception):
    """What goes wrong in a command: a message for people, and the code the process ends with."""

    def __init__(self, message: str, code: int = FAILED, next_step: str = "", *, is_silence: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.is_silence = is_silence  # valved did not answer: it may yet
        self.next_step = next_step or "see: valve status"
