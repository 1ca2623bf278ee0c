"""A process that clears memory on its way between two tenants: what it cannot do (docs/tenancy.md)."""

from __future__ import annotations

import os
import subprocess
import sys

from cuda_driver import Cuda
from cuda_memory import PAGE, allow, create, reserve
from emulated import on_gpu

PROGRAM = """
import sys
from cuda_driver import Cuda
from cuda_memory import PAGE, allow, reserve
cuda = Cuda().start()
handle = cuda.value("cuMemImportFromShareableHandle", {fd}, 1)
address = reserve(cuda, PAGE)
cuda.cuMemMap(address, PAGE, 0, handle, 0)
assert allow(cuda, address, PAGE) == 0
{then}
"""
CLEAR = "cuda.cuMemsetD8_v2(address, 0, PAGE); cuda.cuCtxSynchronize(); assert cuda.read(address, 6) == bytes(6)"
SHOW = "sys.stdout.write(cuda.read(address, 6).decode())"


def other(fd: int, then: str) -> str:
    program = PROGRAM.format(fd=fd, then=then)
    done = subprocess.run([sys.executable, "-c", program], pass_fds=[fd], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


@on_gpu()
def test_memory_that_was_cleared_is_never_taken_for_another_tenants_while_its_old_owner_has_it_mapped(
    cuda: Cuda,
) -> None:
    """So a handle never leaves its trust domain, whoever clears it."""
    cuda.start()
    address, handle = reserve(cuda, PAGE), create(cuda)
    cuda.cuMemMap(address, PAGE, 0, handle, 0)
    assert allow(cuda, address, PAGE) == 0
    cuda.write(address, b"secret")
    fd = cuda.value("cuMemExportToShareableHandle", handle, 1, 0)

    other(fd, CLEAR)
    assert cuda.read(address, 6) == bytes(6)
    cuda.write(address, b"forged")  # by a mapping that it was told to give up

    assert other(fd, SHOW) == "forged"
    os.close(fd)
