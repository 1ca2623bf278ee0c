"""Who is told to leave when a valved takes the run folder over."""

from __future__ import annotations

import os
import subprocess

import pytest

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
