"""`valve run`: start a command as an online service or an offline job of this node.

The process claims itself at valved before it becomes the command, so valved knows it by pid and start time and never
by what its environment says. Online without a daemon runs all the same (promise P7); offline is refused, because
nothing would stop it when a request arrives.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from valve.v1 import node_pb2
from valve_hook import VERSION
from valve_hook.export import export

from valved.cli.client import DEADLINE_S, node
from valved.cli.exits import FAILED, NOT_FOUND, REFUSED, USAGE, CliError
from valved.cli.loadable import obstacle
from valved.errors import told
from valved.machine.processes import boot_shift
from valved.model.consent import EXAMPLE, NO, SILENT, YES, Said, check
from valved.model.plain import plain
from valved.paths import ENV_ROLE, ENV_RUN_DIR, make, preload_library, run_dir
from valved.state import pending

ONLINE_WAIT_S = 0.2  # promise P7: an online process is not slowed; what comes later finds the claim in its folder
# A program linked with the address sanitizer ends at once where any library is preloaded, unless told not to look.
ASAN_ORDER = "verify_asan_link_order"
SANITIZERS = ("libasan.", "liblsan.", "libtsan.", "libhwasan.", "libclang_rt.")

# A paused offline job looks hung to its own watchdogs; a pause may last as long as a busy period does. The chart's
# admission.offlineEnv is this table.
OFFLINE_TIMEOUTS = {
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "86400",
    "VLLM_ENGINE_READY_TIMEOUT_S": "86400",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "86400",
    # Of vLLM's releases of 2025; newer ones do not read them.
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": "86400",
    "VLLM_RPC_TIMEOUT": "86400000",
}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("run", help="Run a command as an online service or as an offline job.")
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--online", action="store_true", help="Run a service whose latency counts.")
    role.add_argument("--offline", action="store_true", help="Run work that fills the gaps.")
    parser.add_argument(
        "--name", default="", help="The name of the service in status and metrics. Default: the name of the command."
    )
    parser.add_argument(
        "--ungated", action="store_true", help="Run offline work even where no valved answers. Then nothing stops it."
    )
    parser.add_argument(
        "--slo", default="", metavar="TIMES", help=f"The target of an online service, {EXAMPLE}. Default: none."
    )
    parser.add_argument(
        "--grant",
        action=argparse.BooleanOptionalAction,
        help="Let offline work have pauses within the target of this online service (docs/granted.md).",
    )
    parser.add_argument(
        "--share-weights",
        action=argparse.BooleanOptionalAction,
        help="Let a trainer (valve tune) map the weights of this online service (docs/finetuning.md).",
    )
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- CMD", help="The command and its arguments.")
    parser.set_defaults(run=run)


def start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat, by the machine's clock. The command name (field 2) may hold blanks and brackets: read
    from its end."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[19]) - boot_shift()


def preload(present: str, ours: str) -> str:
    """Ours in front of all but a sanitizer's runtime, which ends a program that has anything before it."""
    others = [entry for entry in present.replace(" ", ":").split(":") if entry not in ("", ours)]
    front = [entry for entry in others if entry.rpartition("/")[2].startswith(SANITIZERS)]
    return ":".join([*front, ours, *(entry for entry in others if entry not in front)])


def environment(role: str, folder: Path) -> dict[str, str]:
    """What the command gets: our library in LD_PRELOAD, in front of all but a sanitizer's runtime."""
    env = {**os.environ, ENV_RUN_DIR: str(folder), ENV_ROLE: role}
    env["LD_PRELOAD"] = preload(os.environ.get("LD_PRELOAD", ""), str(preload_library()))
    if ASAN_ORDER not in env.get("ASAN_OPTIONS", ""):
        env["ASAN_OPTIONS"] = ":".join(filter(None, [env.get("ASAN_OPTIONS"), f"{ASAN_ORDER}=0"]))
    hook = engine_hook(folder)
    if hook is not None:
        paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
        env["PYTHONPATH"] = ":".join([str(hook), *(entry for entry in paths if entry != str(hook))])
    if role == "offline":
        for name, value in OFFLINE_TIMEOUTS.items():
            env.setdefault(name, value)
    return env


def engine_hook(folder: Path) -> Path | None:
    """The engines' plugin in a folder of its own, so that vLLM and SGLang find it whatever environment they live in."""
    places: list[Callable[[], Path]] = [lambda: folder, cache]
    for place in places:
        with contextlib.suppress(OSError, RuntimeError):  # a user who has no home
            make(place())
            return export(place() / f"hook-{VERSION}")
    return None


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "valve")


