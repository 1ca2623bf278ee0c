"""Tasks beside the loop: one that fails is told and begun anew, and ends when it is cancelled."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from collections import Counter
from importlib.metadata import version

import pytest
from fake_gate import FakeGate
from node_world import FakeProcesses
from virtual import VirtualClock

from valved import daemon
from valved.config import Config
from valved.daemon import _start_metrics
from valved.gate.worth import Worths
from valved.machine import helpers
from valved.machine.helpers import Prompt
from valved.machine.notify import Notify
from valved.model.events import Event, EventKind
from valved.node import upkeep
from valved.state.saved import RunFolder
from valved.state.trace import LineFile


def test_a_background_task_never_dies_without_a_word_nor_says_the_same_without_end(monkeypatch):
    monkeypatch.setattr(upkeep, "AGAIN_S", 0.0)
    told, runs = [], []

    async def work():
        runs.append(1)
        if len(runs) < 100:
            raise KeyError("gone" if len(runs) < 50 else "away")
        await asyncio.Event().wait()

    async def main():
        task = asyncio.create_task(upkeep.keep_going("work", work, told.append))
        while len(runs) < 100:
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())

    assert told == [f"work failed and begins anew: KeyError: '{why}'" for why in ("gone", "away")]


def test_a_file_that_could_not_be_written_is_never_given_up_for_good(tmp_path):
    folder = tmp_path / "later"
    file = LineFile(folder / "audit.jsonl", 1 << 20)
    event = Event(seq=1, t_ns=1, kind=EventKind.NOTED)
    file.look()
    file.write(event)
    assert "No such file" in file.failure

    folder.mkdir()
    file.look()
    file.write(event)
    file.close()

    assert not file.failure
    assert (folder / "audit.jsonl").read_text()


def test_a_metrics_port_that_is_taken_never_ends_the_daemon():
    told = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = Config(metrics_port=taken.getsockname()[1])
        node = types.SimpleNamespace(status=None, save=None, troubles=[])
        started = asyncio.run(_start_metrics(config, types.SimpleNamespace(node=node, note=told.append), None))

    assert started is None
    assert str(config.metrics_port) in told[0]


OURS = types.SimpleNamespace(is_ours=lambda: True)


class FakeClock:
    def __init__(self):
        self.now, self.calls = 100.0, []

    def now_ns(self):
        return round(self.now * 1e9)

    def call_at_ns(self, when_ns, call):
        self.calls.append((when_ns / 1e9, call))
        return types.SimpleNamespace(cancel=self.calls.clear)

    def run(self, late_s=0.0):
        when, call = self.calls.pop()
        self.now = when + late_s
        call()


def test_a_loop_that_stood_is_never_passed_over_in_silence():
    clock, alive, told, late = FakeClock(), [], [], []
    beat = upkeep.LoopBeat(clock, lambda: alive.append(1), lambda: told.append(clock.now), late.append)

    for _ in range(40):
        clock.run()
    assert (len(alive), late) == (41, [])
    assert told == [100.0, 105.0, 110.0, 115.0, 120.0]

    for late_s in (1.4, 1.6, 3.0):  # 1.6 and a beat are more than the 2 s for which the native side waits
        clock.run(late_s=late_s)
        clock.run()  # on the beat again
        clock.run()
    assert late == [f"valved's loop was stuck for {late_s} s: every GPU was held meanwhile" for late_s in (1.6, 3.0)]
    beat.stop()
    assert not clock.calls


def test_a_beat_that_fails_is_never_the_last():
    clock, alive = FakeClock(), []

    def fails(text):
        raise OSError(text)

    upkeep.LoopBeat(clock, lambda: alive.append(1), lambda: None, fails)
    with pytest.raises(OSError, match="valved's loop was stuck"):
        clock.run(late_s=3.0)
    clock.run()

    assert len(alive) == 3


def test_the_service_manager_hears_that_the_loop_turns(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify = Notify()
        notify.alive()

        assert manager.recv(100) == b"WATCHDOG=1"
    notify.alive()  # gone: not worth a word
    notify.close()


@pytest.mark.parametrize(
    ("has_watch", "unwritten", "is_unsure"), [(False, [], False), (True, ["pause"], False), (True, [], True)]
)
def test_no_channel_stays_off_because_the_look_at_grants_or_at_the_gate_fails(
    monkeypatch, has_watch, unwritten, is_unsure
):
    """Nor is an order left alone that no file took, or that a slow disk did not show, where a watch tells of files."""

    def fails(**how):
        raise RuntimeError("once more")

    def settle(*, patience_over):
        settled.append(patience_over)

    settled, looked = [], []
    gating = types.SimpleNamespace(resync=fails, listener=types.SimpleNamespace(time_passed=fails))
    handover = types.SimpleNamespace(settle=settle)
    brake = types.SimpleNamespace(
        look_at_file=lambda: looked.append(1), unwritten=lambda: unwritten, is_unsure=is_unsure
    )
    monkeypatch.setattr(upkeep, "TICK_S", 0.001)

    with pytest.raises(RuntimeError):
        asyncio.run(upkeep.Upkeep(None, gating, handover, brake, OURS, Prompt(), has_watch=has_watch).run())

    assert settled == [True]
    assert looked


def test_a_run_folder_whose_disk_hangs_never_keeps_the_loop_nor_ends_valved(monkeypatch):
    """It is looked at every few seconds: it may have been removed."""
    free, asked, answers = threading.Event(), threading.Event(), [True]

    def looks():
        asked.set()
        free.wait(100)
        return answers[0]

    folder = types.SimpleNamespace(is_ours=looks)
    care = upkeep.Upkeep(None, None, None, None, folder, Prompt(), has_watch=True)
    assert not care.is_lost()
    assert not care.is_lost()
    assert asked.wait(100)

    answers[0] = False
    monkeypatch.setattr(helpers, "PATIENCE_S", 100.0)
    free.set()
    assert care._files._last.wait(100)
    assert care.is_lost()


END = """
import asyncio, pathlib, types
from valved import logs
from valved.node.upkeep import Upkeep
logs.set_up("info", pathlib.Path("valved.log"))
gate = types.SimpleNamespace(is_turning=lambda: False)
leaving = types.SimpleNamespace(owes_signals=lambda: False)
go = lambda: print("let go", flush=True)
ladder = types.SimpleNamespace(to_end=set, let_all_go=go)
brake = types.SimpleNamespace(hand_over=lambda: None, leaving=leaving, ladder=ladder)
asyncio.run(Upkeep(gate, None, None, brake, None, None, has_watch=True)._end_unreachable())
"""


def test_a_daemon_that_nobody_finds_any_more_never_ends_without_its_last_word(tmp_path):
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", END], cwd=tmp_path, capture_output=True, text=True, check=False)

        assert done.returncode != 0
        assert "the run folder was removed" in done.stderr
        assert done.stdout == "let go\n"  # no frozen process stands for ever: the file that names it is gone


def read_for(monkeypatch, memory, guard):
    """Readings of the cards in three beats."""
    readings, beats = [], iter(range(3))

    async def beat(_):
        if next(beats, None) is None:
            raise EOFError

    async def read():
        readings.append(1)
        return {}

    monkeypatch.setattr(upkeep, "beat_of", beat)
    with pytest.raises((EOFError, OSError)):
        asyncio.run(upkeep.read_cards(memory, guard, read))
    return len(readings)


def test_no_card_is_asked_twice_in_a_beat_because_two_want_to_know(monkeypatch):
    seen, looked = [], []
    memory = types.SimpleNamespace(is_in_use=True, see_cards=seen.append)
    guard = types.SimpleNamespace(needs_cards=lambda beat: True, look=looked.append)

    assert read_for(monkeypatch, memory, guard) == 4
    assert (len(seen), len(looked)) == (4, 4)
    assert read_for(monkeypatch, None, types.SimpleNamespace(needs_cards=lambda beat: False)) == 0


def test_memory_is_never_left_without_figures_because_the_guard_fails(monkeypatch):
    def fail(_):
        raise OSError("no descriptor left")

    seen = []
    memory = types.SimpleNamespace(is_in_use=True, see_cards=seen.append)

    read_for(monkeypatch, memory, types.SimpleNamespace(needs_cards=lambda beat: True, look=fail))

    assert seen == [{}]


def test_valved_never_names_another_version_than_the_one_that_is_installed(tmp_path, monkeypatch):
    assert daemon._version() == version("valve")
    monkeypatch.setattr(daemon, "__file__", str(tmp_path / "valved" / "daemon.py"))  # as after pip install -e
    assert daemon._version() == version("valve")


PATIENCE_S = 100.0  # ends only a hung test
PARTS = ("upkeep", "worths", "cards")
TASKS = frozenset({"create_task", "ensure_future"})


def test_no_task_beside_the_loop_is_ever_started_without_keep_going():
    """A part that is added and dies at its first error would take with it all that it does, without a word."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(daemon))) if isinstance(node, ast.Call)]
    started = [call.args[0] for call in calls if getattr(call.func, "attr", "") in TASKS]

    assert [ast.unparse(one.func) for one in started] == ["keep_going"]


