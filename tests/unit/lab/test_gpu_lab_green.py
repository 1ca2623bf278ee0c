"""C16 never calls a card fit where a tile ran on processors that its share lacks, or a third tile was in flight."""

from __future__ import annotations

from typing import Any

import pytest
from valve_tools.gpu.outcome import LabVerdict
from valve_tools.gpu.steps.green import judged

SHARE: dict[str, Any] = {"share": 0.5, "sms": 64, "ran_on": 64, "tile_alone_ms": 9.0, "most_in_flight": 2}
FOUND = {"refused": "", "alone_us": [1000.0, 1100.0], "start_us": 900.0, "end_us": 90.0, "change_us": [3.0]}


def found(**change: Any) -> dict[str, Any]:
    return {**FOUND, "shares": [{**SHARE, "tiles_ms": [9.0], "step_us": [1500.0, 1650.0], **change}]}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [({}, LabVerdict.OK), ({"ran_on": 65}, LabVerdict.DIFFERS), ({"most_in_flight": 3}, LabVerdict.DIFFERS)],
)
def test_what_is_wrong_is_said(change, verdict):
    assert judged(found(**change)).verdict is verdict


def test_a_driver_that_refuses_is_quoted():
    outcome = judged({"refused": "this driver has no green contexts: cuGreenCtxCreate is missing"})
    assert outcome.verdict is LabVerdict.REFUSED
    assert "cuGreenCtxCreate" in outcome.detail


def test_the_slowdown_is_that_of_steps_beside_tiles_against_steps_alone():
    assert judged(found()).answers == {"ran_on": {"64": 64}, "slower_p50": {"64": 1.5}}
