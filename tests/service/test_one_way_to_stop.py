"""Every switch of one machine, in every state of offline work, with daemons that end and come back in between: at no
moment does an offline channel run beside a busy online service, and who may go on does so in the end.
"""

from __future__ import annotations

import itertools

import pytest
from stop_machine import OFFLINE, RESTARTS, STATES, machine_with

from valved.model.ids import Mode
from valved.policy.stopping import Work


def write_pause_file(machine):
    (machine.folder / "pause").write_text("the night shift\n")
    machine.world.brake.look_at_file()


SWITCHES = {
    "pause": lambda machine: machine.world.node.pause("test"),
    "pause file": write_pause_file,
    "breaker": lambda machine: machine.open_breaker(),
    "off": lambda machine: machine.world.node.set_policy(Mode.OFF, {}, 0),
    "observe": lambda machine: machine.world.node.set_policy(Mode.OBSERVE, {}, 0),
    "policy deleted": lambda machine: machine.world.brake.set_mode(Mode.OBSERVE, "GPUHarvestNode"),
    "drain": lambda machine: machine.world.node.drain("test", stop=False),
    "drain and stop": lambda machine: machine.world.node.drain("test", stop=True),
    "harvest": lambda machine: (machine.world.node.resume(), machine.world.node.set_policy(Mode.HARVEST, {}, 0)),
}


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("switch", SWITCHES)
def test_offline_never_runs_beside_a_busy_service_whatever_is_switched_and_restarted(tmp_path, switch, state, restart):
    for number, (second, again) in enumerate(zip(SWITCHES, itertools.cycle(RESTARTS), strict=False)):
        folder = tmp_path / str(number)
        folder.mkdir()
        machine = machine_with(folder, state, obeys=bool(number % 2))

        SWITCHES[switch](machine)
        machine.check()
        machine.serve()
        machine.connect(OFFLINE)
        machine.restart(restart)
        machine.serve()
        SWITCHES[second](machine)
        machine.serve()
        machine.restart(again)
        machine.serve()

        machine.world.brake.set_mode(Mode.HARVEST, "test")
        machine.world.node.resume()
        machine.connect(OFFLINE)
        machine.run(3000, step=50)
        machine.world.check()
        lives = machine.world.processes.start_time(OFFLINE) is not None
        assert machine.is_running() is lives, f"{second}, {again}: who was not ended goes on"


@pytest.mark.parametrize("switch", ["off", "observe", "policy deleted", "drain", "drain and stop"])
def test_who_ignores_the_request_to_leave_stays_stopped_and_is_gone_after_its_time(tmp_path, switch):
    machine = machine_with(tmp_path, "running", obeys=False)

    SWITCHES[switch](machine)
    machine.launch()
    machine.run(100)
    machine.finish()
    machine.run(58_900, step=500)
    assert machine.world.brake.work is Work.LEAVING
    assert machine.off, "also while online is idle"
    machine.run(3_000, step=100)

    assert machine.world.brake.work is Work.EMPTY
    assert machine.world.processes.start_time(OFFLINE) is None
    assert not machine.off
    assert machine.world.stopped is (switch == "drain and stop")


@pytest.mark.parametrize("switch", ["pause", "pause file", "breaker"])
def test_who_is_only_held_is_never_asked_to_leave_and_resumes_by_itself(tmp_path, switch):
    machine = machine_with(tmp_path, "running", obeys=True)

    SWITCHES[switch](machine)
    machine.serve()
    machine.run(500)
    assert machine.off, "also while online is idle"
    machine.world.node.resume()
    machine.run(2_000, step=50)

    assert not machine.signals
    assert machine.is_running()
