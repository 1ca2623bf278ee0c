"""Programs that compute on the CPU run as kernels: a gate stops all their threads where they stand, unnoticed."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import valve_tools.emulator
from cuda_driver import Cuda
from emulated import child_env, on_gpu
from gate_process import gate_of
from rm_process import OK, RmProcess, Tree, grow_tree
from valve_tools.emulator.client import Emulator, NodeMoment, RunlistChannel
from valve_tools.emulator.node import NO_LATENCY, Options, node

LIBCUDA = Path(valve_tools.emulator.__file__).parent / "lib" / "libcuda.so.1"
DEADLINE_S = 200  # only ends a hung test
UNITS, ROUNDS = 40, 100
TABLE_AT = 64 + 16 * (320 + 4096) + 32768 * 128  # emu.h: the board up to its park table


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with node(Options(knobs=NO_LATENCY)) as running:
        yield running


class Starter:
    """Starts programs on the node; none outlives its test."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, *command: str | Path, **env: str) -> subprocess.Popen[str]:
        env = child_env(self.emulator.directory, env={"OMP_WAIT_POLICY": "passive", **env})
        cwd = self.emulator.directory  # the installed packages, not the sources of the checkout
        pipe = subprocess.PIPE
        program = subprocess.Popen(command, env=env, cwd=cwd, stdin=pipe, stdout=pipe, text=True)
        self.started.append(program)
        return program


@pytest.fixture
def start(emulator: Emulator) -> Iterator[Starter]:
    starter = Starter(emulator)
    yield starter
    for program in starter.started:
        program.kill()
        program.communicate()


def build(folder: Path, name: str, *first: str | Path) -> Path:
    """One of the C programs beside this file, linked to the emulated driver."""
    program = folder / name
    flags = ["-std=gnu11", "-O2", "-fopenmp", "-D_GNU_SOURCE"]
    source = Path(__file__).with_name(f"{name}.c")
    command = ["cc", *flags, source, *first, LIBCUDA, "-o", program]
    built = subprocess.run(command, check=False, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"no OpenMP here (apt install gcc): {built.stderr.splitlines()[:1]}")
    return program


@pytest.fixture(scope="module")
def native_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("native"), "native_step")


def shared(page: Path) -> mmap.mmap:
    page.write_bytes(bytes(4096))
    with page.open("r+b") as file:
        return mmap.mmap(file.fileno(), 4096)


class Job:
    """A running native_step with its progress counter."""

    def __init__(self, start: Starter, program: Path, page: Path, units: int = UNITS, rounds: int = ROUNDS) -> None:
        self._page = shared(page)
        self.process = start(program, str(units), str(rounds), page)

    @property
    def progress(self) -> int:
        return int(struct.unpack_from("<Q", self._page)[0])

    def channels(self, state: NodeMoment) -> list[RunlistChannel]:
        return [channel for channel in state.of(self.process.pid) if channel.is_compute]

    def checksum(self) -> str:
        out, _ = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0
        return out


def gate(tree: Tree, channels: list[RunlistChannel], *, on: bool) -> int:
    """The status; OK while the program lives."""
    return tree.gate([(channel.h_client, channel.h_channel) for channel in channels], on=on)


def stopped_at_random(emulator: Emulator, tree: Tree, job: Job, chance: random.Random) -> int:
    """How often it was stopped in the middle, up to 150 times; nothing moved meanwhile."""
    channels = job.channels(emulator.wait(lambda state: job.progress > 0, "the step computes"))
    stopped = 0
    while channels and job.process.poll() is None and stopped < 150:
        aim = job.progress + chance.randrange(200)
        emulator.wait(lambda _, aim=aim: job.progress >= aim or job.process.poll() is not None, "it goes on")
        if gate(tree, channels, on=False) != OK:
            break  # it has ended
        seen = job.progress
        # A step that began just now counts itself before it looks at the grant, and computes nothing.
        emulator.wait(lambda state: not any(c.active for c in state.of(job.process.pid)), "all have parked")
        moved = job.progress - seen
        gate(tree, channels, on=True)
        assert moved == 0
        stopped += 1
    return stopped


def test_gates_at_random_moments_do_not_change_what_is_computed(
    emulator: Emulator, start: Starter, native_step: Path, tmp_path: Path
) -> None:
    """Given a step on three threads, when it is gated up to 150 times in the middle, then nothing moves while it is
    gated and the result is that of an undisturbed run."""
    chance = random.Random(5)
    undisturbed = Job(start, native_step, tmp_path / "alone").checksum()
    with RmProcess(emulator.directory) as process:
        tree = grow_tree(process, channels=0, scheduled=False)
        stopped = 0
        while stopped <= 5:  # a test that has no core meanwhile finds a step at its end, and begins another
            job = Job(start, native_step, tmp_path / "gated")
            stopped = stopped_at_random(emulator, tree, job, chance)
            assert job.checksum() == undisturbed


