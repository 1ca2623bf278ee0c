"""The CUDA driver API through ctypes: what tests of the emulated libcuda call. Every integer travels as 64 bits, which
x86-64 and arm64 callers may do. Failed calls raise CudaError with the result's name."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

from valve_tools.emulator.client import Emulator, RunlistChannel

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 0, 1, 2, 3
NOT_FOUND, NOT_READY, ILLEGAL_ADDRESS = 500, 600, 700
PER_THREAD = 2
DEADLINE_S = 200.0  # only ends a hung test


class CudaError(Exception):
    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.code = code


class Cuda:
    """The library, one context on one device, and the calls that most tests make."""

    def __init__(self, device: int = 0) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.emulator = Emulator(os.environ["VALVE_EMU_DIR"])
        self.device = device
        self._module: c_void_p | None = None
        self.context: c_void_p | None = None

    def call(self, name: str, *arguments: Any) -> int:
        """The result code as it is."""
        wide = [c_uint64(a & (1 << 64) - 1) if isinstance(a, int) else a for a in arguments]
        return int(getattr(self.library, name)(*wide))

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def checked(*arguments: Any) -> None:
            code = self.call(name, *arguments)
            if code:
                raise CudaError(name, code, self.error_name(code))

        return checked

    def error_name(self, code: int) -> str:
        text = c_char_p()
        self.library.cuGetErrorName(c_int(code), byref(text))
        return (text.value or b"?").decode()

    def start(self) -> Cuda:
        """cuInit, and the primary context current."""
        self.cuInit(0)
        self.context = c_void_p()
        self.cuDevicePrimaryCtxRetain(byref(self.context), self.device)
        self.cuCtxSetCurrent(self.context)
        return self

    def value(self, name: str, *arguments: Any, kind: Any = c_uint64) -> int:
        """The number a call writes through its first parameter."""
        out = kind()
        getattr(self, name)(byref(out), *arguments)
        return out.value or 0

    def kernel(self, name: str, image: bytes = b"// valve-emu\n") -> c_void_p:
        if self._module is None or image != b"// valve-emu\n":
            self._module = c_void_p()
            self.cuModuleLoadData(byref(self._module), c_char_p(image))
        function = c_void_p()
        self.cuModuleGetFunction(byref(function), self._module, c_char_p(name.encode()))
        return function

    def try_launch(self, kernel: c_void_p, *arguments: int, stream: int = 0, entry: str = "cuLaunchKernel") -> int:
        values = [c_uint64(argument) for argument in arguments]
        pointers = (c_void_p * max(1, len(values)))(*[ctypes.addressof(value) for value in values])
        return self.call(entry, kernel, 1, 1, 1, 32, 1, 1, 0, stream, pointers, 0)

    def launch(self, kernel: c_void_p, *arguments: int, stream: int = 0) -> None:
        code = self.try_launch(kernel, *arguments, stream=stream)
        if code:
            raise CudaError("cuLaunchKernel", code, self.error_name(code))

    def alloc(self, size: int) -> int:
        return self.value("cuMemAlloc_v2", size)

    def pinned(self, size: int) -> int:
        return self.value("cuMemHostAlloc", size, 0, kind=c_void_p)

    def stream(self, flags: int = 1) -> int:
        return self.value("cuStreamCreate", flags, kind=c_void_p)

    def event(self, flags: int = 0) -> int:
        return self.value("cuEventCreate", flags, kind=c_void_p)

    def elapsed_ms(self, start: int, end: int) -> float:
        out = c_float()
        self.cuEventElapsedTime_v2(byref(out), start, end)
        return out.value

    def read(self, address: int, size: int) -> bytes:
        """Copy from the device."""
        buffer = ctypes.create_string_buffer(size)
        self.cuMemcpyDtoH_v2(buffer, address, size)
        return buffer.raw

    def write(self, address: int, data: bytes) -> None:
        self.cuMemcpyHtoD_v2(address, c_char_p(data), len(data))

    def channels(self) -> tuple[RunlistChannel, ...]:
        return self.emulator.state().of(os.getpid())

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self.cuMemGetInfo_v2(byref(free), byref(total))
        return free.value


def word(address: int, index: int = 0) -> int:
    """A 64-bit word of host (or emulated device) memory, read as it stands."""
    return c_uint64.from_address(address + 8 * index).value


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.001)
