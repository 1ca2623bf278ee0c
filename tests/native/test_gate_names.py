"""The gate and NVML: names and sizes of cards are read once, before anything waits for the daemon."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from gates import SETTINGS, FakeDriver

from valved.gate.adapter import NativeGate


def test_who_asks_for_the_cards_never_waits_for_nvml(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each status and each save of the state asked NVML on the loop: beside a card in trouble it never came back."""
    asked = []
    fake = SimpleNamespace(
        NVMLError=Exception,
        nvmlInit=lambda: asked.append("init"),
        nvmlDeviceGetCount=lambda: 0,
        nvmlShutdown=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    gate = NativeGate(SETTINGS, driver.machine())
    try:
        before = len(asked)
        for _ in range(3):
            assert [card.index for card in gate.gpus()] == [0, 1]
    finally:
        gate.close()

    assert len(asked) == before
