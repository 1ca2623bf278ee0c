"""An offline job never takes memory that an online service will need: real shims and valved, emulated cards of 80 GiB.

What is no KV memory stays with its process. So an offline job that may fill the card would make a service that comes
later, or grows, fail with out of memory.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import rooms
from kv_world import PROGRAM, Engine
from valve_tools.demo.node import EmulatedNode

GIB = 1 << 30
FULL = 2  # CUDA_ERROR_OUT_OF_MEMORY
STATED = "[memory]\nonline_mib = 30720\nremember_s = 0\n"
KINDS = ("plain", "pitched", "managed", "async", "mapped")


def program(node: EmulatedNode, role: str, name: str, device: int = 0, *, starts: bool = True) -> Engine:
    """A process that allocates on command."""
    errors = node.folder / f"{name}.log"
    with errors.open("a") as sink:
        made = Engine(
            subprocess.Popen(
                node.valve_command("run", f"--{role}", "--name", name, "--", sys.executable, str(PROGRAM)),
                env=node.environment({"PYTHONPATH": rooms.PYTHONPATH}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
            ),
            errors,
        )
    node.adopt(made.process)
    if starts:
        made.start(device)
    return made


def wait_kept(node: EmulatedNode, gib: float, gpu: int = 0) -> None:
    """By valved's books; what a process is told is written in the same turn of its loop. Contexts and pages of libcuda
    count as well, so it is about so much."""
    wanted = int(gib * GIB)
    node.wait_for(lambda: abs(node.status().gpus[gpu].kept_bytes - wanted) < GIB / 4, f"about {gib} GiB are kept")


def job_beside_a_dead_service(node: EmulatedNode) -> Engine:
    """The service had 60 GiB, and valved keeps them."""
    job = program(node, "offline", "batch")
    service = program(node, "online", "chat")
    assert service.take("plain", 60 * GIB) == 0
    node.wait_for(lambda: node.status().gpus[0].used_bytes >= 60 * GIB, "valved has seen it")
    service.kill()
    wait_kept(node, 60)
    return job


def test_a_service_that_comes_later_never_fails_for_memory_that_a_job_has_taken(
    make_node: Callable[..., EmulatedNode],
) -> None:
    node = make_node(config=STATED)
    job = program(node, "offline", "batch")

    assert job.take("plain", 60 * GIB) == FULL
    assert job.take("plain", 48 * GIB) == 0
    assert job.take("plain", 4 * GIB) == FULL

    service = program(node, "online", "chat")
    assert service.take("plain", 29 * GIB) == 0
    assert job.synchronize() == 0, "the job lives on"
    assert "kept for online services" in (node.folder / "batch.log").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_allocation_ever_takes_what_is_kept(make_node: Callable[..., EmulatedNode], kind: str) -> None:
    node = make_node(config=STATED)
    job = program(node, "offline", "batch")

    assert job.take(kind, 51 * GIB) == FULL
    assert job.take(kind, 40 * GIB) == 0
    assert job.take(kind, 11 * GIB) == FULL
    assert job.take("plain", 2 * GIB) == 0


def test_a_job_never_sizes_itself_by_memory_that_is_kept(make_node: Callable[..., EmulatedNode]) -> None:
    """Frameworks take a share of what cuMemGetInfo says. A service is told the truth."""
    node = make_node(config=STATED)
    job, service = program(node, "offline", "batch"), program(node, "online", "chat")

    free, total = job.mem_info()
    theirs, whole = service.mem_info()

    assert total == 50 * GIB
    assert free == theirs - 30 * GIB
    assert whole == 80 * GIB


def test_what_a_service_has_is_never_kept_for_it_twice(make_node: Callable[..., EmulatedNode]) -> None:
    node = make_node(config=STATED)
    service = program(node, "online", "chat")
    assert service.take("plain", 30 * GIB) == 0
    job = program(node, "offline", "batch")
    wait_kept(node, 0)

    assert job.take("plain", 49 * GIB) == 0
    assert job.mem_info()[1] == 80 * GIB


def test_a_service_that_ends_and_comes_back_never_finds_its_memory_taken(node: EmulatedNode) -> None:
    """Without any setting: what it had is kept, from the moment that it ends."""
    job = job_beside_a_dead_service(node)

    assert job.take("plain", 21 * GIB) == FULL
    node.wait_for(lambda: job.take("plain", 15 * GIB) == 0, "the card is read without the dead service")
    again = program(node, "online", "chat")
    assert again.take("plain", 60 * GIB) == 0


def test_a_service_that_grows_again_never_finds_its_memory_taken(node: EmulatedNode) -> None:
    job = program(node, "offline", "batch")
    service = program(node, "online", "chat")
    held = service.alloc(50 * GIB)
    node.wait_for(lambda: node.status().gpus[0].used_bytes >= 50 * GIB, "valved has seen it")

    assert service.free(held) == 0
    wait_kept(node, 50)

    assert job.take("plain", 31 * GIB) == FULL
    assert service.take("plain", 50 * GIB) == 0


def test_a_crash_of_valved_never_gives_a_job_what_is_kept(node: EmulatedNode) -> None:
    job = job_beside_a_dead_service(node)
    node.wait_for(
        lambda: f'"chat",[{60 * GIB},' in (node.run_dir / "state.json").read_text(), "the next valved can know"
    )

    node.stop_valved(signal.SIGKILL)
    assert job.take("plain", 30 * GIB) == FULL, "without valved, as it was told last"
    node.start_valved()
    node.wait_for(lambda: len(node.status().clients) == 1, "the job is back")

    assert job.take("plain", 30 * GIB) == FULL
    assert job.take("plain", 15 * GIB) == 0


def test_a_restart_of_valved_never_keeps_for_a_service_what_it_has(node: EmulatedNode) -> None:
    service = program(node, "online", "chat")
    assert service.take("plain", 60 * GIB) == 0
    job = program(node, "offline", "batch")
    node.wait_for(lambda: node.status().gpus[0].used_bytes >= 60 * GIB, "valved has seen it")

    node.stop_valved(signal.SIGKILL)
    node.start_valved()
    node.wait_for(lambda: len(node.status().clients) == 2, "both are back")
    wait_kept(node, 0)

    assert job.take("plain", 15 * GIB) == 0


def test_what_is_kept_on_one_card_is_never_missing_on_another(make_node: Callable[..., EmulatedNode]) -> None:
    node = make_node(gpus=2)
    job = program(node, "offline", "batch", device=1)
    service = program(node, "online", "chat")
    assert service.take("plain", 60 * GIB) == 0
    node.wait_for(lambda: node.status().gpus[0].used_bytes >= 60 * GIB, "valved has seen it")
    service.kill()
    wait_kept(node, 60)

    assert job.mem_info()[1] == 80 * GIB
    assert job.take("plain", 70 * GIB) == 0
    job.start(0)
    assert job.take("plain", 30 * GIB) == FULL
    assert job.mem_info()[1] < 21 * GIB


def test_a_forked_child_of_a_job_never_takes_what_is_kept(make_node: Callable[..., EmulatedNode]) -> None:
    node = make_node(config=STATED)
    job = program(node, "offline", "batch", starts=False)

    assert job.child_takes(60 * GIB) == FULL
    assert job.child_takes(40 * GIB) == 0
    job.start()
    assert job.take("plain", 60 * GIB) == FULL
    assert job.take("plain", 40 * GIB) == 0


def test_two_jobs_that_allocate_at_once_never_take_what_is_kept(make_node: Callable[..., EmulatedNode]) -> None:
    """Both find the memory free; the driver's call of the first one stands while the second one gets its memory."""
    node = make_node(config=STATED)
    first, second = (program(node, "offline", name) for name in ("batch", "other"))
    node.emulator.fault("on alloc 1: hold")
    first.begin("take", "plain", 30 * GIB)
    node.emulator.wait_held()
    assert second.take("plain", 30 * GIB) == 0

    node.emulator.release()

    assert first.end("take") == FULL
    assert first.take("plain", 19 * GIB) == 0
    assert program(node, "online", "chat").take("plain", 29 * GIB) == 0
