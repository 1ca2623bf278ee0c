"""A node whose process was killed leaves nothing that the next one on the machine does not take down."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from valve_tools.cluster.controlplane import wait_for
from valve_tools.cluster.leftovers import CONTAINERD, PREFIX, locked, sweep

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder for temporary ones of its own: real nodes of this machine are not for these tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    for line in Path("/proc/mounts").read_text().splitlines():
        if line.split()[1].startswith(f"{tmp_path}/"):
            subprocess.run(["umount", "-l", line.split()[1]], check=False)


def alike(folder: Path) -> subprocess.Popen[bytes]:
    """As a containerd shim looks: its socket in the command, a container as its child."""
    script = "sleep 1000 & wait"
    return subprocess.Popen(["sh", "-c", script, "shim", "-address", f"{folder}/{CONTAINERD}"])


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lives(pid: int) -> bool:
    """A zombie is none: its parent is this machine's first process, which takes its time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_containers_mounts_and_folders_of_a_dead_node_go_and_those_of_a_live_one_stay(short: Path) -> None:
    dead, alive = short / f"{PREFIX}dead", short / f"{PREFIX}alive"
    for folder in (dead, alive):
        (folder / "kubelet/token").mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder / "kubelet/token"], check=True)
    shims = {folder: alike(folder) for folder in (dead, alive)}
    containers = {folder: wait_for("its child", lambda shim=shim: children(shim.pid)) for folder, shim in shims.items()}
    try:
        with locked(alive):
            assert sweep() == [dead]

            shims[dead].wait(30)
            wait_for("the container's end", lambda: not lives(containers[dead][0]))
            assert not dead.exists()
            assert os.path.ismount(alive / "kubelet/token")
            assert shims[alive].poll() is None
            assert lives(containers[alive][0])
        assert sweep() == [alive]
    finally:
        for shim in shims.values():
            shim.kill()
            shim.wait()
    assert sweep() == []
