"""For vLLM's own tests: `pytest -p vllm_released` loads the integration first, with a node that takes nothing.

With VALVE_TEST_PLAIN set nothing is loaded. Runs inside the engines' environment; prints how many schedulers the hook
has attached to.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

_node: Any = None
_attached = 0


def pytest_configure() -> None:
    global _node  # noqa: PLW0603 - as long as the run
    if os.environ.get("VALVE_TEST_PLAIN"):
        return
    folder = Path(tempfile.mkdtemp(prefix="valve-released-"))
    os.environ["VALVE_RUN_DIR"] = str(folder)
    from kv_node import KvNode
    from valve_hook.link import Link
    from valve_hook.vllm import calls, plugin

    _node = KvNode(folder)
    links: list[Any] = []

    def fresh_link() -> Any:
        """A process has one scheduler, and one link; here one comes after another."""
        if links:
            links.pop().close()
        links.append(Link(build="test", path=_node.path, retry_s=0.02, gone_s=0.0))
        links[0].start()
        return links[0]

    calls.process_link = fresh_link
    make = calls.VllmHook.__init__

    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        global _attached  # noqa: PLW0603
        make(self, *arguments, **options)
        self.settle()
        _attached += self.link.session is not None

    calls.VllmHook.__init__ = counted
    plugin.register()


def pytest_unconfigure() -> None:
    print(f"\nattached {_attached}")
    if _node is not None:
        _node.stop()
