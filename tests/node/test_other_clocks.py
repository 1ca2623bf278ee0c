"""A process whose clock is not valved's: a time namespace, or a preload that makes up the time."""

from __future__ import annotations

import signal
import subprocess

import pytest
from node_rig import Offline, Online, service

CLOCK = """
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
	int result = (int)syscall(SYS_clock_gettime, clock, now);
	now->tv_sec += SHIFT;
	return result;
}
"""


@pytest.mark.parametrize("shift_s", [86_400, -1_000], ids=["ahead", "behind"])
def test_a_process_with_another_clock_never_loses_its_turn_nor_runs_past_its_lease(make_node, tmp_path, shift_s):
    """It would take each valved for dead at once, or never."""
    node = make_node(start=False)
    node.config = "lease_ms = 60000.0\n"  # no slow machine ends that one
    node.start_valved()
    prefix = (str(other_clock(tmp_path, shift_s)),)
    offline = Offline(node, "batch", prefix=prefix)
    offline.wait_running()
    online = Online(node, "chat", prefix=prefix)
    online.wait_ready()
    links = node.wait_for(lambda: linked(node), "both are linked")
    for _ in range(3):
        node.wait_for(lambda: not service(node, "chat").busy, "the service lets go")
        offline.wait_running()
        online.launch(us=100)
        offline.wait_stopped()
    offline.wait_running()
    assert linked(node) == links, "nobody had to come back"

    node.stop_valved(signal.SIGKILL)
    node.config = "lease_ms = 500.0\n"
    node.start_valved()
    node.wait_for(lambda: linked(node), "both are back")
    offline.wait_running()
    node.stop_valved(signal.SIGKILL)

    offline.wait_off()  # by itself


def in_a_time_namespace(shift_s):
    """A prefix of commands."""
    prefix = ("unshare", "--time", "--boottime", str(shift_s), "--monotonic", str(shift_s))
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no time namespace can be made here")
    return prefix


@pytest.mark.parametrize("shift_s", [86_400, -60], ids=["ahead", "behind"])
def test_a_valved_with_another_clock_never_takes_a_process_for_another(make_node, shift_s):
    """The kernel shows it other start times: those of its predecessor's file, and those that a command names."""
    prefix = in_a_time_namespace(shift_s)
    node = make_node(start=False)
    node.config = "lease_ms = 60000.0\n"
    node.start_valved()
    offline, online = Offline(node, "batch"), Online(node, "chat")
    online.wait_ready()
    node.wait_for(lambda: linked(node), "both are linked")
    online.hint(1)
    online.launch(us=100)
    offline.wait_stopped()
    known = service(node, "chat").id

    node.stop_valved(signal.SIGKILL)
    node.valved_prefix = prefix
    node.start_valved()
    node.wait_for(lambda: linked(node), "both are back")
    assert service(node, "chat").id == known
    online.launch(us=100)
    offline.wait_stopped()
    online.hint(0)
    offline.wait_running()
    second = Offline(node, "second")  # by a command outside
    second.wait_running()


def linked(node):
    """The numbers of both links, once each process has told of its channels."""
    status, chat = node.status(), service(node, "chat")
    return chat and chat.gpus and status.gpus[0].channels and sorted(client.id for client in status.clients)


def other_clock(folder, shift_s):
    """A command that runs another with that clock, and with what is preloaded already."""
    source, library, command = folder / "clock.c", folder / "clock.so", folder / "with-clock"
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", f"-DSHIFT={shift_s}", source, "-o", library], check=True)
    command.write_text(f'#!/bin/sh\nexport LD_PRELOAD="$LD_PRELOAD {library}"\nexec "$@"\n')
    command.chmod(0o755)
    return command
