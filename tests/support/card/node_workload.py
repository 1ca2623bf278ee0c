"""Two small programs over the driver API, for tests that need a real process on the node.

node_workload.py offline PAGE [PERIOD_US]    one endless heartbeat kernel; PAGE is a file of two words: beats, last ns
                                             SIGUSR1: it closes its own link to valved; SIGUSR2: it forks a
                                             child that stays, with its files
node_workload.py online                      obeys lines on stdin: `launch US`, `hint OPEN` (by the shim's function),
                                             `tell OPEN` (by the engines' hook), `quit`; answers one line each

WORKLOAD_PAST=LIBRARY: CUDA comes with that library, and its calls of the driver pass the shim by.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import time

from cuda_driver import Cuda

SYS_CLOSE = 3  # x86-64
OWN_FDS = 900  # the shim's own lie above: HIGH of ownfd.c


def cuda_of(device: int = 0) -> Cuda:
    if past := os.environ.get("WORKLOAD_PAST"):
        ctypes.CDLL(None).open(b"/dev/nvidiactl", os.O_RDWR)  # it registers all the same
        ctypes.CDLL(past, mode=os.RTLD_DEEPBIND | os.RTLD_NOW)
    return Cuda(device).start()


def offline(page: str, period_us: int) -> None:
    fd = os.open(page, os.O_RDWR)
    shared = mmap.mmap(fd, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    cuda = cuda_of()
    cuda.launch(cuda.kernel("emu_heartbeat"), address, period_us, 0)
    signal.signal(signal.SIGUSR1, lambda number, frame: close_link())
    signal.signal(signal.SIGUSR2, lambda number, frame: leave_an_heir())
    print("running", flush=True)
    while True:
        time.sleep(0.01)  # no pause: a signal that comes just before it is never heard


def leave_an_heir() -> None:
    if os.fork() == 0:
        while True:
            signal.pause()


def close_link() -> None:
    """As any code may that passes the shim by: its hook of close() spares the shim's own numbers."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) >= OWN_FDS and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                ctypes.CDLL(None).syscall(SYS_CLOSE, int(name))


class Requests:
    """As the hook of an engine tells them, over a link of its own."""

    def __init__(self) -> None:
        self.open = self.ended = 0

    def tell(self, now_open: int) -> None:
        from valve_hook.link import process_link

        link = process_link()
        while link.lifecycle.page is None:
            time.sleep(0.001)
        self.ended += max(0, self.open - now_open)
        self.open = now_open
        link.lifecycle.tell(now_open, self.ended, 0)


def online() -> None:
    cuda = cuda_of(int(os.environ.get("WORKLOAD_DEVICE", "0")))
    spin, requests = cuda.kernel("emu_spin"), Requests()
    cuda.cuCtxSynchronize()
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *arguments = line.split()
        if verb == "quit":
            cuda.cuDevicePrimaryCtxReset_v2(cuda.device)
            break
        if verb == "hint":
            ctypes.CDLL(None).valve_hint_open_requests(int(arguments[0]))
            print("hinted", flush=True)
            continue
        if verb == "tell":
            requests.tell(int(arguments[0]))
            print("hinted", flush=True)
            continue
        before_ns = time.monotonic_ns()
        cuda.launch(spin, int(arguments[0]))
        launched_ns = time.monotonic_ns()
        if verb == "launch":
            cuda.cuCtxSynchronize()
        print(before_ns, launched_ns, time.monotonic_ns(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "offline":
        offline(sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 100)
    else:
        online()
