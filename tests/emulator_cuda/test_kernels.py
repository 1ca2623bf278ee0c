"""Kernels the emulator runs, kernels of one's own, and kernels nobody knows."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from ctypes import byref, c_char_p, c_int, c_uint64, c_void_p
from pathlib import Path

from cuda_driver import INVALID_VALUE, NOT_FOUND, Cuda
from emulated import on_gpu

INVALID_IMAGE = 200
INCLUDE = Path(__file__).resolve().parents[2] / "tools" / "emulator" / "cuda" / "kernels"
PTX = b"""//
.version 8.0
.target sm_90
.address_size 64
.visible .entry scale_all(.param .u64 a, .param .f32 b) { ret; }
"""
NATIVE = """
#include "native.h"
struct args { uint64_t sum; uint32_t from, to; };
static int step(const void *raw, uint64_t number)
{
    const struct args *a = raw;
    *(uint64_t *)(uintptr_t)a->sum += a->from + number;
    return a->from + number + 1 < a->to;
}
__attribute__((visibility("default"))) const struct emu_native emu_native_add_range = {1, 3, {8, 4, 4}, step};
"""


def load(cuda: Cuda, image: bytes) -> c_void_p:
    module = c_void_p()
    cuda.cuModuleLoadData(byref(module), c_char_p(image))
    return module


@on_gpu()
def test_a_kernel_the_emulator_does_not_know_is_a_timed_no_op_and_is_counted(cuda: Cuda) -> None:
    cuda.start()
    before = ctypes.c_uint64.in_dll(cuda.library, "valve_emu_unknown_kernels").value
    kernel = cuda.kernel("scale_all", PTX)
    cuda.launch(kernel, 0, 0)
    cuda.cuCtxSynchronize()

    assert ctypes.c_uint64.in_dll(cuda.library, "valve_emu_unknown_kernels").value == before + 1
    assert sum(c.launches for c in cuda.channels()) == 1


@on_gpu()
def test_names_and_images_that_are_not_there_are_refused(cuda: Cuda) -> None:
    cuda.start()
    out = c_void_p()

    assert cuda.call("cuModuleLoadData", byref(out), c_char_p(b"no image at all")) == INVALID_IMAGE
    assert cuda.call("cuModuleGetFunction", byref(out), load(cuda, PTX), c_char_p(b"scale")) == NOT_FOUND
    assert cuda.call("cuModuleGetFunction", byref(out), load(cuda, PTX), c_char_p(b"emu_spin")) == NOT_FOUND
    assert cuda.call("cuModuleGetFunction", byref(out), load(cuda, b"// valve-emu"), c_char_p(b"emu_no")) == NOT_FOUND


@on_gpu()
def test_an_unloaded_module_takes_its_functions_along(cuda: Cuda) -> None:
    cuda.start()
    module, kernel = load(cuda, PTX), c_void_p()
    cuda.cuModuleGetFunction(byref(kernel), module, c_char_p(b"scale_all"))
    cuda.cuModuleUnload(module)

    assert cuda.try_launch(kernel) == 400
    assert cuda.call("cuModuleUnload", module) == 400


@on_gpu()
def test_a_kernel_of_ones_own_runs_step_by_step_on_the_gpu(cuda: Cuda) -> None:
    """Given a shared object with a kernel of three parameters, when it is launched, then its steps add up 10..19."""
    cuda.start()
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "own.c"), Path(folder, "own.so")
        source.write_text(NATIVE)
        subprocess.run(["cc", "-shared", "-fPIC", f"-I{INCLUDE}", "-o", binary, source], check=True)
        kernel = cuda.kernel("add_range", b"// valve-emu\n// native " + bytes(binary) + b"\n")
        sum_at = cuda.pinned(8)
        values = [c_uint64(sum_at), ctypes.c_uint32(10), ctypes.c_uint32(20)]
        pointers = (c_void_p * 3)(*[ctypes.addressof(value) for value in values])
        cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, pointers, 0)
        cuda.cuCtxSynchronize()

    assert c_uint64.from_address(sum_at).value == sum(range(10, 20))


@on_gpu()
def test_parameters_may_come_packed_in_a_buffer(cuda: Cuda) -> None:
    cuda.start()
    address, size = cuda.alloc(4096), ctypes.c_size_t(24)
    packed = (c_uint64 * 3)(address, 8, 99)
    extra = (c_void_p * 5)(1, ctypes.addressof(packed), 2, ctypes.addressof(size), 0)
    cuda.cuLaunchKernel(cuda.kernel("emu_fill"), 1, 1, 1, 1, 1, 1, 0, 0, 0, extra)

    assert cuda.read(address, 1) == b"\x63"


@on_gpu()
def test_launches_with_impossible_shapes_are_refused(cuda: Cuda) -> None:
    cuda.start()
    spin, one = cuda.kernel("emu_spin"), c_uint64(1)
    params = (c_void_p * 1)(ctypes.addressof(one))

    assert cuda.call("cuLaunchKernel", spin, 0, 1, 1, 1, 1, 1, 0, 0, params, 0) == INVALID_VALUE
    assert cuda.call("cuLaunchKernel", spin, 1, 1, 1, 1025, 1, 1, 0, 0, params, 0) == INVALID_VALUE
    assert cuda.call("cuLaunchKernel", spin, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0) == INVALID_VALUE


@on_gpu()
def test_the_three_forms_of_a_launch_do_the_same(cuda: Cuda) -> None:
    class Config(ctypes.Structure):
        _fields_ = [("shape", ctypes.c_uint32 * 7), ("stream", c_void_p), ("attrs", c_void_p), ("count", c_int)]

    cuda.start()
    stream, spin, one = cuda.stream(), cuda.kernel("emu_spin"), c_uint64(1)
    params = (c_void_p * 1)(ctypes.addressof(one))
    shape = (ctypes.c_uint32 * 7)(1, 1, 1, 1, 1, 1, 0)
    cuda.cuLaunchKernelEx(byref(Config(shape, stream)), spin, params, 0)
    cuda.cuLaunchKernelEx_ptsz(byref(Config(shape)), spin, params, 0)
    cuda.cuLaunchCooperativeKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, params)
    cuda.launch(spin, 1, stream=stream)
    cuda.cuCtxSynchronize()

    assert sum(c.launches for c in cuda.channels()) == 4
