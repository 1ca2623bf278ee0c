"""The part of a fleet's daemons that hears the brake: each watches the one policy as valved does, and answers with its
report (`python -m valve_tools.cluster.listeners KUBECONFIG NODES FILE`).

The watches are valved's own code, one connection a node; gates and GPUs are made up. Per change each node appends
`state heard_s confirmed_s` to the file, in seconds of CLOCK_MONOTONIC, which all processes of a machine share."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
from valve_kube.access import from_kubeconfig
from valve_kube.client import APPLY_PATCH, KubeClient
from valve_tools.cluster.fleet import node_name, report

from valved.kube import status
from valved.kube.apiserver import MANAGER, NODES_PATH, brake_view, now_text

READY = "ready"  # the line that says that every node watches


class Listener:
    """One node."""

    def __init__(self, client: KubeClient, index: int, log: TextIO) -> None:
        self.view = brake_view(client, self._braked)
        self._client = client
        self._name = node_name(index)
        self._report = report(index, np.random.default_rng(index))
        self._log = log
        self._paused = False
        self._answers: set[asyncio.Task[None]] = set()

    def _braked(self, is_paused: bool) -> None:
        if is_paused == self._paused:
            return
        self._paused = is_paused
        answer = asyncio.ensure_future(self._answer(is_paused, time.monotonic()))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

    async def _answer(self, is_paused: bool, heard_s: float) -> None:
        found = self._report | {"phase": "Paused" if is_paused else "Harvesting", "observedAt": now_text()}
        query = {"fieldManager": MANAGER, "force": "true"}
        body = status.apply_body(self._name, found)
        path = f"{NODES_PATH}/{self._name}/status"
        await self._client.request("PATCH", path, query=query, body=body, content_type=APPLY_PATCH)
        self._log.write(f"{'paused' if is_paused else 'resumed'} {heard_s:.6f} {time.monotonic():.6f}\n")


async def listen(kubeconfig: str, nodes: int, out: Path) -> None:
    client = KubeClient(from_kubeconfig(kubeconfig), timeout_s=60.0)
    with out.open("w", buffering=1, encoding="utf-8") as log:
        listeners = [Listener(client, index, log) for index in range(nodes)]
        running = [asyncio.ensure_future(each.view.run()) for each in listeners]
        for each in listeners:
            await each.view.wait_synced()
        log.write(READY + "\n")
        await asyncio.wait(running)


def heard(log: Path, state: str) -> Iterator[tuple[float, float]]:
    """When each node heard of the change to `state`, and when the API server had its answer."""
    for line in log.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{state} "):
            _, heard_s, confirmed_s = line.split()
            yield float(heard_s), float(confirmed_s)


if __name__ == "__main__":
    asyncio.run(listen(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
