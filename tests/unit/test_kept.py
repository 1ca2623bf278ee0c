"""What valved is charged for and does not use: from a /proc and control groups of our own making, and from the real."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from valved.machine.kept import KERNEL_FILE, KERNEL_OWN, OLD_GROUP_OWN, kept_bytes

MIB = 1 << 20
OLD = "11:memory:/system.slice/valved.service\n1:cpu:/\n0::/\n"
NEW = "0::/system.slice/valved.service\n"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    for name in ("proc/self", "run", "v1/system.slice/valved.service", "v2/system.slice/valved.service"):
        (tmp_path / name).mkdir(parents=True)
    mounts = [
        f"31 23 0:28 / {tmp_path}/v1/cpu rw - cgroup cgroup rw,cpu",
        f"32 23 0:29 / {tmp_path}/v1 rw,relatime shared:9 - cgroup cgroup rw,memory",
        f"33 23 0:30 / {tmp_path}/v2 rw - cgroup2 cgroup2 rw,nsdelegate",
    ]
    (tmp_path / "proc/self/mountinfo").write_text("\n".join(mounts) + "\n")
    return tmp_path


def charge(machine: Path, group: str, stat: str, member_of: str, processes: tuple[int, ...] = ()) -> None:
    (machine / "proc/self/cgroup").write_text(member_of)
    folder = machine / group
    (folder / "memory.stat").write_text(stat)
    (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in (os.getpid(), *processes)))


def kept(machine: Path, own: int = 0, trace: str = "") -> int | None:
    return kept_bytes(machine / "run", trace, lambda: own, machine / "proc")


@pytest.mark.parametrize(
    ("group", "stat", "member_of"),
    [
        ("v1/system.slice/valved.service", f"shmem 1\ntotal_shmem {50 * MIB}\n", OLD),
        ("v1/system.slice/valved.service", f"rss 7\nshmem {50 * MIB}\n", OLD),
        ("v2/system.slice/valved.service", f"anon 7\nshmem {50 * MIB}\n", NEW),
        ("v2", f"anon 7\nshmem {50 * MIB}\n", "0::/\n"),
    ],
)
def test_what_valved_itself_uses_never_counts_as_kept(machine: Path, group: str, stat: str, member_of: str) -> None:
    charge(machine, group, stat, member_of)
    audit = machine / "run" / "audit.jsonl"
    audit.write_bytes(b"x" * MIB)

    assert kept(machine, own=20 * MIB) == 30 * MIB - audit.stat().st_blocks * 512


@pytest.mark.parametrize(
    ("lies", "counts"), [("memory/trace", False), ("memory/disk/trace", True), ("disk/trace", True)]
)
def test_a_trace_in_memory_never_counts_as_kept(machine: Path, lies: str, counts: bool) -> None:
    """One on a disk is none of the shared memory, and would hide as much."""
    with (machine / "proc/self/mountinfo").open("a") as mounts:
        mounts.write(
            f"34 23 0:31 / {machine}/memory rw - tmpfs tmpfs rw\n35 34 8:1 / {machine}/memory/disk rw - ext4 a rw\n"
        )
    trace = machine / lies
    trace.parent.mkdir(parents=True)
    files = (trace, trace.with_name("trace.1"))
    for file in files:
        file.write_bytes(b"x" * MIB)
    charge(machine, "v2/system.slice/valved.service", f"shmem {50 * MIB}\n", NEW)

    mine = 0 if counts else sum(file.stat().st_blocks * 512 for file in files)
    assert kept(machine, trace=str(trace)) == 50 * MIB - mine


def test_the_kernels_memory_of_what_others_keep_is_never_missed(machine: Path) -> None:
    own = KERNEL_OWN + KERNEL_FILE * len(os.listdir("/proc/self/fd"))
    slack = 64 * KERNEL_FILE  # a descriptor more or less
    charge(machine, "v2/system.slice/valved.service", f"shmem {MIB}\nslab_unreclaimable {own + 5 * MIB}\n", NEW)
    assert abs(kept(machine) - 11 * MIB) <= slack

    charge(machine, "v1/system.slice/valved.service", f"shmem {MIB}\n", OLD)
    assert kept(machine) == MIB
    usage = machine / "v1/system.slice/valved.service/memory.kmem.usage_in_bytes"
    usage.write_text(f"{own + OLD_GROUP_OWN + 5 * MIB}\n")
    assert abs(kept(machine) - 6 * MIB) <= slack


def test_what_valved_needs_of_the_kernels_memory_never_hides_pages_that_are_kept(machine: Path) -> None:
    charge(machine, "v2/system.slice/valved.service", f"shmem {9 * MIB}\nslab_unreclaimable {MIB}\n", NEW)

    assert kept(machine) == 9 * MIB


def test_a_container_that_sees_only_its_own_group_reads_that(machine: Path) -> None:
    """As without a namespace of control groups: the mount begins at the container's own group."""
    (machine / "proc/self/mountinfo").write_text(f"32 23 0:29 /docker/1 {machine}/v1 rw - cgroup cgroup rw,memory\n")
    charge(machine, "v1", f"shmem {MIB}\n", "4:memory:/docker/1\n")

    assert kept(machine) == MIB


def test_memory_of_other_processes_is_never_taken_for_kept(machine: Path) -> None:
    charge(machine, "v2/system.slice/valved.service", f"shmem {MIB}\n", NEW, (77,))
    (machine / "proc/77").mkdir()
    (machine / "proc/77/stat").write_text("77 (a) b) S 1 77 77\n")
    assert kept(machine) is None

    (machine / "proc/77/stat").write_text(f"77 (a) b) S {os.getpid()} 77 77\n")  # valved has started it
    assert kept(machine) == MIB


@pytest.mark.parametrize("broken", ["memory.stat", "cgroup.procs"])
def test_a_file_that_is_missing_or_strange_never_fails_a_look(machine: Path, broken: str) -> None:
    charge(machine, "v2/system.slice/valved.service", f"shmem {MIB}\n", NEW)
    file = machine / "v2/system.slice/valved.service" / broken
    for text in ("", "shmem\n", "what is this\n"):
        file.write_text(text)
        assert kept(machine) is None or broken == "cgroup.procs"
    file.unlink()
    assert kept(machine) is None


def test_no_group_of_memory_tells_nothing(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("1:cpu:/\n")

    assert kept(machine) is None


def test_the_real_machine_is_read_without_a_failure(tmp_path: Path) -> None:
    found = kept_bytes(tmp_path)

    assert found is None or isinstance(found, int)


def test_pages_that_clients_brought_never_hide_the_kernels_memory(machine: Path) -> None:
    slab = KERNEL_OWN + KERNEL_FILE * len(os.listdir("/proc/self/fd")) + 20 * MIB
    charge(machine, "v2/system.slice/valved.service", f"shmem 0\nslab_unreclaimable {slab}\n", NEW)

    assert kept(machine, own=60 * MIB) > 39 * MIB


def test_what_living_links_leave_unread_never_counts_as_kept(machine: Path) -> None:
    """Of one account with thousands: all others would be refused."""
    slab = KERNEL_OWN + KERNEL_FILE * len(os.listdir("/proc/self/fd")) + 20 * MIB
    charge(machine, "v2/system.slice/valved.service", f"shmem 0\nslab_unreclaimable {slab}\n", NEW)
    valved, client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with valved, client:
        before = kept(machine)
        for _ in range(64):
            valved.send(bytes(32))
        assert before - 2 * MIB < kept(machine) <= before - 2 * 64 * 512
