"""The programs `valve` and `valved`: Ctrl-C ends them in silence while they import, which takes a second or more.

From then on it is for them to say what it means.
"""

from __future__ import annotations

import signal


def end_in_silence() -> None:
    """As a shell's child that has no handler. One that was started to ignore Ctrl-C ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def valve() -> int:
    end_in_silence()
    from valved.cli.main import main

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


def valved() -> int:
    """Its loop handles Ctrl-C as it does SIGTERM."""
    end_in_silence()
    from valved.main import main

    return main()


if __name__ == "__main__":
    raise SystemExit(valved())
