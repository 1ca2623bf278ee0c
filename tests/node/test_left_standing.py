"""A process that valved froze, and then valved ends: it is let go, and launches nothing until a valved is there."""

from __future__ import annotations

import select
import signal
from pathlib import Path

import pytest
from node_rig import Online, service


def stands(process) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"


@pytest.fixture
def frozen(node):
    """An offline process that stands beside a busy service, as the call that is to stop it hangs."""
    offline = Online(node, "batch", role="offline")
    offline.wait_ready()
    offline.launch(us=50)
    online = Online(node, "chat")
    online.wait_ready()
    node.wait_for(lambda: not service(node, "chat").busy, "the service lets go")
    node.emulator.fault("on disable 1: hold")
    online.hint(1)
    online.launch(us=50)
    node.wait_for(lambda: stands(offline.process), "it is frozen")
    return offline, online


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGUSR2, signal.SIGKILL])
def test_no_valved_ends_and_leaves_a_process_that_nobody_lets_go(node, frozen, how):
    offline, online = frozen

    node.stop_valved(how)

    node.wait_for(lambda: not stands(offline.process), "somebody lets it go")
    offline.process.stdin.write("launch 50\n")
    offline.process.stdin.flush()
    for _ in range(100):
        online.launch(us=50)
    assert not select.select([offline.process.stdout], [], [], 0)[0], "it has launched beside the service"
    node.emulator.release()
    node.start_valved()
    online.hint(0)
    assert offline._line(), "it goes on"
