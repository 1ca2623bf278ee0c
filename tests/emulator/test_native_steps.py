"""Threads that compute without ever looking at their grant are stopped in the middle, by a signal."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from rm_process import OK, RmProcess, grow_tree
from valve_tools.emulator.client import Emulator
from valve_tools.emulator.node import environment


@pytest.fixture(scope="module")
def parked_step(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("parked") / "parked_step"
    source = repository / "tests/emulator/parked_step.c"
    flags = ["-std=gnu11", "-O2", "-pthread", "-D_GNU_SOURCE", f"-I{repository / 'tools/emulator'}"]
    subprocess.run(["cc", *flags, source, "-o", program], check=True)
    return program


def test_a_step_stops_in_the_middle_and_goes_on(emulator: Emulator, process: RmProcess, parked_step: Path) -> None:
    tree = grow_tree(process, channels=1)
    step = subprocess.Popen(
        [parked_step, "0", str(tree.cids[0])],
        env=environment(emulator.directory, os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def count() -> int:
        assert step.stdin is not None
        assert step.stdout is not None
        step.stdin.write("\n")
        step.stdin.flush()
        return int(step.stdout.readline())

    try:
        for _ in range(20):
            before = count()
            emulator.wait(lambda _, before=before: count() > before, "the step goes on")
            status = tree.gate(tree.pairs, on=False)
            frozen = count()

            assert (status, emulator.state().channels[0].active) == (OK, 0)
            assert count() == frozen

            tree.gate(tree.pairs, on=True)
    finally:
        step.kill()
        step.communicate()
