"""The clock that the shim takes for valved's."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
from fake_daemon import OFFLINE, ONLINE


@pytest.mark.parametrize("role", [ONLINE, OFFLINE], ids=["online", "offline"])
def test_a_welcome_that_is_read_late_never_moves_the_clock_of_a_process(world, role):
    """Its time lies between the question and the answer then, however long the process stood still in between."""
    daemon = world.daemon(role)

    def greet(client, hello):
        puppet.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, puppet.process.pid, os.WSTOPPED)
        daemon.welcome(client, hello)
        time.sleep(0.1)  # by so much would its clock be behind
        client.goes_on_ns = time.monotonic_ns()
        puppet.process.send_signal(signal.SIGCONT)
        return True

    daemon.on_hello = greet
    puppet = world.puppet(role="online" if role == ONLINE else "offline")
    puppet.open("/dev/nvidiactl")
    first = daemon.client()
    first.link.shutdown(socket.SHUT_RDWR)
    for client in (first, daemon.client()):  # and when it is back
        assert client.goes_on_ns < client.region.launch_ns < time.monotonic_ns()  # when it took the region
