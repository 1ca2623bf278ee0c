"""A node per test: emulated GPU and valved, gone afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from valve_tools.demo.node import EmulatedNode
from valve_tools.emulator.node import Options


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., EmulatedNode]]:
    with ExitStack() as stack:

        def make(
            *, gpus: int = 1, mode: str = "harvest", config: str = "", start: bool = True, **knobs: str
        ) -> EmulatedNode:
            options = Options(gpus=gpus, knobs=knobs)
            node = stack.enter_context(EmulatedNode(tmp_path, options=options, mode=mode, config=config))
            if start:
                node.start_valved()
            return node

        yield make


@pytest.fixture
def node(make_node: Callable[..., EmulatedNode]) -> EmulatedNode:
    return make_node()