def test_steps_shorter_than_a_gate_stop_every_time(
    emulator: Emulator, start: Starter, native_step: Path, tmp_path: Path
) -> None:
    """Given steps that end while their threads are being stopped and woken, then no gate waits for a count that nobody
    lowers."""
    with RmProcess(emulator.directory) as process:
        tree = grow_tree(process, channels=0, scheduled=False)
        job = Job(start, native_step, tmp_path / "short", units=10_000_000, rounds=1)
        channels = job.channels(emulator.wait(lambda state: job.progress > 0, "the steps run"))
        statuses = [gate(tree, channels, on=on) for _ in range(400) for on in (False, True)]

    assert set(statuses) == {OK}


def test_two_programs_share_the_card_by_slices(start: Starter, native_step: Path, tmp_path: Path) -> None:
    """Each is stopped and woken every millisecond; both compute what they compute alone."""
    alone = Job(start, native_step, tmp_path / "alone").checksum()
    both = [Job(start, native_step, tmp_path / name) for name in ("one", "two")]

    assert [job.checksum() for job in both] == [alone, alone]


def test_a_step_that_ends_while_the_gate_closes_leaves_the_books_in_order(
    emulator: Emulator, start: Starter, native_step: Path, tmp_path: Path
) -> None:
    """Given the program is killed while gated, then no count is left: another one runs and is gated like the first."""
    with RmProcess(emulator.directory) as process:
        tree = grow_tree(process, channels=0, scheduled=False)
        first = Job(start, native_step, tmp_path / "first", units=100_000)
        channels = first.channels(emulator.wait(lambda state: first.progress > 0, "the first computes"))
        assert gate(tree, channels, on=False) == OK
        gate(tree, channels, on=True)
        first.process.kill()
        emulator.wait(lambda state: not state.of(first.process.pid), "the first is gone")
        second = Job(start, native_step, tmp_path / "second", units=100_000)
        channels = second.channels(emulator.wait(lambda state: second.progress > 0, "the second computes"))
        status = gate(tree, channels, on=False)
        active = [channel.active for channel in emulator.state().of(second.process.pid)]
        gate(tree, channels, on=True)

    assert (status, set(active)) == (OK, {0})


