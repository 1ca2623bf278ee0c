"""The rows of size are of the product's own calls, on fleets small enough for a test."""

from __future__ import annotations

import json

import pytest
from valve_kube.objects import pod_place
from valve_tools.bench import clustersize


def test_the_pods_that_fill_memory_are_as_large_as_those_of_a_cluster() -> None:
    """Tiny ones once hid that an extender dies at 4,000."""
    pod = clustersize.placed_pod(13, nodes=5)

    assert len(json.dumps(pod)) > 9_000
    assert pod_place(pod).node == "gpu-0001"
    assert len(pod_place(pod).gpu_uuids) == 1


def test_no_two_pods_hold_one_gpu() -> None:
    held = [pod_place(clustersize.placed_pod(number, nodes=5)) for number in range(40)]

    assert len({(one.node, one.gpu_uuids) for one in held}) == 40


def test_every_pod_of_every_kind_is_answered_with_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench of refusals would be a fast one."""
    monkeypatch.setattr(clustersize, "CALLS", 2 * len(clustersize.KINDS))
    monkeypatch.setitem(clustersize.FILTER_MS, 30, 10.0)
    answers = []
    timed = clustersize._timed

    def kept(samples, call, arguments):
        answers.append(timed(samples, call, arguments))
        return answers[-1]

    monkeypatch.setattr(clustersize, "_timed", kept)
    rows = list(clustersize._filter(30))

    assert [row.n for row in rows] == [12, 12]
    assert all(answer["NodeNames"] for answer in answers[::2])
    assert all(max(one["Score"] for one in answer) == 10 for answer in answers[1::2])


def test_the_round_of_the_controller_has_all_kinds_to_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clustersize, "WAITING", 20)
    monkeypatch.setattr(clustersize, "ROUNDS", 11)
    rows = list(clustersize._round())

    assert [(row.metric, row.n) for row in rows] == [("requeue", 11), ("out of reach", 2)]
