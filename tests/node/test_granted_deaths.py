"""A service, its hook, valved and offline work, all real, and one of them dies in the middle of a pause that was given:
offline work is stopped at the end of the pause all the same, nothing is lost, and granting goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from node_rig import Offline, nothing_left_off, service
from valve_tools.demo.node import VALVE, EmulatedNode
from valve_tools.demo.rounds import OFFLINE, last_summary

LONG = ["--slo", "tpot=1500ms,gap=1500ms", "--grant"]
"""Pauses of a second between steps of ten milliseconds."""
ENDLESS = [
    "--hasty",
    "--say-pauses",
    "--requests",
    "2",
    "--rate",
    "50",
    "--in-tokens",
    "8000",
    "--out-tokens",
    "100000",
]


class Serving:
    """The demo's service with two requests that never end."""

    def __init__(self, node: EmulatedNode, name: str = "chat", more: list[str] = LONG) -> None:
        self.node, self.out = node, node.folder / f"{name}.out"
        argv = [str(VALVE), "run", "--online", "--name", name, *more, "--", sys.executable, "-m"]
        self.process = node.run("", [*argv, "valve_tools.demo.granted_service", *ENDLESS], name=name, out=self.out)

    @property
    def pauses(self) -> int:
        assert self.process.poll() is None, self.out.read_text()
        return self.out.read_text().count("pause\n")

    def in_a_pause(self, offline: Offline) -> None:
        """One that has just begun, with offline work running in it."""
        before = self.pauses
        self.node.wait_for(lambda: self.pauses > before, "a pause")
        seen = offline.beats
        self.node.wait_for(lambda: offline.beats > seen, "offline work runs in it")


@pytest.fixture(params=["gate", "timeslice"])
def scene(
    make_node: Callable[..., EmulatedNode], request: pytest.FixtureRequest
) -> tuple[EmulatedNode, Offline, Serving]:
    node = make_node(config=f'[granted]\nrung = "{request.param}"\nprobed_driver = "580.159.04"\n')
    offline = Offline(node, "batch")
    offline.wait_running()
    serving = Serving(node)
    serving.in_a_pause(offline)
    assert service(node, "chat").granted.rung == request.param
    return node, offline, serving


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_no_pause_outlasts_its_end_because_valved_died_or_hangs(
    scene: tuple[EmulatedNode, Offline, Serving], how: signal.Signals
) -> None:
    node, offline, serving = scene
    assert node.valved is not None
    out = node.folder / "work.out"
    work = node.run("offline", [str(OFFLINE), "--unit-us", "1000", "--report", "0.1"], name="work", out=out)
    node.wait_for(lambda: b"units" in out.read_bytes(), "the batch job works")
    serving.in_a_pause(offline)

    node.valved.send_signal(how)
    offline.wait_stopped()  # by itself: nobody else is there

    if how is signal.SIGSTOP:
        node.valved.send_signal(signal.SIGCONT)
    else:
        node.valved.wait()
        node.start_valved()
    serving.in_a_pause(offline)
    work.send_signal(signal.SIGTERM)
    work.wait()
    assert last_summary(out)["ok"]
    assert work.returncode == 0


def test_a_service_that_is_killed_in_a_pause_leaves_nothing_stopped(
    scene: tuple[EmulatedNode, Offline, Serving],
) -> None:
    node, offline, serving = scene

    kill(serving.process)

    node.wait_for(lambda: service(node, "chat") is None, "valved has let go of it")
    offline.wait_running()
    node.wait_for(lambda: nothing_left_off(node), "all channels are on")
    assert node.valved is not None
    assert node.valved.poll() is None


def test_offline_work_that_is_killed_in_a_pause_takes_no_grant_along(
    scene: tuple[EmulatedNode, Offline, Serving],
) -> None:
    """The next one comes into the same service, and runs in its pauses; by slices, beside its steps, too."""
    node, offline, serving = scene
    before = service(node, "chat")

    kill(offline.process)
    heir = Offline(node, "heir")
    serving.in_a_pause(heir)
    serving.in_a_pause(heir)

    after = service(node, "chat")
    if before.granted.rung == "gate":  # each pause is one
        assert after.granted.grants >= before.granted.grants + 2
    assert after.granted.granted_ns > before.granted.granted_ns
    assert after.preemptions == before.preemptions  # the end of a grant is none


def kill(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
