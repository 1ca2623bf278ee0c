"""Two small programs over the driver API, for tests that need a real process on the node.

node_workload.py offline PAGE [PERIOD_US]    one endless heartbeat kernel; PAGE is a file of two words: beats, last ns
node_workload.py online                      obeys lines on stdin: `launch US`, `quit`; answers one line each
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import time

from cuda_driver import Cuda


def offline(page: str, period_us: int) -> None:
    fd = os.open(page, os.O_RDWR)
    shared = mmap.mmap(fd, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    cuda = Cuda().start()
    cuda.launch(cuda.kernel("emu_heartbeat"), address, period_us, 0)
    print("running", flush=True)
    signal.pause()


def online() -> None:
    cuda = Cuda(int(os.environ.get("WORKLOAD_DEVICE", "0"))).start()
    spin = cuda.kernel("emu_spin")
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
