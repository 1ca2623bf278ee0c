"""An offline and an online engine with KV memory on an emulated node: the demo's own workloads, watched and killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from valve_tools.demo import kv_batch, kv_service
from valve_tools.demo.node import EmulatedNode

BLOCKS, PLANES, BLOCK_KIB = 256, 2, 64  # 8 columns of two 2 MiB handles
# A loaded machine is no driver that hangs: order_s.
CONFIG = """
[memory]
handle_mib = 2
pool_mib = {pool_mib}
remap = "{remap}"
headroom_min_mib = 4
headroom_max_mib = 8
spare_mib = 0
order_s = 20.0
tick_ms = 10
tau_s = 1.0
tau_min_s = 0.2
"""
BURST = [(4.0, 1200, 60)]  # 79 blocks, three columns; its reserve is one
CACHE = ["--kv-blocks", str(BLOCKS), "--kv-planes", str(PLANES), "--block-kib", str(BLOCK_KIB)]


def config(pool_mib: int = 36, remap: str = "helper", more: str = "") -> str:
    return CONFIG.format(pool_mib=pool_mib, remap=remap) + more


class Engines:
    """Both workloads on one node. Online answers what a trace says: (second, prompt tokens, answer tokens)."""

    def __init__(self, node: EmulatedNode) -> None:
        self.node = node
        self.folder = node.folder

    def start_offline(self, *more: str) -> None:
        argv = [*kv_batch.COMMAND, *CACHE, "--in-tokens", "120", "--out-tokens", "60", *more]
        self.offline = self.node.run("offline", argv, name="batch", out=self.folder / "offline.out")
        self.node.wait_for(lambda: self.engine("offline"), "the offline engine has attached")
        self.node.wait_for(lambda: self.engine("offline").backed_blocks == BLOCKS, "it has all its memory")

    def start_online(self, requests: list[tuple[float, int, int]], *more: str) -> None:
        trace = self.folder / "requests.csv"
        trace.write_text("t_s,in_tokens,out_tokens\n" + "".join(f"{t},{i},{o}\n" for t, i, o in requests))
        last = requests[-1][0] + 0.1
        load = ["--trace", str(trace), "--duration", str(last), "--decode-us", "2000", *more]
        argv = [*kv_service.COMMAND, *CACHE, *load]
        while True:
            self.online = self.node.run("online", argv, name="chat", out=self.folder / "online.out")
            self.node.wait_for(lambda: self.engine("online") or self.online.poll() is not None, "it attached or ended")
            if self.engine("online"):
                break  # else valved was too slow for its first word, on a busy machine: it ran untouched, as it should
        self.node.wait_for(lambda: 0 < self.engine("online").backed_blocks < BLOCKS, "it has its reserve")
        if self.engine("offline") is not None:
            self.node.wait_for(lambda: self.engine("offline").backed_blocks == BLOCKS, "the rest is lent again")

    def engine(self, role: str):
        number = {"online": 1, "offline": 2}[role]
        return next((one for one in self.node.status().memory.engines if one.role == number), None)

    def pool(self):
        [pool] = self.node.status().memory.gpus
        return pool

    def stop_offline(self) -> dict[str, object]:
        """It finishes what it has begun and says what came out."""
        self.offline.send_signal(signal.SIGTERM)
        return self.summary(self.offline, "offline")

    def summary(self, process, name: str) -> dict[str, object]:
        assert process.wait(200) == 0, (self.folder / f"{name}.out").read_text()[-500:]
        return last_summary(self.folder / f"{name}.out")

    def nothing_is_left(self) -> None:
        """Everybody is gone: every handle is free, every channel on."""
        self.node.wait_for(lambda: not self.node.status().clients, "every client is forgotten")
        self.node.wait_for(lambda: self.pool().free == self.pool().handles, "every handle is free")
        self.node.wait_for(lambda: not self.node.emulator.state().disabled, "no channel is off")


def check_offline(summary: Any) -> None:
    assert summary["ok"], summary
    assert summary["wrong_words"] == 0


def check_online(summary: Any) -> None:
    assert summary["kv"]["wrong_words"] == 0
    assert summary["kv"]["taken"] == 0
    assert summary["finished"] == summary["requests"]


def last_summary(path: Path) -> dict[str, object]:
    found = json.loads([line for line in path.read_text().splitlines() if '"summary"' in line][-1])
    assert isinstance(found, dict)
    return found
