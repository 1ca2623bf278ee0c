"""`valve service install|remove|show`: valved as a systemd unit, for machines without Kubernetes."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from valved.cli import drain, policy, words
from valved.cli.client import ask
from valved.cli.exits import FAILED, NOT_RUNNING, OK, REFUSED, CliError
from valved.cli.up import PATIENCE_S, configured_folder
from valved.machine.processes import LinuxProcesses, boot_shift
from valved.model.ids import Role
from valved.paths import ENV_RUN_DIR, STATE_FILE, SYSTEM_RUN_DIR
from valved.state.saved import SavedState, boot_id

UNIT = "valved.service"
SYSTEM_FOLDER = Path("/etc/systemd/system")
PROGRAM = Path(__file__).resolve().parents[1]
LOOK_S = 0.1
BOOTED = Path("/run/systemd/system")  # there while systemd runs the machine; its programs alone may be there, too

# Type=exec: the daemon opens its sockets before it does anything, and `valve status` says when it answers.
# KillMode=process: only valved itself is ours to stop. TimeoutStopSec leaves room to enable every channel.
# StartLimitIntervalSec=0: while no valved runs, offline work beside a service stays stopped, and new work is refused.
# So one that ends again and again is started again and again; only a wrong configuration (78) stops that.
TEMPLATE = """\
[Unit]
Description=Valve node daemon (offline work on the GPUs of online services)
After=nvidia-persistenced.service
Wants=nvidia-persistenced.service
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={python} -m valved.main{folder}{options}
WorkingDirectory=/
KillMode=process
KillSignal=SIGTERM
TimeoutStopSec=60
WatchdogSec=30
WatchdogSignal=SIGKILL
NotifyAccess=main
Restart=on-failure
RestartPreventExitStatus=78
OOMScoreAdjust=-900
RestartSec=200ms
LimitNOFILE=1048576
CPUSchedulingPolicy=other

[Install]
WantedBy=multi-user.target
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("service", help="Install, remove or show the systemd unit of valved.")
    parser.add_argument("action", choices=("install", "remove", "show"), help="What to do with the unit.")
    parser.add_argument(
        "--mode",
        choices=("off", "observe", "harvest"),
        help="How far valved may go. Default: as configured, or as set since.",
    )
    parser.add_argument(
        "--config", type=Path, help="The configuration file of valved (docs/configuration.md). Default: none."
    )
    parser.add_argument(
        "--folder", type=Path, default=SYSTEM_FOLDER, help="The folder of systemd's units. Default: %(default)s."
    )
    parser.add_argument("--no-start", action="store_true", help="Install the unit, but neither enable nor start it.")
    parser.set_defaults(run=service)


def unit(options: argparse.Namespace) -> str:
    folder = "" if configured_folder(options.config) else f" --run-dir {SYSTEM_RUN_DIR}"
    return TEMPLATE.format(python=quoted(sys.executable), folder=folder, options=_options(options, "--default-mode"))


def _options(options: argparse.Namespace, mode_flag: str) -> str:
    """`--mode` would win over what is set while valved runs, and a unit says it again whenever valved has crashed."""
    mode = f" {mode_flag} {options.mode}" if options.mode else ""
    return mode + (f" --config {quoted(options.config.resolve())}" if options.config else "")


def quoted(word: object) -> str:
    """One word of a command line of systemd, which would take blanks, quotes, % and $ for its own."""
    text = str(word)
    for found, meant in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        text = text.replace(found, meant)
    return f'"{text}"' if text != str(word) or " " in text else text


def folder_of(text: str) -> Path:
    """The run folder of the valved that this unit starts."""
    command = next((line for line in text.splitlines() if line.startswith("ExecStart=")), "")
    with contextlib.suppress(ValueError, CliError):  # somebody has changed it, or its file is gone
        words = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(command)]
        named = dict(pairwise(words))
        config = Path(named["--config"]) if "--config" in named else None
        return Path(named.get("--run-dir") or configured_folder(config) or SYSTEM_RUN_DIR)
    return SYSTEM_RUN_DIR


def asked_systemctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemctl", *arguments], check=False, capture_output=True, text=True)


def systemctl(*arguments: str) -> None:
    done = asked_systemctl(*arguments)
    if done.returncode:
        raise CliError(f"systemctl {' '.join(arguments)}: {done.stderr.strip()}", FAILED, "systemctl status valved")


def _install(path: Path, options: argparse.Namespace) -> None:
    text = unit(options)
    before, fresh = path.read_bytes() if path.exists() else None, text.encode()
    if not options.no_start:
        _refuse_another(folder_of(text))
    if before != fresh:
        _write(path, fresh)
    if options.no_start:
        return
    try:
        systemctl("daemon-reload")
    except CliError:  # this user may write here, and not have systemd read it
        path.unlink() if before is None else _write(path, before)
        raise
    if is_outdated(int(shown().get("MainPID", 0)), [path, *([options.config] if options.config else [])]):
        systemctl("try-restart", UNIT)  # the next takes over from its state file
    systemctl("enable", "--now", UNIT)
    running = _wait_until_up(folder_of(text), path)
    if options.mode and options.mode != words.MODES[running.mode]:  # another one was set before
        os.environ[ENV_RUN_DIR] = str(folder_of(text))
        policy.mode(options)