def words(options: argparse.Namespace) -> Said:
    """What the owner offers, or why that makes no sense."""
    said = Said(slo=options.slo, grant=answer(options.grant), share_weights=answer(options.share_weights))
    if said != SILENT and not options.online:
        raise CliError(
            "--slo, --grant and --share-weights are options of online work only",
            USAGE,
            "valve run --online --slo ... --grant --share-weights -- CMD",
        )
    try:
        check(said)
    except ValueError as error:
        raise CliError(f"--{error}", USAGE, "valve run --help has the forms") from None
    return said


def answer(word: bool | None) -> str:
    return "" if word is None else YES if word else NO


def claim(role: str, name: str, said: Said) -> None:
    """Register this process, which is about to become the command. An online one is not kept waiting."""
    pid = os.getpid()
    wanted = node_pb2.ROLE_ONLINE if role == "online" else node_pb2.ROLE_OFFLINE
    request = node_pb2.LaunchRequest(pid=pid, start_time=start_time(pid), role=wanted, name=name)
    request.slo, request.grant, request.share_weights = said.slo, said.grant, said.share_weights
    with node() as connection:
        connection.call(connection.stub.Launch, request, deadline_s=ONLINE_WAIT_S if role == "online" else DEADLINE_S)


def leave_claim(name: str, said: Said) -> bool:
    """For a valved that does not answer now: it finds the claim when our shim knocks."""
    pid = os.getpid()
    words = {"slo": said.slo, "grant": said.grant, "share_weights": said.share_weights}
    return pending.leave(run_dir(), pending.PendingClaim(pid=pid, start_time=start_time(pid), name=name, **words))


def run(options: argparse.Namespace) -> int:
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    if not argv:
        raise CliError("nothing to run", USAGE, "valve run --online -- COMMAND ARGUMENTS")
    name = plain(options.name or Path(argv[0]).name)  # as valved keeps it
    said = words(options)
    if options.online:
        return become(argv, online(name, said, argv[0]))
    return become(argv, offline(name, said, argv[0], ungated=options.ungated))


def offline(name: str, said: Said, command: str, *, ungated: bool) -> dict[str, str]:
    """What the job gets, or why it is refused."""
    if not ungated and (why := obstacle(command)):
        raise CliError(
            f"offline work is refused: {why}", REFUSED, "run it without protection for online work: --ungated"
        )
    try:
        claim("offline", name, said)
    except (CliError, OSError) as error:  # the folder in /tmp is a stranger's, say
        if not ungated:
            step = getattr(error, "next_step", "") or "or run it without protection for online work: --ungated"
            raise CliError(f"offline work is refused: {told(error)}", getattr(error, "code", FAILED), step) from None
        say(f"{told(error)}; {command} runs untouched")
        return dict(os.environ)
    return environment("offline", run_dir())


def online(name: str, said: Said, command: str) -> dict[str, str]:
    """What the service gets. Promise P7: whatever fails here, it starts."""
    try:
        try:
            claim("online", name, said)
        except CliError as error:
            if not (error.is_silence and leave_claim(name, said)):
                raise
            say(f"{error}; {command} runs unprotected until valved answers")
        return environment("online", run_dir())
    except Exception as error:
        say(f"{told(error)}; {command} runs untouched, and Valve does not protect it")
        if step := getattr(error, "next_step", ""):
            say(step)
        return dict(os.environ)


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # whoever read this has gone
        print(f"valve: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def signals_of_our_parent() -> Iterator[None]:
    """Python ignores two signals, and the command would go on to. What we were started with is what our parent has."""
    before = {}
    with contextlib.suppress(OSError, ValueError):
        status = Path(f"/proc/{os.getppid()}/status").read_text(errors="replace")
        ignored = int(status.partition("\nSigIgn:")[2].split("\n", 1)[0], 16)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            if not ignored >> (number - 1) & 1:
                before[number] = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:  # it did not become the command, and may still write to a reader that has gone
        for number, handler in before.items():
            signal.signal(number, handler)


def become(argv: list[str], env: dict[str, str]) -> int:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if not argv[0]:
        raise CliError("an empty name is no command", NOT_FOUND, "is a variable of your shell not set?")
    try:
        with signals_of_our_parent():
            os.execvpe(argv[0], argv, env)
    except FileNotFoundError:
        is_there = shutil.which(argv[0]) is not None
        text = f"{argv[0]}: the interpreter that it names is not there" if is_there else f"{argv[0]}: no such command"
        raise CliError(text, NOT_FOUND, "name a program that is in the PATH, or its whole path") from None
    except PermissionError:
        raise CliError(f"{argv[0]}: not executable", NOT_FOUND - 1, f"chmod +x {argv[0]}") from None
    except OSError as error:
        step = (
            "a script names its interpreter in its first line, as in #!/bin/sh" if error.errno == errno.ENOEXEC else ""
        )
        raise CliError(f"{argv[0]}: {error.strerror}", NOT_FOUND - 1, step) from None
