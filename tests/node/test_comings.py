"""Nothing leaks over any number of joins and leaves. `JOINS=100000` says how many; `make test` plays 500.

`-s` shows what valved has after each tenth of them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import joiner
from node_rig import Online
from valve_tools.demo.node import NodeError

from valved.machine.helpers import CLOSERS, WORKERS
from valved.machine.possession import THREADS

JOINS = int(os.environ.get("JOINS", "500"))
PARTS = 10  # after each of them what valved has is looked at
THAWER = Counter({"pipe": 1, "anon_inode": 1})  # begun when a process is frozen for the first time, then kept
WARM = 200  # joins after which what is made once is there
POOLS = CLOSERS + THREADS + WORKERS  # threads that are made when a call has to wait for one, and then stay


def played(node, joins, seed):
    command = [sys.executable, joiner.__file__, str(node.run_dir), str(joins), str(seed)]
    done = subprocess.run(command, env=node.environment(), check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    node.wait_for(lambda: len(node.status().clients) == 1, "all but the service have left")


def held(node):
    """What valved has: descriptors by what they are, and services."""
    proc = Path(f"/proc/{node.valved.pid}")
    kinds = Counter({"service": len(node.status().services)})
    for fd in os.listdir(proc / "fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            kinds[os.readlink(proc / "fd" / fd).split(":")[0].split(" ")[0]] += 1
    return kinds


def threads(node):
    return len(os.listdir(f"/proc/{node.valved.pid}/task"))


def leaked(node, before, began):
    more = held(node) - before - THAWER
    more["socket"] -= threads(node) - began  # a thread that asks the emulated driver keeps a connection to it
    return +more


def settle(node, before, began):
    try:
        node.wait_for(lambda: not leaked(node, before, began), "valved holds no more than before")
    except NodeError:
        raise AssertionError(f"valved holds more than before: {leaked(node, before, began)}") from None


def rss_kib(node):
    lines = Path(f"/proc/{node.valved.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_nothing_ever_leaks_over_joins_and_leaves(node):
    online = Online(node, "chat")
    online.wait_ready()
    played(node, WARM, seed=1)
    node.wait_for(
        lambda: any("audit" in what for what in held(node)), "what is opened a second after the start is there"
    )
    before, began, first_kib = held(node), threads(node), 0

    for part in range(PARTS):
        joins = JOINS // PARTS + (part < JOINS % PARTS)
        began_s = time.monotonic()
        played(node, joins, seed=2 + part)
        settle(node, before, began)
        more, kib = threads(node) - began, rss_kib(node)
        first_kib = first_kib or kib
        print(
            f"{joins} joins in {time.monotonic() - began_s:.0f} s: {dict(held(node))}, {began + more} threads, "
            f"resident memory {kib / 1024:.1f} MiB",
            flush=True,
        )

    assert kib - first_kib < 8 * 1024  # by then the journal is full, and most threads are there
    assert more <= POOLS
    before_ns, launched_ns, done_ns = online.launch(us=100)
    assert before_ns < launched_ns < done_ns
