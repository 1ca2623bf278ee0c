"""`valve doctor`: look at everything Valve rests on, say what is wrong and how to mend it. Changes nothing.

Each check is a function of no arguments that returns one Finding; a check that cannot look says so (unknown) and is
never counted as fine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.text import Text
from valve.v1 import node_pb2

from valved.cli import remap, systemd, words
from valved.cli.client import ask
from valved.cli.exits import FINDINGS, NOT_RUNNING, OK, CliError
from valved.cli.findings import Finding, Grade, broken, fine, note, unknown
from valved.cli.tables import Paper
from valved.errors import told
from valved.fds import is_absent
from valved.machine.priority import GateThreads, ThreadPriority, gate_threads, is_real_time
from valved.paths import API_SOCKET, preload_library, run_dir

FIRST_BRANCH, LAST_BRANCH = 535, 595  # proto/abi/nvrm.h NV_BRANCH_FIRST, NV_BRANCH_LAST (a test compares them)
VERSION_FILE = Path("/proc/driver/nvidia/version")
ONLINE = node_pb2.ROLE_ONLINE
PATCH_PAYS = 3  # GPUs of one service: the second one waits for one call, and a stop stays below 1 ms
LOCK, MEMORY = "driver lock", "KV memory"  # checks that ask valved
WRITABLE = "see that it can be written (df, df -i, the kernel log); valved tries again by itself"
SERVABLE = "set another port or host (metrics_port, metrics_host), or raise the limit it names, then start valved anew"
LIMITS = "raise its limits (LimitNOFILE, MemoryMax; in Kubernetes the daemon's memory), or find what uses them up"
CORES, LONG_WAIT_NS = "cores", 50_000  # of the gate's threads: what Valve's own share of a stop may take (P1)
ENOUGH_RUNS = 100  # those of the start are not like those of stops
REAL_TIME = "set fifo_priority = 5 (Kubernetes: in the chart's daemon.config), or run less beside it"
CARDS_S = 10.0  # NVML answers within a second
MARGIN = 10  # cells before a sentence
DCGM = ("nv-hostengine", "dcgm-exporter")
RANKS = {
    ThreadPriority.REAL_TIME: fine("gate", "the gate's threads run in real time (fifo_priority)"),
    ThreadPriority.NICE: fine(
        "gate", "the gate's threads have niceness -20: it counts inside valved's control group or session"
    ),
    ThreadPriority.NORMAL: note(
        "gate", "the gate's threads wait for a core like any other", "run valved as root, or with CAP_SYS_NICE"
    ),
}


def driver_version(text: str) -> tuple[str, bool] | None:
    """(version, open kernel modules) from /proc/driver/nvidia/version."""
    match = re.search(r"(Open Kernel Module)?[^\n]*?\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return (match[2], "Open Kernel Module" in text) if match else None


def check_driver() -> Finding:
    try:
        found = driver_version(_read(VERSION_FILE))
    except OSError as error:
        if not is_absent(error):
            return unknown("driver", f"cannot read {VERSION_FILE}: {error.strerror}")
        return broken("driver", "no NVIDIA driver is loaded", "install it, or try Valve without a GPU: valve demo")
    if not found:
        return unknown("driver", f"cannot read a version in {VERSION_FILE}")
    version, is_open = found
    branch = int(version.split(".")[0])
    flavour = "open kernel modules" if is_open else "proprietary modules"
    if not FIRST_BRANCH <= branch <= LAST_BRANCH:
        return note(
            "driver",
            f"{version} ({flavour}): layouts of branch {branch} are not known, valved only observes",
            f"use a driver of branch {FIRST_BRANCH} to {LAST_BRANCH}, or a newer Valve",
        )
    return fine("driver", f"{version} ({flavour})")


def _read(path: Path) -> str:
    """Through open(2), so that a preloaded emulator answers as a driver would."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def check_nodes() -> Finding:
    needed = [Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm")]
    missing = [str(path) for path in needed if not _can_open(path)]
    if missing:
        return broken(
            "device nodes",
            f"cannot open {', '.join(missing)}",
            "as root: nvidia-modprobe -u -c 0; in a container: pass every GPU node to it",
        )
    return fine("device nodes", "nvidiactl and nvidia-uvm open")


def _can_open(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def check_cards() -> list[Finding]:
    """In a thread: beside a card in trouble NVML may never answer."""
    found: list[Finding] = []
    look = threading.Thread(target=lambda: found.extend(attempt(look_at_cards)), daemon=True)
    look.start()
    look.join(CARDS_S)
    if look.is_alive():
        return [unknown("cards", f"NVML has not answered for {CARDS_S:g} s: the kernel log may name a card in trouble")]
    return found


def look_at_cards() -> Iterator[Finding]:
    """What NVML says of each card: compute mode, MIG, GSP firmware."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # the library's own errors differ by version; any of them means "cannot look"
        yield unknown("cards", f"NVML does not answer: {error}")
        return
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            yield from _check_card(pynvml, index)
    finally:
        pynvml.nvmlShutdown()


def _check_card(nvml: object, index: int) -> Iterator[Finding]:
    card = f"gpu {index}"
    handle = _ask(nvml, "nvmlDeviceGetHandleByIndex", index)
    name = _ask(nvml, "nvmlDeviceGetName", handle)
    yield fine(card, name.decode() if isinstance(name, bytes) else str(name))
    compute = _ask(nvml, "nvmlDeviceGetComputeMode", handle)
    if compute not in (0, None):
        yield broken(
            card,
            "compute mode is not Default: a second process cannot open the card",
            f"nvidia-smi -i {index} -c DEFAULT",
        )
    mig = _ask(nvml, "nvmlDeviceGetMigMode", handle)
    if isinstance(mig, list | tuple) and mig[0]:
        yield broken(card, "MIG is on: not supported", f"nvidia-smi -i {index} -mig 0")
    gsp = _ask(nvml, "nvmlDeviceGetGspFirmwareMode", handle)
    if isinstance(gsp, list | tuple) and not gsp[0]:
        yield note(
            card,
            "GSP firmware is off: channel control answers 'not supported' there",
            "load the open kernel modules, or set NVreg_EnableGpuFirmware=1",
        )


def _ask(nvml: object, name: str, *arguments: object) -> object:
    """One NVML call; None where this card or library does not know it."""
    try:
        return getattr(nvml, name)(*arguments)
    except Exception:  # NVMLError subclasses are made at run time
        return None


def check_mps() -> Finding:
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    if Path(pipe, "control").exists():
        return broken(
            "MPS",
            f"an MPS control daemon runs ({pipe}): a stop of its clients would hit online work, too",
            "echo quit | nvidia-cuda-mps-control",
        )
    return fine("MPS", "no control daemon")


def check_dcgm(folder: Path = Path("/proc")) -> Finding:
    seen = {comm for comm in map(_comm, folder.glob("[0-9]*/comm")) if comm in DCGM}
    if not seen and not _comm(folder / "1/comm"):  # hidepid
        return unknown("DCGM", "this user does not see the processes of others")
    if not seen:
        return fine("DCGM", "no exporter that measures whole cards runs")
    return note(
        "DCGM",
        f"{', '.join(sorted(seen))} counts offline work as work of the online service",
        "scale and alert on the service's own metrics, or on those of valved (docs/cluster.md)",
    )


def _comm(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # it has just ended
        return ""


def check_preload() -> Finding:
    library = preload_library()
    if not library.is_file():
        return broken("preload", f"{library} is missing", "install Valve again")
    done = subprocess.run(
        [sys.executable, "-c", "pass"],
        env={**os.environ, "LD_PRELOAD": str(library)},
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode or "libvalve" in done.stderr:
        return broken("preload", done.stderr.strip() or "a process died with it", "")
    return fine("preload", "libvalve.so loads, also where no CUDA is used")


def check_glibc() -> Finding:
    name, version = platform.libc_ver()
    if name != "glibc":
        return note("glibc", "this is no glibc system: CUDA processes cannot run here, others are left alone")
    return fine("glibc", version)


def check_privileges() -> Finding:
    """Of the valved that is here, else of one that this user would start."""
    socket = run_dir() / API_SOCKET
    if (socket.stat().st_uid if socket.exists() else os.geteuid()) == 0:
        return fine("privileges", "root: valved may raise the gate's threads, and serves processes of every user")
    return note(
        "privileges",
        "valved is not root's: the gate's threads wait like any other, only that user's processes",
        "for a serving machine: sudo valve service install",
    )


def check_seccomp() -> Finding:
    """Can this process make memfds with the seal that keeps clients from writing the control page?"""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.memfd_create("valve-doctor", os.MFD_ALLOW_SEALING) if hasattr(os, "memfd_create") else -1
    try:
        if fd < 0 or libc.fcntl(fd, 1033, 0x0010) != 0:  # F_ADD_SEALS, F_SEAL_FUTURE_WRITE (Linux 5.1)
            return broken("kernel", f"Linux {platform.release()} has no F_SEAL_FUTURE_WRITE", "use Linux 5.1 or newer")
    finally:
        if fd >= 0:
            os.close(fd)
    return fine("kernel", f"Linux {platform.release()}")


def check_valved() -> list[Finding]:
    """What valved says of itself, and what only valved knows. It is asked once: one that hangs takes seconds."""
    try:
        answer = ask(run_dir())
    except CliError as error:
        is_absent_here = error.code == NOT_RUNNING
        told = (
            note("valved", str(error), "valve up") if is_absent_here else broken("valved", str(error), error.next_step)
        )
        return [told, *(unknown(what, "only valved knows, and it does not answer here") for what in (LOCK, MEMORY))]
    widths = [len(service.gpus) for service in answer.services if service.role == ONLINE]
    return [
        judge_valved(answer),
        *(broken("files", f"{one.path}: {one.error}: {one.loss}", WRITABLE) for one in answer.unwritten),
        *(broken("valved", text, SERVABLE) for text in answer.troubles),
        *([broken("valved", answer.lack, LIMITS)] if answer.lack else []),
        *judge_gate(answer.pid),
        judge_loop(answer.pid),
        judge_lock(answer.driver, widths),
        judge_remap(answer.memory),
    ]


def judge_gate(pid: int) -> list[Finding]:
    """What the gate's threads have, which may be less than the configuration asks for, and whether it is enough."""
    try:
        threads = gate_threads(pid)
    except OSError:
        return [unknown("gate", "valved's threads are not to be seen from here")]
    return [RANKS[threads.rank], judge_wait(threads)]


def judge_wait(threads: GateThreads) -> Finding:
    """A stop cannot begin before one of them has a core."""
    if not threads.runs:
        return unknown(CORES, "the kernel does not say how long the gate's threads wait for a core")
    if threads.runs < ENOUGH_RUNS:
        return unknown(CORES, "the gate has worked too little so far to say how long its threads wait for a core")
    mean_ns = threads.waited_ns / threads.runs
    text = f"since valved began the gate's threads have waited {words.duration(mean_ns)} for a core in the mean"
    return fine(CORES, text) if mean_ns <= LONG_WAIT_NS else note(CORES, f"{text}, and so have stops", REAL_TIME)


def judge_loop(pid: int) -> Finding:
    real = is_real_time(pid)
    return fine(
        "loop", f"valved's loop {'runs in real time (loop_priority)' if real else 'waits for a core like any other'}"
    )


def judge_valved(answer: Any) -> Finding:
    """Whether the one that runs is the one that is installed, and sees the driver that is loaded."""
    installed = version("valve")
    has_unit = (systemd.SYSTEM_FOLDER / systemd.UNIT).exists()
    step = "sudo systemctl restart valved" if has_unit else f"valved --run-dir {run_dir()} --replace"
    if not answer.driver.version and check_driver().verdict is not Grade.BROKEN:
        return broken("valved", "it began before the driver was loaded: it sees no card and refuses offline work", step)
    if answer.version != installed:
        return note("valved", f"{answer.version} runs in {run_dir()}, {installed} is installed", step)
    return fine("valved", f"answers in {run_dir()}")


def judge_lock(driver: Any, widths: list[int]) -> Finding:
    """Would the driver patch pay? Where a service of several GPUs is stopped one GPU after another. `widths`: GPUs of
    each online service."""
    widest = max(widths, default=0)
    if widest < 2:
        return fine(LOCK, "no online service uses several GPUs, so the lock does not matter")
    if not driver.HasField("device_only_lock"):
        return unknown(LOCK, words.lock(driver))
    if driver.device_only_lock or widest < PATCH_PAYS:
        return fine(LOCK, words.lock(driver))
    return note(
        LOCK,
        f"stock: the {widest} GPUs of a service are stopped one after another",
        "with the one-word driver patch they stop at the same time (patches/driver)",
    )


def judge_remap(memory: Any) -> Finding:
    """Can memory be taken from the offline processes here while online work waits for it?"""
    failed = remap.failed(memory)
    if not failed:
        return fine(MEMORY, remap.passed(memory))
    return note(
        MEMORY,
        f"memory is taken between two steps of the engine, so a request may wait for a step: {'; '.join(failed)}",
        "a larger reserve (memory.headroom_min_mib) makes that rare; docs/memory.md has the prices",
    )


def sentence(console: Paper, text: str) -> Text:
    """In a terminal in lines that end between words. A program that reads has one line."""
    lines = Text(text).wrap(console, max(MARGIN, console.width - MARGIN)) if console.is_terminal else [Text(text)]
    return Text(f"\n{' ' * MARGIN}").join(lines)


Check = Callable[[], "Finding | Iterable[Finding]"]
CHECKS: tuple[Check, ...] = (
    check_driver,
    check_nodes,
    check_mps,
    check_dcgm,
    check_preload,
    check_glibc,
    check_seccomp,
    check_privileges,
)
MARKS = {Grade.FINE: "green", Grade.NOTE: "yellow", Grade.BROKEN: "red", Grade.UNKNOWN: "magenta"}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor", help="Check driver, cards, preload and privileges. Each finding names its fix."
    )
    parser.add_argument("--json", action="store_true", help="Print the findings as JSON.")
    parser.set_defaults(run=doctor)


def attempt(check: Check) -> Iterator[Finding]:
    """What it finds. One that cannot look costs no other."""
    try:
        found = check()
        yield from [found] if isinstance(found, Finding) else found
    except Exception as error:
        yield unknown(check.__name__.removeprefix("check_"), f"cannot look: {told(error)}")


def doctor(options: argparse.Namespace) -> int:
    checks: list[Check] = [*CHECKS, check_valved, check_cards]
    findings = [found for check in checks for found in attempt(check)]
    if options.json:
        print(json.dumps([{**asdict(item), "verdict": item.verdict.value} for item in findings], indent=2))
    else:
        console = Paper(soft_wrap=True)  # a fix is copied from here: no line of ours breaks it
        for item in findings:
            mark, said = f"{item.verdict.value:>8}  ", sentence(console, f"{item.check}: {item.what}")
            console.print(Text.assemble((mark, MARKS[item.verdict]), said))
            if item.fix:
                console.print(Text(f"{' ' * MARGIN}fix: {item.fix}"))
    return FINDINGS if any(item.verdict is Grade.BROKEN for item in findings) else OK
