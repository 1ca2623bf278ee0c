"""valved itself runs out of descriptors: whom it cannot take never runs beside a service."""

from __future__ import annotations

import resource

from node_rig import Offline, Online


def test_no_offline_work_runs_that_valved_has_no_descriptors_to_stop(node):
    """It is not asked for its status before: a question has three descriptors open in valved, for a while also after
    the answer."""
    Online(node, "chat").wait_ready()
    Offline(node, "batch").wait_running()
    assert node.valved is not None
    _, hard = resource.prlimit(node.valved.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(node.valved.pid, resource.RLIMIT_NOFILE, (node.valved_fds() + 3, hard))

    late = Offline(node, "late")
    log = node.folder / "late.log"
    node.wait_for(lambda: "it is stopped until one does" in log.read_text(), "it stopped itself")
    newcomer = Online(node, "newcomer")
    newcomer.wait_ready()
    newcomer.launch(us=1000)
    assert not late.beats