def test_memory_moves_while_a_step_is_parked_with_any_lock_in_its_hands(
    emulator: Emulator, start: Starter, tmp_path: Path
) -> None:
    """Given a step whose threads allocate all the time from one arena, when they are parked, then another thread of the
    process unmaps, creates, releases and maps device memory: nothing of that waits for them."""
    program, page = build(tmp_path, "native_remap"), shared(tmp_path / "page")

    def read(word: int) -> int:
        return int(struct.unpack_from("<Q", page, 8 * word)[0])

    one_arena = {"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    job = start(program, tmp_path / "page", **one_arena)
    with RmProcess(emulator.directory) as process:
        tree = grow_tree(process, channels=0, scheduled=False)
        state = emulator.wait(lambda _: read(0) > 0, "the steps run")
        channels = [channel for channel in state.of(job.pid) if channel.is_compute]
        for round_ in range(1, 101):
            assert gate(tree, channels, on=False) == OK
            page[8:16] = struct.pack("<Q", round_)
            emulator.wait(lambda _, round_=round_: read(2) == round_, f"round {round_} of moving while gated")
            assert gate(tree, channels, on=True) == OK
        page[24:32] = struct.pack("<Q", 1)
        out, _ = job.communicate(timeout=DEADLINE_S)

    assert (job.returncode, out) == (0, "0\n")  # every round found what the one before had written


def test_a_thread_that_was_made_before_a_step_is_never_parked_with_it(
    emulator: Emulator, start: Starter, tmp_path: Path
) -> None:
    """Given it gets a core only when the step runs already, as on a busy machine, then it is no thread of the step."""
    held = tmp_path / "libheld.so"
    flags = ["-shared", "-fPIC", "-D_GNU_SOURCE", "-DHELD"]
    subprocess.run(["cc", *flags, Path(__file__).with_name("held_start.c"), "-o", held], check=True)
    job = start(build(tmp_path, "held_start", held, f"-Wl,-rpath,{tmp_path}"))
    assert job.stdout is not None

    said = job.stdout.readline()

    assert said == "both run\n"
    assert sum(channel.active for channel in emulator.state().of(job.pid)) == 1


KILLED_JOB = """
import os, signal
from valve_tools.emulator.device import Device
device = Device()
with device.step():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_step_that_dies_gives_its_place_in_the_park_table_back(emulator: Emulator, start: Starter) -> None:
    """Given every place is taken, then a step is refused rather than run where nobody can stop it."""
    start(sys.executable, "-c", KILLED_JOB).wait(timeout=DEADLINE_S)
    emulator.wait(lambda state: not state.channels, "the server has noticed")

    def parked(fill: str) -> str:
        code = f"""
import mmap, os, struct
from valve_tools.emulator.device import Device, DeviceError
fd = os.open("/dev/nvidia-emu-board", os.O_RDWR)
board = mmap.mmap(fd, os.fstat(fd).st_size)
table = {TABLE_AT}
entries = [struct.unpack_from("<I", board, table + 16 * i)[0] for i in range(1024)]
print(sum(entry != 0 for entry in entries))
{fill}
device = Device()
try:
    with device.step():
        print("ran")
except DeviceError as error:
    print(error)
"""
        out, _ = start(sys.executable, "-c", code).communicate(timeout=DEADLINE_S)
        return out

    taken = "for i in range(1024): board[table + 16 * i : table + 16 * i + 4] = struct.pack('<I', 1 << 31)"

    assert parked("").split() == ["0", "ran"]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in parked(taken)


PYTHON_JOB = """
import hashlib, sys, threading
from valve_tools.emulator.device import Device
device = Device()
memory = device.array(1 << 20)
def churn(part):
    for _ in range(60):
        memory[part:part + 32] = hashlib.sha256(memory[:4096]).digest() if part == 0 else bytes(32)
for unit in range(12):
    with device.step(), device.step():
        threads = [threading.Thread(target=churn, args=(part,)) for part in (0, 8192)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    print(unit, flush=True)
print(hashlib.sha256(memory).hexdigest())
"""


def test_a_python_program_with_threads_of_its_own_is_stopped_too(emulator: Emulator, start: Starter) -> None:
    alone, _ = start(sys.executable, "-c", PYTHON_JOB).communicate(timeout=DEADLINE_S)
    with RmProcess(emulator.directory) as process:
        tree = grow_tree(process, channels=0, scheduled=False)
        job = start(sys.executable, "-c", PYTHON_JOB)
        assert job.stdout is not None
        first = job.stdout.readline()
        channels = [channel for channel in emulator.state().of(job.pid) if channel.is_compute]
        while job.poll() is None and gate(tree, channels, on=False) == OK:
            gate(tree, channels, on=True)
        rest = job.stdout.read()  # not communicate(): the first read may have taken more than a line
        job.wait(timeout=DEADLINE_S)

    assert (alone.count("\n"), job.returncode) == (13, 0)
    assert first + rest == alone


@on_gpu()
def test_a_step_is_a_launch_and_its_end_is_seen_by_events(cuda: Cuda) -> None:
    from valve_tools.emulator.device import Device

    device = Device()
    cuda.start()
    event = cuda.event()
    before = sum(channel.launches for channel in cuda.channels())
    with device.step():
        cuda.cuEventRecord(event, 0)
        running = [cuda.call("cuEventQuery", event), sum(channel.pending for channel in cuda.channels()) > 0]
    device.synchronize()

    assert running == [600, True]
    assert cuda.call("cuEventQuery", event) == 0
    assert sum(channel.launches for channel in cuda.channels()) == before + 1


@on_gpu()
def test_a_step_waits_for_its_turn(cuda: Cuda) -> None:
    """Given the gate is closed, then begin does not return until it opens."""
    import threading

    from valve_tools.emulator.device import Device

    device = Device()
    cuda.start()
    entered = threading.Event()

    def run() -> None:
        with device.step():
            entered.set()

    with gate_of(cuda) as gate:
        gate.close()
        thread = threading.Thread(target=run)
        thread.start()
        cuda.emulator.wait(lambda state: any(c.pending for c in state.of(os.getpid())), "the step is queued")
        early = entered.wait(0.05)
        gate.open()
        thread.join()

    assert (early, entered.is_set()) == (False, True)


@on_gpu()
def test_a_step_without_a_context_or_a_beginning_is_refused(cuda: Cuda) -> None:
    cuda.cuInit(0)

    assert cuda.call("valve_emu_step_begin", 0) == 201
    assert cuda.call("valve_emu_step_end") == 1


HOLE_JOB = """
from valve_tools.emulator.device import Device
device = Device()
memory = device.array(4 << 20)
device.free(memory)
with device.step():
    memory[0] = 1
"""


def test_a_hole_under_a_step_ends_the_process_and_is_told(emulator: Emulator, start: Starter) -> None:
    job = start(sys.executable, "-c", HOLE_JOB)
    job.wait(timeout=DEADLINE_S)

    assert job.returncode == -signal.SIGSEGV
    assert emulator.state().raw["mmu_faults"] == 1
    assert "ACCESS_TYPE_VIRT_WRITE" in emulator.kernel_log()
