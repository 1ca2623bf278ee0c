"""The server under the sanitizers, with many processes that come, gate, map and die at once."""

from __future__ import annotations

import random
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rm_process import RmProcess, grow_tree, use_uvm
from valve_tools.emulator.client import Emulator
from valve_tools.emulator.node import NO_LATENCY, Options, start, stop

pytestmark = [pytest.mark.sanitizer, pytest.mark.timeout(120)]


def build(repository: Path, where: Path, sanitizer: str) -> Path:
    sources = sorted(map(str, (repository / "tools/emulator/server").glob("*.c")))
    include = [f"-I{repository / path}" for path in ("proto/abi", "tools/emulator")]
    server = where / f"valve-emu-server-{sanitizer.split(',', maxsplit=1)[0]}"
    flags = ["-std=gnu11", "-O1", "-g", "-pthread", "-D_GNU_SOURCE", f"-fsanitize={sanitizer}"]
    subprocess.run(["cc", *flags, "-fno-sanitize-recover=undefined", *include, *sources, "-o", server], check=True)
    return server


def live_and_die(directory: Path, seed: int) -> None:
    """One process's life: a tree, memory, gates of everybody it knows, then an end without notice."""
    chance = random.Random(seed)
    with RmProcess(directory) as process:
        tree = grow_tree(process, gpu=chance.randrange(2), channels=3)
        use_uvm(tree)
        process.call("work", cid=tree.cids[0], gpu=tree.gpu)
        for _ in range(12):
            tree.gate(tree.pairs, on=chance.random() < 0.5)
            tree.allocate_memory(1 << 20)
            if chance.random() < 0.3:
                tree.schedule()
            if chance.random() < 0.2:
                tree.free(tree.vaspace)
                break


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_a_crowd_leaves_no_report(repository: Path, tmp_path: Path, sanitizer: str) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    options = Options(gpus=2, knobs={**NO_LATENCY, "stop_wait_ms": "1"}, server=build(repository, tmp_path, sanitizer))
    node = tmp_path / "node"
    server = start(node, options)

    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda seed: live_and_die(node, seed), range(8)))
        with Emulator(node) as emulator:
            emulator.wait(lambda state: not state.raw["files"], "everybody gone", deadline_s=90)
            left = emulator.state()
    finally:
        code = stop(server)

    assert (left.channels, left.used_bytes(0), left.used_bytes(1), code) == ((), 0, 0, 0)
