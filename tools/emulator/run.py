"""Run a program on the emulated GPU: `tools/emulator/run [--gpus N] [--dir D] [--set k=v] -- CMD`.

Starts the node's server when none runs in the directory; the last command that shares it stops it.
Without a command it keeps the node up until interrupted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from valve_kube.options import option, whole
from valve_tools.emulator.node import NoCard, Options, environment, is_running, shared_node

DEFAULTS: dict[str, Any] = {
    "gpus": 1,
    "bytes": 80 << 30,
    "name": "NVIDIA H100 80GB HBM3 (emulated)",
    "seed": 1,
    "set": [],
    "fault": [],
}
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the first also where a shell had it ignored in the background


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/emulator/run", description=__doc__.splitlines()[0] if __doc__ else "")
    option(parser, "--gpus", DEFAULTS["gpus"], "The number of cards.")
    option(parser, "--bytes", DEFAULTS["bytes"], "The memory of each card in bytes.", type=whole(1, 1 << 50))
    option(parser, "--name", DEFAULTS["name"], "The name of each card.")
    option(parser, "--seed", DEFAULTS["seed"], "The seed that decides the cards' UUIDs.")
    parser.add_argument(
        "--dir", type=Path, help="The folder of the node. Default: VALVE_EMU_DIR of the environment, else a new one."
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="K=V",
        help="Set one knob of README.md. Repeat the option for several knobs.",
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="RULE",
        help="Set one fault rule of README.md. Repeat the option for several rules.",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="The program to run and its arguments, after --.")
    options = parser.parse_args(arguments)
    if options.command[:1] == ["--"]:
        options.command = options.command[1:]
    for pair in options.set:
        if "=" not in pair:
            parser.error(f"--set {pair}: expected name=value, for example rpc_us=50")
    return options


def run_command(command: list[str], directory: Path, came: list[int]) -> int:
    """Run it to its end. Signals of the terminal reach it by itself; ours must survive to stop the server."""
    try:
        child = subprocess.Popen(command, env=environment(directory, os.environ))
    except OSError as error:  # as a shell says it
        print(f"tools/emulator/run: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    for number in ENDS:
        signal.signal(number, lambda got, _frame: child.send_signal(got))
    for earlier in came:
        child.send_signal(earlier)
    code = child.wait()
    return code if code >= 0 else 128 - code


def joined(options: argparse.Namespace, directory: Path) -> str:
    """What somebody should know whose card runs already: nothing where only a program is to run on it."""
    unused = ", ".join(f"--{name}" for name, value in DEFAULTS.items() if getattr(options, name) != value)
    if options.command and not unused:
        return ""
    return f"the emulated node in {directory} runs already and is joined" + (f": no use for {unused}" * bool(unused))


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    came: list[int] = []
    for number in ENDS:  # none may end this before it knows of the server that it starts
        signal.signal(number, lambda got, _frame: came.append(got))
    known = options.dir or os.environ.get("VALVE_EMU_DIR")
    directory = Path(known) if known else Path(tempfile.mkdtemp(prefix="valve-emu-"))
    try:
        return share(options, directory, came)
    except (OSError, NoCard) as error:  # a folder of another user, say: the card is for one
        step = "use a folder of your own: --dir, or VALVE_EMU_DIR" if isinstance(error, PermissionError) else ""
        print(f"tools/emulator/run: {error}", *filter(None, [step]), sep=": ", file=sys.stderr)
        return 1
    finally:
        if not known and not is_running(directory):  # else a program that it started uses it yet
            shutil.rmtree(directory, ignore_errors=True)


def share(options: argparse.Namespace, directory: Path, came: list[int]) -> int:
    made = Options(
        gpus=options.gpus,
        gpu_bytes=options.bytes,
        name=options.name,
        seed=options.seed,
        knobs=dict(pair.split("=", 1) for pair in options.set),
        faults=options.fault,
    )
    with shared_node(directory.resolve(), made) as is_ours:
        if is_ours:
            print((directory / "server.txt").read_text().strip(), file=sys.stderr)
        elif told := joined(options, directory):
            print(told, file=sys.stderr)
        if options.command:
            return run_command(options.command, directory.resolve(), came)
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        if not came:
            signal.sigwait(ENDS)
        return 0


if __name__ == "__main__":
    sys.exit(main())