def shown() -> dict[str, str]:
    """What systemd says of the unit."""
    names = ("MainPID", "ActiveState", "InvocationID")
    lines = asked_systemctl("show", *(f"--property={name}" for name in names), UNIT).stdout.splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def is_outdated(pid: int, settings: list[Path]) -> bool:
    """Whether this valved began before its unit, its configuration or its program was last written."""
    began = LinuxProcesses().start_time(pid) if pid else None
    if began is None:
        return False
    since_boot_s = (began + boot_shift() + 1) / os.sysconf("SC_CLK_TCK")  # it began within this tick
    began_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s
    program = [file for file in PROGRAM.rglob("*") if file.suffix in (".py", ".so")]
    return any(file.stat().st_ctime > began_s for file in [*settings, *program])  # an archive may bring old mtimes


def _wait_until_up(folder: Path, path: Path) -> Any:
    """systemd calls a service started whose program has begun, whatever becomes of it."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        state = shown()
        with contextlib.suppress(CliError):
            if str((answer := ask(folder)).pid) == state.get("MainPID"):
                return answer
        has_ended = state.get("ActiveState") in ("failed", "inactive")
        if has_ended or time.monotonic() > deadline:
            break
        time.sleep(LOOK_S)
    what = "ended at once" if has_ended else f"does not answer after {PATIENCE_S:g} s"
    said = "".join(f"\n  {line}" for line in _last_lines(state.get("InvocationID", "")))
    step = f"the whole log: journalctl -u {UNIT}; then install it again, or: valve service remove"
    raise CliError(f"{path} is installed, and its valved {what}{':' * bool(said)}{said}", FAILED, step)


def _last_lines(start: str, most: int = 5) -> list[str]:
    """Of the log of this start."""
    argv = ["journalctl", "--no-pager", "--output=cat", f"--lines={most}", f"_SYSTEMD_INVOCATION_ID={start}"]
    with contextlib.suppress(OSError):
        return subprocess.run(argv, check=False, capture_output=True, text=True, errors="replace").stdout.splitlines()
    return []


def _write(path: Path, content: bytes) -> None:
    fresh = path.with_suffix(".service.new")
    fresh.write_bytes(content)
    fresh.replace(path)


def _refuse_another(folder: Path) -> None:
    """One that this unit did not start keeps the folder, whether it answers or hangs, and the unit's would end at once
    and be called installed.
    """
    try:
        pid = ask(folder).pid
        text, step = f"valved runs in {folder} already (pid {pid})", f"offline work stays as it is: kill {pid}"
    except CliError as error:
        if error.code == NOT_RUNNING:
            return
        text, step = str(error), error.next_step
    if asked_systemctl("is-active", "--quiet", UNIT).returncode:
        raise CliError(f"{text}, and not by this unit", REFUSED, f"end it first, {step}")


def _empty(folder: Path) -> None:
    """No valved follows this one: offline work ends first, stopped until then."""
    try:
        ask(folder)
    except CliError as error:
        if error.code != NOT_RUNNING:  # it hangs: what it left running nobody would end
            raise
        if left := left_behind(folder):
            text = f"valved has ended, and nobody would let go what it left stopped: processes {', '.join(left)}"
            raise CliError(text, FAILED, f"start it first: systemctl start {UNIT}") from None
        return
    os.environ[ENV_RUN_DIR] = str(folder)
    drain.drain(argparse.Namespace(stop=True, timeout=120.0))


def left_behind(folder: Path) -> list[str]:
    """Offline processes that are here yet, by the state file of a valved that ended."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, ValueError, RecursionError):  # none that can be read
        saved = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=SavedState)
        offline = {one.process for one in saved.clients if one.role == Role.OFFLINE and saved.boot_id == boot_id()}
        return [str(one.pid) for one in sorted(offline) if not LinuxProcesses().is_gone(one)]
    return []


def service(options: argparse.Namespace) -> int:
    path = options.folder / UNIT
    if options.action == "show":
        print(unit(options), end="")
        return OK
    is_used = not options.no_start and BOOTED.is_dir()
    if options.action == "install" and not options.no_start and not is_used:
        command = f"valve up{_options(options, '--mode')}"
        step = f"start valved without it: {command}; to write the unit all the same: --no-start"
        raise CliError("systemd does not run this machine", FAILED, step)
    if not os.access(options.folder, os.W_OK):
        raise CliError(f"cannot write in {options.folder}", FAILED, "run it as root, or name a --folder")
    if options.action == "install":
        _install(path, options)
        print(f"installed {path}" + ("" if options.no_start else "; valved answers"))
        return OK
    if path.exists():
        if not options.no_start:
            _empty(folder_of(path.read_text(errors="replace")))
        if is_used:
            systemctl("disable", "--now", UNIT)
        path.unlink()
        print(f"removed {path}")
    else:
        print(f"{path} is not there")
    return OK
