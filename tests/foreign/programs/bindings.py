"""cuda-bindings: devices, copies, a known kernel, a graph, virtual memory shared with itself. Prints what it saw."""

import ctypes
import json

import numpy as np
from cuda.bindings import driver

DONE = driver.CUresult.CUDA_SUCCESS


def call(result):
    assert result[0] == DONE, result[0]
    return result[1] if len(result) == 2 else result[1:]


call(driver.cuInit(0))
device = call(driver.cuDeviceGet(0))
call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(device))))
seen = {
    "name": call(driver.cuDeviceGetName(64, device)).split(b"\0")[0].decode(),
    "version": call(driver.cuDriverGetVersion()),
}

stream = call(driver.cuStreamCreate(1))
memory = call(driver.cuMemAlloc(1 << 20))
data = np.arange(1 << 17, dtype=np.uint64)
back = np.zeros_like(data)
call(driver.cuMemcpyHtoDAsync(memory, data.ctypes.data, data.nbytes, stream))
call(driver.cuMemcpyDtoHAsync(back.ctypes.data, memory, back.nbytes, stream))
call(driver.cuStreamSynchronize(stream))
seen["copied"] = bool((data == back).all())

module = call(driver.cuModuleLoadData(b"// valve-emu\n\0"))
fill = call(driver.cuModuleGetFunction(module, b"emu_fill"))
arguments = ((int(memory), 1 << 20, 5), (ctypes.c_uint64,) * 3)
call(driver.cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0))
call(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
call(driver.cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, stream, ((int(memory), 8, 6), (ctypes.c_uint64,) * 3), 0))
graph = call(driver.cuGraphInstantiate(call(driver.cuStreamEndCapture(stream)), 0))
call(driver.cuGraphLaunch(graph, stream))
call(driver.cuMemcpyDtoHAsync(back.ctypes.data, memory, back.nbytes, stream))
call(driver.cuStreamSynchronize(stream))
seen["filled"] = [int(back[0]), int(back[1]), int(back[-1])]

posix_fd = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
prop = driver.CUmemAllocationProp()
prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
prop.requestedHandleTypes = posix_fd
minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
page = call(driver.cuMemGetAllocationGranularity(prop, minimum))
handle = call(driver.cuMemCreate(page, prop, 0))
twin = call(
    driver.cuMemImportFromShareableHandle(call(driver.cuMemExportToShareableHandle(handle, posix_fd, 0)), posix_fd)
)
base = int(call(driver.cuMemAddressReserve(2 * page, 0, 0, 0)))
call(driver.cuMemMap(base, page, 0, handle, 0))
call(driver.cuMemMap(base + page, page, 0, twin, 0))
access = driver.CUmemAccessDesc()
access.location = prop.location
access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
call(driver.cuMemSetAccess(base, 2 * page, [access], 1))
call(driver.cuMemsetD32(base, 7, 100))
call(driver.cuMemcpyDtoH(back.ctypes.data, base + page, 8))
seen["shared"] = int(back[0]) == 7 << 32 | 7
call(driver.cuMemUnmap(base, 2 * page))
print(json.dumps(seen))
