"""The emulated card for programs that compute on the CPU: device memory as arrays, stretches of the program as kernels.

    device = Device()
    cache = numpy.frombuffer(device.array(64 << 20), dtype=numpy.float32)  # or torch.frombuffer
    with device.step():
        model(cache)  # stops in the middle while gated

Every call goes through `libcuda.so.1` as the process finds it, so whatever is preloaded in front of it sees a launch
per step and an allocation per array. Memory is what is mapped at its address: remapping shows, a hole ends the
process. cuda/kernels/step.h says what must not happen while a step is parked."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_void_p

NON_BLOCKING = 1  # a stream that does not wait for the default one


class DeviceError(Exception):
    """A call of the driver failed."""


class Device:
    """One card, by its primary context."""

    def __init__(self, ordinal: int = 0) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._launch = ctypes.cast(self._cuda.cuLaunchKernel, c_void_p)
        self._context = c_void_p()
        self._threads = threading.local()
        self._timer, self._beside = c_void_p(), c_void_p()  # a kernel that only lasts, and a stream for it
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), c_int(ordinal))

    def _call(self, name: str, *arguments: object) -> None:
        code = int(getattr(self._cuda, name)(*arguments))
        if code:
            text = c_char_p()
            self._cuda.cuGetErrorName(c_int(code), byref(text))
            raise DeviceError(f"{name}: {(text.value or b'error').decode()} ({code})")

    def use(self) -> None:
        """Make the card current on this thread; every method does."""
        if not getattr(self._threads, "is_current", False):
            self._call("cuCtxSetCurrent", self._context)
            self._threads.is_current = True

    def array(self, nbytes: int) -> memoryview:
        """Device memory as writable bytes at the device address; it lives until `free`."""
        self.use()
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
        return view(address.value, nbytes)

    def free(self, array: memoryview) -> None:
        """Give the memory of an array back; nothing may look at it any more."""
        self.use()
        self._call("cuMemFree_v2", c_uint64(address_of(array)))

    @contextmanager
    def step(self, least_us: int = 0) -> Iterator[None]:
        """The block is one kernel: this thread and its OpenMP threads run it, while the card lets them. It takes
        `least_us` of the card's time where the processor is done sooner: as long as a card would for a larger model.
        """
        self.use()
        if least_us:
            self._occupy(least_us)
        self._call("valve_emu_step_begin", self._launch)
        try:
            yield
        finally:
            self._call("valve_emu_step_end")
            if least_us:  # out of the step: its threads must not be stopped inside the driver
                self._call("cuStreamSynchronize", self._beside)

    def spin(self, us: int) -> None:
        """A kernel that only lasts, and its end."""
        self.use()
        self._occupy(us)
        self._call("cuStreamSynchronize", self._beside)

    def _occupy(self, us: int) -> None:
        """Beside what is launched next, on a channel of its own: both run, and are stopped, together."""
        if not self._beside:
            module = c_void_p()
            self._call("cuModuleLoadData", byref(module), c_char_p(b"// valve-emu\n"))
            self._call("cuModuleGetFunction", byref(self._timer), module, c_char_p(b"emu_spin"))
            self._call("cuStreamCreate", byref(self._beside), c_int(NON_BLOCKING))
        value = c_uint64(us)
        arguments = (c_void_p * 1)(ctypes.addressof(value))
        grid = [c_int(1)] * 6
        self._call("cuLaunchKernel", self._timer, *grid, c_int(0), self._beside, arguments, c_void_p())

    def synchronize(self) -> None:
        self.use()
        self._call("cuCtxSynchronize")


def view(address: int, nbytes: int) -> memoryview:
    """Bytes at an address of the device, for memory that was mapped by other means."""
    return memoryview((c_ubyte * nbytes).from_address(address)).cast("B")


def address_of(array: memoryview) -> int:
    return ctypes.addressof(c_ubyte.from_buffer(array))