def test_no_part_of_the_daemon_ends_at_its_first_error(tmp_path, monkeypatch):
    """The daemon itself, over a fake gate: each part fails until it was begun three times."""
    begun = Counter()

    async def failing(name):
        begun[name] += 1
        if begun[name] < 3:
            raise KeyError(name)
        if all(begun[one] >= 3 for one in PARTS):
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    async def no_api(*_):
        return []

    monkeypatch.setattr(upkeep, "AGAIN_S", 0.0)
    monkeypatch.setattr(daemon, "raise_fd_limit", lambda: 1024)
    monkeypatch.setattr(daemon, "_open_api", no_api)
    monkeypatch.setattr(daemon.Upkeep, "run", lambda _: failing("upkeep"))
    monkeypatch.setattr(Worths, "run", lambda _: failing("worths"))
    monkeypatch.setattr(daemon, "keep_reading", lambda *_: failing("cards"))
    read, write = os.pipe()
    gate = FakeGate(VirtualClock(), 1)
    gate.stamps_fd = lambda: read
    folder = RunFolder(tmp_path)
    folder.take(replace=False)
    try:
        running = daemon.run(Config(), folder, gate, FakeProcesses(None))
        asyncio.run(asyncio.wait_for(running, PATIENCE_S))
    finally:
        folder.release()
        os.close(read)
        os.close(write)

    assert begun == dict.fromkeys(PARTS, 3)


def test_a_run_folder_that_gave_way_to_a_file_is_never_taken_for_one_that_is_there(tmp_path):
    """The look raised, and with it ended whatever valved does every few seconds, for ever."""
    folder = RunFolder(tmp_path / "run")
    care = upkeep.Upkeep(None, None, None, None, folder, Prompt(), has_watch=True)
    (tmp_path / "run").rename(tmp_path / "aside")
    (tmp_path / "run").touch()

    assert care.is_lost()
