"""A valved that cannot see the driver, or does not know its branch: it observes, and no offline work runs."""

from __future__ import annotations

import pytest
from kube_node import kube_node, registered, scenario, serve_online, until
from node_world import World

from valved.errors import NotNow
from valved.model.ids import Role
from valved.model.states import DriverState

UNKNOWN = DriverState(version="600.10", branch=600, known=False, open_modules=True)
ABSENT = DriverState(version="", branch=0, known=False, open_modules=False)


@pytest.mark.parametrize("driver", [UNKNOWN, ABSENT])
def test_offline_work_is_never_started_where_valved_could_not_stop_it(tmp_path, driver):
    world = World(tmp_path, driver=driver)
    world.processes.add(100)
    world.processes.add(200)

    with pytest.raises(NotNow, match="could not stop") as refused:
        world.node.launch(100, 1000, Role.OFFLINE, "batch")
    service = world.node.launch(200, 2000, Role.ONLINE, "chat")

    assert refused.value.next_step == "valve doctor"
    assert f"offline work is refused: {driver.blindness}" in str(world.node.explain("service", service))


@scenario
async def test_a_slot_is_never_offered_on_a_card_whose_driver_valved_does_not_know(tmp_path):
    def blind(node):
        node.world.brake.driver = UNKNOWN

    async with kube_node(tmp_path, prepare=blind) as node:
        await registered(node)
        serve_online(node)
        await until(lambda: [one.reason for one in node.room.known.verdicts] == [UNKNOWN.blindness] * 2)

        assert node.kubelet.healthy == []
