"""While helm waits for the chart's pods, the demo shows them, and gives up at the first that cannot start."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from valve_tools.demo.cluster_pods import NeverStarts, PodWatch, state_of
from valve_tools.demo.cluster_screen import Screen


def pod(*states, phase="Pending"):
    statuses = [{"name": f"c{number}", "state": state} for number, state in enumerate(states)]
    return {"metadata": {"name": "webhook-1", "uid": "u"}, "status": {"phase": phase, "containerStatuses": statuses}}


def waiting(reason):
    return {"waiting": {"reason": reason}}


class Api:
    def __init__(self, *answers):
        self.answers = list(answers)

    def get(self, path):
        assert path == "/api/v1/namespaces/valve-system/pods"
        return {"items": [self.answers.pop(0)]}


def watch(folder, *pods):
    told = io.StringIO()
    screen = Screen(Console(file=told, width=200))
    return PodWatch(api=Api(*pods), screen=screen, logs=folder, namespace="valve-system"), told


def test_each_change_of_a_pod_is_shown_once(tmp_path):
    creating = pod(waiting("ContainerCreating"))
    following, told = watch(tmp_path, creating, creating, pod({"running": {}}, phase="Running"))

    for _ in range(3):
        following.look()

    assert told.getvalue().split("\n")[:2] == [
        "    webhook-1: Pending, c0 ContainerCreating",
        "    webhook-1: Running",
    ]


def test_a_pod_in_a_crash_loop_never_makes_anybody_wait_ten_silent_minutes(tmp_path):
    folder = tmp_path / "valve-system_webhook-1_u" / "c0"
    folder.mkdir(parents=True)
    (folder / "0.log").write_text("exec: valve-scheduler: no such file\n")
    following, _ = watch(tmp_path, pod(waiting("CrashLoopBackOff")))

    with pytest.raises(NeverStarts, match=r"webhook-1/c0 is in CrashLoopBackOff\nexec: valve-scheduler: no such file"):
        following.look()


def test_one_that_ended_and_will_be_tried_again_is_no_reason_to_give_up(tmp_path):
    following, _ = watch(tmp_path, pod({"terminated": {"reason": "Error"}}))

    following.look()


def test_a_pod_nobody_has_looked_at_yet_is_pending():
    assert state_of({"metadata": {"name": "x"}}) == "Pending"
