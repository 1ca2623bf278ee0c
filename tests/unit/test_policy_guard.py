"""Where may offline work run at all: only where everybody else can be heard."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from valved.model.ids import GpuIndex
from valved.policy.guard import Card, GuardSettings, Holder, Stranger, judge

SETTINGS = GuardSettings()
CARDS = (Card(gpu=GpuIndex(0)), Card(gpu=GpuIndex(1)))


def holder(*gpus: int, heard: bool = True, injected: bool = True, name: str = "serving/chat-0/engine") -> Holder:
    return Holder(name=name, gpus=frozenset(map(GpuIndex, gpus)), is_heard=heard, is_injected=injected)


def test_a_gpu_whose_every_holder_is_heard_is_harvested() -> None:
    first, second = judge(CARDS, [holder(0)], [], SETTINGS)

    assert (first.is_harvestable, first.is_guarded, first.is_heard, first.online) == (
        True,
        False,
        True,
        ("serving/chat-0",),
    )
    assert (second.is_harvestable, second.is_guarded, second.reason) == (False, False, "no online pod holds it")


def test_one_holder_that_is_not_heard_closes_the_gpu() -> None:
    verdict = judge(CARDS, [holder(0), holder(0, heard=False, name="serving/bare/engine")], [], SETTINGS)[0]

    assert verdict.is_guarded
    assert verdict.reason == "serving/bare/engine holds the GPU, and no process of that pod runs with the shim"
    assert verdict.online == ("serving/bare", "serving/chat-0")


@pytest.mark.parametrize(
    ("heard", "injected", "risk"),
    [
        (False, False, "serving/chat-0/engine runs without the shim"),
        (False, True, ""),  # an engine that starts: it is heard before it needs memory
        (True, False, ""),
    ],
)
def test_only_a_holder_that_will_never_be_heard_is_at_risk_from_offline_memory(
    heard: bool, injected: bool, risk: str
) -> None:
    own, other = judge(CARDS, [holder(0, heard=heard, injected=injected)], [], SETTINGS)

    assert (own.risk, other.risk) == (risk, "")


def test_a_holder_whose_mode_lends_nothing_closes_the_gpu_though_it_is_heard() -> None:
    for mode, open_to_offline in (("off", False), ("observe", False), ("harvest", True), ("", True)):
        online = Holder(name="serving/chat-0/engine", gpus=frozenset({GpuIndex(0)}), is_heard=True, mode=mode)
        verdict = judge(CARDS, [online], [], SETTINGS)[0]

        assert (verdict.is_harvestable, verdict.is_guarded) == (open_to_offline, not open_to_offline)
        assert verdict.is_heard
        assert (f"mode {mode} for serving/chat-0/engine" == verdict.reason) is not open_to_offline


def test_a_process_without_the_shim_is_the_gravest_reason() -> None:
    stranger = Stranger(name="process 7 (python)", gpu=GpuIndex(1))

    verdict = judge(CARDS, [holder(1, heard=False)], [stranger], GuardSettings(harvest_unallocated=True))[1]

    assert verdict.is_guarded
    assert verdict.reason == "process 7 (python) uses the GPU without the shim"


def test_an_unallocated_gpu_is_harvested_only_if_the_operator_says_so() -> None:
    assert [v.is_harvestable for v in judge(CARDS, [], [], GuardSettings(harvest_unallocated=True))] == [True, True]
    assert [v.is_guarded for v in judge(CARDS, [], [], SETTINGS)] == [False, False]


def test_a_card_in_a_mode_that_cannot_be_harvested_says_so() -> None:
    verdict = judge([Card(gpu=GpuIndex(0), obstacle="MIG is on")], [holder(0)], [], SETTINGS)[0]

    assert (verdict.is_harvestable, verdict.is_guarded, verdict.reason) == (False, False, "MIG is on")


@given(
    heard=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=6),
    strange=st.lists(st.integers(0, 3), max_size=3),
    unallocated=st.booleans(),
)
def test_nothing_is_harvested_beside_somebody_unheard(
    heard: list[tuple[int, bool]], strange: list[int], unallocated: bool
) -> None:
    cards = [Card(gpu=GpuIndex(gpu)) for gpu in range(4)]
    holders = [holder(gpu, heard=is_heard) for gpu, is_heard in heard]
    strangers = [Stranger(name="process", gpu=GpuIndex(gpu)) for gpu in strange]

    for verdict in judge(cards, holders, strangers, GuardSettings(harvest_unallocated=unallocated)):
        unheard = verdict.gpu in strange or any(gpu == verdict.gpu and not ok for gpu, ok in heard)

        assert verdict.is_guarded == unheard
        assert not (verdict.is_harvestable and unheard)
