"""`valve up`: start the daemon of this node and wait until it answers."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from valved.cli import words
from valved.cli.client import ask, is_running
from valved.cli.exits import FAILED, NOT_RUNNING, OK, REFUSED, USAGE, CliError
from valved.cli.status import show
from valved.errors import cure, told
from valved.paths import ENV_RUN_DIR, LOG_FILE, make, run_dir

PATIENCE_S = 20.0


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("up", help="Start valved on this machine and wait until it answers.")
    parser.add_argument(
        "--mode",
        choices=("off", "observe", "harvest"),
        help="How far valved may go. Default: as configured, or as set since.",
    )
    parser.add_argument("--config", type=Path, help="The configuration file (docs/configuration.md). Default: none.")
    parser.add_argument(
        "--metrics-port",
        type=words.whole(0, 65535),
        help="Serve Prometheus metrics on this loopback port. Default: as configured.",
    )
    parser.add_argument("--foreground", action="store_true", help="Stay in the terminal and log to it.")
    parser.set_defaults(run=up)


def folder_of(config: Path | None) -> Path:
    """The environment names the run folder, else the file does, else it is this user's usual one."""
    asked = configured_folder(config)  # first of all: a file that says nothing sensible is an error in any folder
    return Path(asked).absolute() if asked and not os.environ.get(ENV_RUN_DIR) else run_dir()


def configured_folder(config: Path | None) -> str:
    """What the file says; empty where it says nothing."""
    if config is None:
        return ""
    from valved.config import load_config  # brings the policies and numpy: 0.2 s that no other command should wait
    from valved.errors import ConfigError

    try:
        return load_config(config, {}).run_dir
    except ConfigError as error:
        raise CliError(str(error), USAGE, error.next_step) from None


def arguments(options: argparse.Namespace, folder: Path) -> list[str]:
    """The valved command line that these options mean."""
    argv = [sys.executable, "-P", "-m", "valved.entry"] if sys.version_info >= (3, 11) else []
    argv = argv or [sys.executable, "-m", "valved.entry"]
    argv += ["--run-dir", str(folder)]
    if options.mode:
        argv += ["--mode", options.mode]
    if options.config:
        argv += ["--config", str(options.config.resolve())]
    if options.metrics_port is not None:
        argv += ["--metrics-port", str(options.metrics_port)]
    return argv


def up(options: argparse.Namespace) -> int:
    folder = folder_of(options.config)
    try:
        running = ask(folder)
    except CliError as error:
        if error.code != NOT_RUNNING:  # it hangs, or is another user's
            raise
    else:
        return say_running(running, options, folder)
    if options.foreground:
        argv = arguments(options, folder)
        os.execv(argv[0], argv)
    log_path = folder / LOG_FILE
    with opened(log_path) as log:
        began = log.tell()  # what earlier starts wrote stands before it
        child = start(arguments(options, folder), log)
    try:
        wait_until_up(child, folder, log_path, began)
    except KeyboardInterrupt:  # whoever did not want this would not look for a daemon that harvests
        child.terminate()
        child.wait()
        raise
    running = ask(folder)
    if running.pid != child.pid:  # another command was quicker
        return say_running(running, options, folder)
    show(running)
    if folder != run_dir():
        print(f"every command finds it with {ENV_RUN_DIR}={folder}")
    return OK


def say_running(running: Any, options: argparse.Namespace, folder: Path) -> int:
    """A setting that does not come into force is an error and never a success."""
    mode = words.MODES.get(running.mode, "unknown")
    if options.mode and options.mode != mode:
        text = f"valved is already running in {folder}, in mode {mode}"
        raise CliError(text, REFUSED, f"valve mode {options.mode}")
    unread = [name for name, value in (("--config", options.config), ("--metrics-port", options.metrics_port)) if value]
    note = f"; it reads {' and '.join(unread)} only at its start" if unread else ""
    print(f"valved is already running in {folder}{note}")
    return OK


def opened(log_path: Path) -> IO[bytes]:
    try:
        make(log_path.parent)
        return open(log_path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))
    except OSError as error:
        step = f"set {ENV_RUN_DIR} to a folder that this user may write, or use sudo"
        raise CliError(told(error), FAILED, cure(error, step)) from None


def start(argv: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """In a session of its own and away from our folder: a terminal that closes must not take the daemon along."""
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/")


def wait_until_up(child: subprocess.Popen[bytes], folder: Path, log_path: Path, began: int = 0) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_running(folder):
        has_ended = child.poll() is not None
        if has_ended or time.monotonic() > deadline:
            tail = log_path.read_bytes()[began:].decode(errors="replace").splitlines()[-5:]
            slow = f"valved (pid {child.pid}) does not answer after {PATIENCE_S:g} s, and goes on"
            text = "\n  ".join(["valved did not start:" if has_ended else f"{slow}:", *tail])
            raise CliError(text, FAILED, f"the whole log: {log_path}")
        time.sleep(0.05)
