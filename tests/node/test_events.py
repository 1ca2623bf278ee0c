"""`valve events` and `valve explain` over a real node."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from node_rig import Offline, Online

BACKGROUND = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
FOREGROUND = BACKGROUND.replace("SIG_IGN", "SIG_DFL")  # also where this run is a background job


def told(node, *arguments):
    argv = node.valve_command(*arguments)
    return subprocess.run(argv, env=node.environment(), capture_output=True, text=True, check=True, cwd="/").stdout


def test_events_tell_what_happened_and_end(node):
    offline = Offline(node, "batch")
    offline.wait_running()
    online = Online(node, "chat")
    online.wait_ready()
    online.launch()

    node.wait_for(lambda: " gate: " in told(node, "events", "--all"), "the stop is told")
    plain = told(node, "events")

    assert "claimed" in plain
    assert " gate: " not in plain
    assert told(node, "explain", "reclaims") == "no reclaim so far\n"
    assert "chat" in told(node, "explain", "chat")


def told_of(follower, words):
    """A machine that stands still for seconds is told of as a valved that hangs, before or after it."""
    assert any(words in line for line in iter(follower.stderr.readline, "")), f"it never said: {words}"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_who_follows_events_never_misses_the_next_valved(node, how):
    argv = node.valve_command("events", "--follow", "--kind", "started", "--kind", "paused")
    follower = subprocess.Popen(
        argv, env=node.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )
    try:
        first = follower.stdout.readline()
        node.stop_valved(how)
        told_of(follower, "waiting for the next one")
        node.start_valved()
        again = follower.stdout.readline()
        told(node, "pause")
        paused = follower.stdout.readline()
        told_of(follower, "valved was started again")
    finally:
        follower.kill()
        follower.communicate()

    assert [line.split(": ")[0].split()[-1] for line in (first, again, paused)] == ["started", "started", "paused"]


def test_who_follows_events_is_never_left_waiting_in_silence_for_a_valved_that_hangs(node):
    argv = [
        sys.executable,
        "-c",
        FOREGROUND,
        *node.valve_command("events", "--follow", "--kind", "started", "--kind", "paused"),
    ]
    follower = subprocess.Popen(
        argv, env=node.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )
    try:
        follower.stdout.readline()
        node.valved.send_signal(signal.SIGSTOP)
        hangs = follower.stderr.readline()
        node.valved.send_signal(signal.SIGCONT)
        answers = follower.stderr.readline()
        told(node, "pause")
        paused = follower.stdout.readline()
        follower.send_signal(signal.SIGINT)
        code = follower.wait()
    finally:
        node.valved.send_signal(signal.SIGCONT)
        follower.kill()
        rest = follower.communicate()

    assert "does not answer: it is stuck or stopped" in hangs
    assert answers == "valve: valved answers again\n"
    assert "paused" in paused
    assert (code, "Traceback" in rest[1]) == (130, False)


@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGTERM])
def test_a_recording_goes_on_with_the_next_valved_and_ends_whole(node, ends):
    """Begun as a shell begins a background job: with the signal of Ctrl-C ignored."""
    file = node.folder / "events.jsonl"
    argv = [sys.executable, "-c", BACKGROUND, *node.valve_command("record", str(file))]
    recorder = subprocess.Popen(argv, env=node.environment(), stdout=subprocess.PIPE, text=True, cwd="/")
    try:
        node.wait_for(lambda: is_watched(node, file), "the recording has begun")
        node.stop_valved()
        node.start_valved()
        node.wait_for(lambda: '"kind":"started"' in file.read_text(), "the start of the next valved is recorded")
        recorder.send_signal(ends)
        said, _ = recorder.communicate()
    finally:
        recorder.kill()
        recorder.wait()

    assert recorder.returncode == 0
    assert "valved was started again" in said


def is_watched(node, file):
    """Something that is told to valved arrives in the recording."""
    told(node, "pause")
    told(node, "resume")
    return file.exists() and "resumed" in file.read_text()
