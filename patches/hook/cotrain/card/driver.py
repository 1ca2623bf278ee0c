"""The CUDA driver through ctypes: the calls that the card lane makes, every answer checked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from typing import Any

NOT_READY = 600
SM_RESOURCE, OWN_STREAM, NON_BLOCKING, TIMED = 1, 1, 1, 0


class SmResource(ctypes.Structure):
    """CUdevResource: what lies between type and count is the driver's own."""

    _fields_ = (("type", c_int), ("inside", c_ubyte * 92), ("sms", c_uint), ("rest", c_ubyte * 44))


CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuDeviceGetDevResource": (c_int, POINTER(SmResource), c_int),
    "cuDevSmResourceSplitByCount": (
        *(POINTER(SmResource), POINTER(c_uint), POINTER(SmResource), POINTER(SmResource)),
        *(c_uint, c_uint),
    ),
    "cuDevResourceGenerateDesc": (POINTER(c_void_p), POINTER(SmResource), c_uint),
    "cuGreenCtxCreate": (POINTER(c_void_p), c_void_p, c_int, c_uint),
    "cuGreenCtxDestroy": (c_void_p,),
    "cuCtxFromGreenCtx": (POINTER(c_void_p), c_void_p),
    "cuGreenCtxStreamCreate": (POINTER(c_void_p), c_void_p, c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
}


class CardRefused(Exception):
    """Why tiles do not run, or run no more, on this card."""


class CardDriver:
    """One process's driver. `library` has the entry points of libcuda.so.1."""

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        except OSError as error:
            raise CardRefused(f"there is no CUDA driver here: {error}") from None
        missing = [name for name in CALLS if not hasattr(self._library, name)]
        if missing:
            raise CardRefused(f"this driver has no green contexts: {missing[0]} is missing, 12.5 or later is needed")
        for name, parameters in CALLS.items():
            getattr(self._library, name).argtypes = parameters
        self._library.cuGetErrorName.argtypes = (c_int, POINTER(c_char_p))

    def code(self, name: str, *arguments: Any) -> int:
        return int(getattr(self._library, name)(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        if code := self.code(name, *arguments):
            raise CardRefused(f"{name}: {self._name(code)}")

    def _name(self, code: int) -> str:
        text = c_char_p()
        self._library.cuGetErrorName(code, byref(text))
        return f"{(text.value or b'unknown').decode()} ({code})"

    def made(self, name: str, *arguments: Any) -> int:
        """The handle that a call writes through its first parameter."""
        out = c_void_p()
        self.call(name, byref(out), *arguments)
        if not out.value:
            raise CardRefused(f"{name} succeeded and returned nothing")
        return out.value

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """That context is the thread's own inside."""
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def least_priority(self) -> int:
        least = c_int()
        self.call("cuCtxGetStreamPriorityRange", byref(least), None)
        return least.value

    def processors(self, device: int) -> SmResource:
        out = SmResource()
        self.call("cuDeviceGetDevResource", device, byref(out), SM_RESOURCE)
        return out

    def part(self, whole: SmResource, least: int) -> SmResource:
        """One part of at least so many processors, as the card can split them."""
        out, groups = SmResource(), c_uint(1)
        self.call("cuDevSmResourceSplitByCount", byref(out), byref(groups), byref(whole), None, 0, least)
        if not groups.value:
            raise CardRefused(f"cuDevSmResourceSplitByCount: no part has {least} processors")
        return out

    def is_done(self, event: int) -> bool:
        code = self.code("cuEventQuery", event)
        if code not in (0, NOT_READY):
            raise CardRefused(f"cuEventQuery: {self._name(code)}")
        return code == 0

    def elapsed_ms(self, first: int, last: int) -> float:
        out = c_float()
        self.call("cuEventElapsedTime", byref(out), first, last)
        return out.value

    def free_bytes(self) -> int:
        free, whole = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(whole))
        return free.value
