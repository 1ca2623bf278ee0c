"""Who is told to leave when a valved takes the run folder over, and which mode it takes over."""

from __future__ import annotations

import os
import subprocess

import pytest
from node_world import World

from valved.config import Config
from valved.daemon import take_over
from valved.model.ids import Mode
from valved.state import saved as state


@pytest.mark.parametrize("text", ["{stranger}", "-1", "0", "99999999999999999999", "x"])
def test_a_take_over_never_signals_a_process_that_is_not_the_valved_of_this_folder(
    tmp_path, monkeypatch, request, text
):
    """The file of the pid is an older valved's until the present one has signed."""
    monkeypatch.setattr(state, "REPLACE_S", 0.05)
    signals = []
    monkeypatch.setattr(state.os, "kill", lambda pid, number: signals.append(pid))
    stranger = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    request.addfinalizer(stranger.kill)
    present, next_ = state.RunFolder(tmp_path), state.RunFolder(tmp_path)
    present.take(replace=False)
    (tmp_path / state.PID_FILE).write_text(text.format(stranger=stranger.pid))

    with pytest.raises(state.AlreadyRunning, match="did not leave"):
        next_.take(replace=True)
    assert signals == []

    present.sign()
    with pytest.raises(state.AlreadyRunning, match=str(os.getpid())):
        next_.take(replace=True)
    assert signals == [os.getpid()]
    present.release()
    next_.release()


def test_a_mode_that_a_flag_has_overruled_never_comes_back_after_a_crash(tmp_path):
    """Regression: it was forgotten in memory alone. The state file named it for up to a minute."""
    first = World(tmp_path)
    first.node.set_policy(Mode.HARVEST, {}, 0)
    second = World(tmp_path, clock=first.clock, processes=first.processes)
    take_over(second, second.config, tmp_path, Mode.OFF)

    third = World(tmp_path, clock=first.clock, processes=first.processes)
    take_over(third, Config(mode=Mode.OBSERVE), tmp_path)

    assert third.brake.mode is Mode.OBSERVE
