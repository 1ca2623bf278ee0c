"""The server under the sanitizers, with many processes that come, gate, map and die at once."""

from __future__ import annotations

import random
import shutil
import socket
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from rm_process import RmProcess, grow_tree, use_uvm
from valve_tools.emulator.client import Emulator
from valve_tools.emulator.node import NO_LATENCY, Options, start, stop

pytestmark = pytest.mark.sanitizer


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


def talk_nonsense(directory: Path, seed: int) -> None:
    """Connections with broken hellos, and calls whose sizes, files and numbers mean nothing."""
    chance = random.Random(seed)
    for _ in range(150):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.connect(str(directory / "emu.sock"))
        kind = chance.choice([1, 2, 3, 4, 4, 4, 5, 6, 99])
        magic = 0x33554D45 if chance.random() < 0.95 else chance.getrandbits(32)
        link.send(struct.pack("<IIIIQ", magic, kind, chance.randrange(4), 0, chance.randrange(40)))
        if kind == 4 and link.recv(64):
            for _ in range(20):
                size = chance.choice([0, 4, 16, 24, 32, 40, 48, 72])
                params = chance.choice([0, 3, 8, 24, 268, 536, 1540])
                number = chance.choice([0x27, 0x29, 0x2A, 0x2B, 0x34, 0x35, 27, 33, 66, 73, 74, 200, 210, 214])
                call = struct.pack(
                    "<IIIIQQQII", chance.choice([1, 1, 1, 3, 4, 7]), number, size, params,
                    chance.randrange(30), chance.randrange(30), 3, 0xC1D00001, chance.randrange(9),
                )  # fmt: skip
                words = [chance.choice([0, 1, 0x41, 0x80, 0xC1D00001, 0x2080110B, 0x3D05]) for _ in range(size // 4)]
                body = struct.pack(f"<{len(words)}I", *words) + chance.randbytes(params)
                with suppress(BrokenPipeError, ConnectionResetError):
                    link.send(call + body)
                    link.recv(1 << 17)
        link.close()


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_a_crowd_leaves_no_report(repository: Path, tmp_path: Path, sanitizer: str) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    options = Options(gpus=2, knobs={**NO_LATENCY, "stop_wait_ms": "1"}, server=build(repository, tmp_path, sanitizer))
    node = tmp_path / "node"
    server = start(node, options)

    try:
        with ThreadPoolExecutor(4) as pool:
            lives = pool.map(lambda seed: live_and_die(node, seed), range(8))
            noise = pool.map(lambda seed: talk_nonsense(node, seed), range(4))
            list(lives), list(noise)
        with Emulator(node) as emulator:
            emulator.wait(lambda state: not state.raw["files"], "everybody gone")
            left = emulator.state()
    finally:
        code = stop(server)

    assert (left.channels, left.used_bytes(0), left.used_bytes(1), code) == ((), 0, 0, 0)
