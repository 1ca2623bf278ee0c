"""The memory under test of torch_bracket.py: a cache in the shim's bracket, and a CUDA graph that reads all of it.

`BracketMemory` is stock PyTorch with one of its allocators. `DriverMemory` makes the driver calls torch would make,
for the emulated GPU, on which PyTorch has no CUDA. Words are 32 bits; every page of 4096 bytes is read in full.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray
from valve_hook.shim import kv_ranges, shim_call
from valve_hook.torch_pool import own_pool
from valve_hook.wire import KV_ELASTIC

PAGE = 4096
Pages = NDArray[np.int64]
"""(blocks, pages of a block, 2): the least and the largest word of each page."""


@contextlib.contextmanager
def bracket(stack_up: Any) -> Any:
    """As the hooks place a cache; yields whether the allocation stands in the shim's bracket."""
    begin, end = shim_call("valve_kv_begin"), shim_call("valve_kv_end")
    with contextlib.ExitStack() as stack:
        is_within = begin is not None and end is not None and stack_up(stack)
        if is_within:
            begin(ctypes.c_uint32(KV_ELASTIC))  # type: ignore[misc]
            stack.callback(end)  # type: ignore[arg-type]
        yield is_within


class BracketMemory:
    def __init__(self, blocks: int, block_bytes: int) -> None:
        import torch

        self.torch = torch
        torch.cuda.init()
        before = kv_ranges() or 0
        with bracket(lambda stack: own_pool(torch, stack)):
            self.cache = torch.zeros((blocks, block_bytes // PAGE, PAGE // 4), dtype=torch.int32, device="cuda")
        self.is_valves = (kv_ranges() or 0) > before
        self.base = int(self.cache.data_ptr())
        self._capture()

    def _capture(self) -> None:
        torch = self.torch
        shape = (*self.cache.shape[:2], 2)
        self.found = torch.zeros(shape, dtype=torch.int32, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self._look()  # warms up what a capture may not make
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._look()

    def _look(self) -> None:
        self.found[:, :, 0] = self.cache.amin(dim=2)
        self.found[:, :, 1] = self.cache.amax(dim=2)

    def write(self, block: int, word: int) -> None:
        self.cache[block].fill_(word)
        self.torch.cuda.synchronize()

    def replay(self) -> Pages:
        self.graph.replay()
        self.torch.cuda.synchronize()
        found: Pages = self.found.cpu().numpy().astype(np.int64)
        return found

    def read(self) -> Pages:
        """Past the graph: every byte by way of the host."""
        return extremes(self.cache.cpu().numpy())


class DriverMemory:
    def __init__(self, blocks: int, block_bytes: int, allocator: str) -> None:
        self.cu = ctypes.CDLL("libcuda.so.1")
        self.shape = (blocks, block_bytes // PAGE, PAGE // 4)
        self.bytes = blocks * block_bytes
        self.block_bytes = block_bytes
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        before = kv_ranges() or 0
        out = ctypes.c_uint64()
        with bracket(lambda _: True):  # also where torch has no pool: the shim must tell a caller that does not ask
            if allocator == "async":
                self._call("cuMemAllocAsync", ctypes.byref(out), ctypes.c_size_t(self.bytes), None)
            else:
                self._call("cuMemAlloc_v2", ctypes.byref(out), ctypes.c_size_t(self.bytes))
        self.base = out.value
        self.is_valves = (kv_ranges() or 0) > before
        self._set(0, self.bytes, 0)
        self._capture()

    def _call(self, name: str, *arguments: Any) -> None:
        code = self.cu[name](*arguments)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def _set(self, at: int, count: int, word: int) -> None:
        address = ctypes.c_uint64(self.base + at)
        self._call("cuMemsetD32_v2", address, ctypes.c_uint32(word), ctypes.c_size_t(count // 4))
        self._call("cuCtxSynchronize")

    def _capture(self) -> None:
        host, graph = ctypes.c_void_p(), ctypes.c_void_p()
        self.stream, self.exec = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuMemAllocHost_v2", ctypes.byref(host), ctypes.c_size_t(self.bytes))
        self.host = host.value or 0
        self._call("cuStreamCreate", ctypes.byref(self.stream), 1)
        self._call("cuStreamBeginCapture_v2", self.stream, 2)
        at, count = ctypes.c_uint64(self.base), ctypes.c_size_t(self.bytes)
        self._call("cuMemcpyDtoHAsync_v2", host, at, count, self.stream)
        self._call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(self.exec), graph, ctypes.c_uint64(0))

    def write(self, block: int, word: int) -> None:
        self._set(block * self.block_bytes, self.block_bytes, word)

    def replay(self) -> Pages:
        self._call("cuGraphLaunch", self.exec, self.stream)
        self._call("cuStreamSynchronize", self.stream)
        words = np.ctypeslib.as_array((ctypes.c_int32 * (self.bytes // 4)).from_address(self.host))
        return extremes(words.reshape(self.shape))

    def read(self) -> Pages:
        words = np.empty(self.shape, np.int32)
        at, count = ctypes.c_uint64(self.base), ctypes.c_size_t(self.bytes)
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(words.ctypes.data), at, count)
        return extremes(words)


def extremes(words: NDArray[np.int32]) -> Pages:
    return np.stack([words.min(axis=2), words.max(axis=2)], axis=2).astype(np.int64)
