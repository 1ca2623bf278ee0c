"""Processes whose CUDA is loaded past the shim: registered, on the card, and with no channel in valved's books."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from node_rig import Offline, Online
from valve_tools.demo.node import EmulatedNode
from valve_tools.emulator.node import LIBRARIES


@pytest.fixture
def past(tmp_path: Path) -> Mapping[str, str]:
    """Settings of a workload that loads libcuda as a part of another library, with RTLD_DEEPBIND: its calls of the
    driver reach no hook."""
    library = tmp_path / "libpast.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    needed = ["-Wl,--no-as-needed", f"-L{LIBRARIES}", f"-Wl,-rpath,{LIBRARIES}", "-lfakenv", "-l:libcuda.so.1"]
    command = [str(compiler), "-shared", "-o", str(library), "-x", "c", os.devnull, "-x", "none", *needed]
    subprocess.run(command, check=True)
    return {"WORKLOAD_PAST": str(library)}


def stands(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def is_registered_without_channels(node: EmulatedNode, pid: int) -> bool:
    return [client.channels for client in node.status().clients if client.pid == pid] == [0]


def test_an_offline_job_past_the_shim_never_runs_on_beside_a_busy_service(node, past):
    online = Online(node, "chat")
    online.wait_ready()
    online.hint(1)
    offline = Offline(node, "batch", env=past)
    offline.wait_running()  # no gate stops it
    assert is_registered_without_channels(node, offline.process.pid)

    node.wait_for(lambda: stands(offline.process.pid), "the look at the card finds it")
    beats = offline.beats
    online.launch(us=20_000)
    assert offline.beats == beats
    online.quit()


def test_no_offline_work_runs_beside_a_service_past_the_shim(node, past):
    offline = Offline(node, "batch")
    offline.wait_running()
    online = Online(node, "chat", env=past)
    online.wait_ready()
    assert is_registered_without_channels(node, online.process.pid)

    node.wait_for(lambda: node.status().gpus[0].guarded_because, "the guard closes the card")
    offline.wait_stopped()
    beats = offline.beats
    online.launch(us=20_000)
    assert offline.beats == beats
    assert node.status().gpus[0].guarded_because.startswith(f"process {online.process.pid} (")
