"""`valve tune`: finetuning lives in a wheel and an environment of its own, as torch is large; this finds it.

Where a valved has its socket, what may use a GPU is started as offline work by `valve run`, unless it is that already.
A valved that refuses or does not answer stops the start. Without any valved, or with --ungated, nothing stops the job.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from valved.cli import run
from valved.cli.exits import NOT_FOUND, OK, CliError
from valved.paths import API_SOCKET, ENV_ROLE, LINK_SOCKET, VIEW_SOCKET, run_dir

ENV_PYTHON = "VALVE_TUNE_PYTHON"
FOLDER = ".venv-tune"
NEEDED = ("torch", "valve_tune")
TRAINS = ("run", "resume", "serve", "fleet")
READS = "publish"  # it may read weights that are shared on a GPU
ROOM = "valve_tune.serve"
UNGATED = "--ungated"
HELP = {"-h", "--help"}
HELP_WITHOUT = """\
usage: valve tune COMMAND ...

Train an adapter as offline work, look after it, and hand it to a running service. The manual: docs/finetuning.md

commands: run, ls, watch, pause, resume, cancel, checkpoints, share, publish, serve, fleet, doctor

{error}. With them `valve tune COMMAND --help` has the options.
{step}"""


def interpreter() -> str:
    """The Python that can train: the one that the environment names, this one, or one beside us or in this folder."""
    named = os.environ.get(ENV_PYTHON)
    if named:
        return named
    if all(importlib.util.find_spec(name) for name in NEEDED):
        return sys.executable
    for place in (Path.cwd(), Path(sys.prefix).parent):
        python = place / FOLDER / "bin" / "python"
        if python.exists():
            return str(python)
    raise CliError(
        "valve tune needs torch and valve-tune, which this environment does not have",
        NOT_FOUND,
        f"set one up in a checkout of Valve: make {FOLDER}/.installed (or name one: {ENV_PYTHON}=/path/to/python)",
    )


def has_valved(folder: Path) -> bool:
    """Whether a valved lives here, well or not. A folder that may not be looked into counts as one."""
    for name in (API_SOCKET, VIEW_SOCKET, LINK_SOCKET):
        try:
            (folder / name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return True
        return True
    return False


def main(argv: list[str]) -> int:
    wants_help = bool(HELP & set(argv))
    try:
        python = interpreter()
    except CliError as error:
        if not wants_help:
            raise
        print(HELP_WITHOUT.format(error=error, step=error.next_step))
        return OK
    is_work = bool(argv) and argv[0] in (*TRAINS, READS) and not wants_help
    ungated = is_work and UNGATED in argv
    command = [python, "-m", ROOM, *(each for each in argv if not (ungated and each == UNGATED))]
    if is_work and ENV_ROLE not in os.environ:
        if has_valved(run_dir()):
            words = {"ungated": ungated, "slo": "", "grant": None, "share_weights": None}
            return run.run(argparse.Namespace(argv=command, online=False, name="valve-tune", **words))
        if argv[0] in TRAINS:
            print(
                "valve tune: no valved runs here, so this job is not stopped when a service needs the GPU",
                file=sys.stderr,
            )
    return run.become(command, dict(os.environ))
