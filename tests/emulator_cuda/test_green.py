"""Green contexts: processors as an H100 splits them, streams of their own, and who holds the primary context."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_uint, c_void_p

import pytest
from cuda_driver import INVALID_VALUE, Cuda, CudaError
from emulated import on_gpu

SM, NON_BLOCKING, DEFAULT_STREAM = 1, 1, 1
INVALID_CONTEXT, INVALID_TYPE, INVALID_CONFIGURATION = 201, 914, 915


class Resource(ctypes.Structure):
    _fields_ = (("type", c_int), ("inside", ctypes.c_ubyte * 92), ("sms", c_uint), ("rest", ctypes.c_ubyte * 44))


def whole(cuda: Cuda) -> Resource:
    out = Resource()
    cuda.cuDeviceGetDevResource(0, byref(out), SM)
    return out


def split(cuda: Cuda, groups: int, least: int, flags: int = 0) -> tuple[list[int], int]:
    """(processors of each group, of what remains)."""
    parts, rest, count = (Resource * groups)(), Resource(), c_uint(groups)
    cuda.cuDevSmResourceSplitByCount(parts, byref(count), byref(whole(cuda)), byref(rest), flags, least)
    return [part.sms for part in parts[: count.value]], rest.sms


def green_of(cuda: Cuda, least: int) -> c_void_p:
    part, count, desc, green = Resource(), c_uint(1), c_void_p(), c_void_p()
    cuda.cuDevSmResourceSplitByCount(byref(part), byref(count), byref(whole(cuda)), 0, 0, least)
    cuda.cuDevResourceGenerateDesc(byref(desc), byref(part), 1)
    cuda.cuGreenCtxCreate(byref(green), desc, 0, DEFAULT_STREAM)
    return green


@on_gpu()
def test_a_split_gives_groups_of_eight_and_says_what_remains(cuda: Cuda) -> None:
    cuda.start()
    counted = c_uint(99)
    cuda.cuDevSmResourceSplitByCount(0, byref(counted), byref(whole(cuda)), 0, 0, 1)

    assert whole(cuda).sms == 132
    assert split(cuda, 1, 33) == ([40], 92)
    assert split(cuda, 20, 8) == ([8] * 16, 4)
    assert split(cuda, 1, 33, flags=1) == ([34], 98)
    assert counted.value == 16


@on_gpu()
def test_what_cannot_be_split_is_refused_by_its_own_name(cuda: Cuda) -> None:
    cuda.start()
    out, count, desc, green = Resource(), c_uint(1), c_void_p(), c_void_p()

    assert cuda.call("cuDeviceGetDevResource", 0, byref(out), 2) == INVALID_TYPE
    assert cuda.call("cuDeviceGetDevResource", 7, byref(out), SM) == 101
    assert (
        cuda.call("cuDevSmResourceSplitByCount", byref(out), byref(count), byref(whole(cuda)), 0, 0, 133)
        == INVALID_CONFIGURATION
    )
    assert (
        cuda.call("cuDevSmResourceSplitByCount", byref(out), byref(count), byref(Resource()), 0, 0, 8) == INVALID_TYPE
    )
    assert cuda.call("cuDevResourceGenerateDesc", byref(desc), byref(Resource()), 1) == INVALID_TYPE
    assert cuda.call("cuDevResourceGenerateDesc", byref(desc), byref(whole(cuda)), 0) == INVALID_VALUE
    assert cuda.call("cuGreenCtxCreate", byref(green), 0, 0, DEFAULT_STREAM) == INVALID_VALUE
    cuda.cuDevResourceGenerateDesc(byref(desc), byref(whole(cuda)), 1)
    assert cuda.call("cuGreenCtxCreate", byref(green), desc, 0, 0) == INVALID_VALUE
    assert cuda.call("cuGreenCtxDestroy", 0) == INVALID_CONTEXT


@on_gpu()
def test_a_stream_of_a_green_context_does_work_and_says_whose_it_is(cuda: Cuda) -> None:
    cuda.start()
    green, stream, context, owner = green_of(cuda, 33), c_void_p(), c_void_p(1), c_void_p()
    cuda.cuGreenCtxStreamCreate(byref(stream), green, NON_BLOCKING, 7)
    cuda.cuStreamGetCtx_v2(stream, byref(context), byref(owner))
    priority, sms = c_int(-1), Resource()
    cuda.cuStreamGetPriority(stream, byref(priority))
    cuda.cuGreenCtxGetDevResource(green, byref(sms), SM)
    address, event = cuda.alloc(4096), cuda.event()
    cuda.launch(cuda.kernel("emu_fill"), address, 4096, 5, stream=stream.value or 0)
    cuda.cuEventRecord(event, stream)
    cuda.cuEventSynchronize(event)

    assert (context.value, owner.value) == (None, green.value)
    assert (priority.value, sms.sms) == (0, 40)
    assert cuda.read(address, 8) == b"\5" + bytes(7)
    assert cuda.call("cuGreenCtxStreamCreate", byref(stream), green, 0, 0) == INVALID_VALUE


@on_gpu()
def test_a_stream_of_the_primary_context_never_names_a_green_one(cuda: Cuda) -> None:
    cuda.start()
    context, owner, plain = c_void_p(), c_void_p(1), cuda.stream()
    cuda.cuStreamGetCtx_v2(plain, byref(context), byref(owner))

    assert context.value == cuda.context.value
    assert owner.value is None


@on_gpu()
def test_a_green_context_holds_the_primary_one_until_it_is_destroyed_once(cuda: Cuda) -> None:
    cuda.start()
    green, inner, active = green_of(cuda, 8), c_void_p(), c_int()
    cuda.cuCtxFromGreenCtx(byref(inner), green)
    cuda.cuDevicePrimaryCtxRelease_v2(0)
    cuda.cuDevicePrimaryCtxGetState(0, byref(c_uint()), byref(active))
    held = active.value
    cuda.cuCtxSetCurrent(0)
    cuda.cuGreenCtxDestroy(green)
    cuda.cuDevicePrimaryCtxGetState(0, byref(c_uint()), byref(active))

    assert inner.value == cuda.context.value
    assert (held, active.value) == (1, 0)


@on_gpu()
def test_a_green_context_whose_primary_was_reset_is_refused_and_never_read(cuda: Cuda) -> None:
    cuda.start()
    green, stream = green_of(cuda, 8), c_void_p()
    cuda.cuCtxSetCurrent(0)
    cuda.cuDevicePrimaryCtxReset_v2(0)

    assert cuda.call("cuGreenCtxStreamCreate", byref(stream), green, NON_BLOCKING, 0) == INVALID_CONTEXT
    assert cuda.call("cuCtxFromGreenCtx", byref(stream), green) == INVALID_CONTEXT


@on_gpu()
def test_a_dead_context_makes_no_green_stream(cuda: Cuda) -> None:
    cuda.start()
    green, stream = green_of(cuda, 8), c_void_p()
    cuda.launch(cuda.kernel("emu_fill"), 0xDEAD0000, 4096, 1)
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        cuda.cuCtxSynchronize()

    assert cuda.call("cuGreenCtxStreamCreate", byref(stream), green, NON_BLOCKING, 0) == 700
