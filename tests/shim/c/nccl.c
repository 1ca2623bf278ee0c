/*
 * nccl.c - the virtual memory calls of a collective library at start (its host and device allocators, buffer registration
 * and proxies), by cuGetProcAddress as it does. Prints every result code, so that a run with the shim can be compared with
 * one without. With an argument all of it happens in a KV bracket, beside a KV range.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "cuda.h"

typedef CUresult get_proc(const char *, void **, int, uint64_t, int *);
static get_proc *get;

#define CALL(name, version, parameters, ...)                                     \
	({                                                                       \
		CUresult(*call) parameters = NULL;                               \
		get(#name, (void **)&call, version, 0, NULL);                    \
		CUresult result = call ? call(__VA_ARGS__) : CUDA_ERROR_UNKNOWN; \
		printf("%s %d\n", #name, result);                                \
		result;                                                          \
	})

static void *reserve_and_map(uint64_t handle, size_t bytes)
{
	CUdeviceptr at = 0;

	CALL(cuMemAddressReserve, 10020, (CUdeviceptr *, size_t, size_t, CUdeviceptr, uint64_t), &at, bytes,
	     bytes, 0, 0);
	CALL(cuMemMap, 10020, (CUdeviceptr, size_t, size_t, uint64_t, uint64_t), at, bytes, 0, handle, 0);
	return (void *)(uintptr_t)at;
}

static void unmap_and_free(void *at, size_t bytes)
{
	CALL(cuMemUnmap, 10020, (CUdeviceptr, size_t), (CUdeviceptr)(uintptr_t)at, bytes);
	CALL(cuMemAddressFree, 10020, (CUdeviceptr, size_t), (CUdeviceptr)(uintptr_t)at, bytes);
}

/* Host memory by VMM: the location is a NUMA node, and its id no device. */
static void host_buffer(void)
{
	CUmemAllocationProp prop = {.type = CU_MEM_TYPE_PINNED,
	                            .requested_handles = CU_MEM_HANDLE_POSIX_FD,
	                            .location = {CU_MEM_LOCATION_HOST_NUMA, 0}};
	CUmemAccessDesc access[] = {{{CU_MEM_LOCATION_HOST_NUMA, 0}, CU_ACCESS_READWRITE},
	                            {{CU_MEM_LOCATION_DEVICE, 0}, CU_ACCESS_READWRITE}};
	size_t bytes = 0;
	uint64_t handle = 0;
	char *at;

	CALL(cuMemGetAllocationGranularity, 10020, (size_t *, const CUmemAllocationProp *, int), &bytes,
	     &prop, 0);
	CALL(cuMemCreate, 10020, (uint64_t *, size_t, const CUmemAllocationProp *, uint64_t), &handle, bytes,
	     &prop, 0);
	at = reserve_and_map(handle, bytes);
	CALL(cuMemSetAccess, 10020, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t),
	     (CUdeviceptr)(uintptr_t)at, bytes, access, 2);
	CALL(cuMemRelease, 10020, (uint64_t), handle);
	unmap_and_free(at, bytes);
}

static void device_buffer(void)
{
	CUmemAllocationProp prop = {.type = CU_MEM_TYPE_PINNED,
	                            .requested_handles = CU_MEM_HANDLE_POSIX_FD,
	                            .location = {CU_MEM_LOCATION_DEVICE, 0}};
	CUmemAccessDesc access = {{CU_MEM_LOCATION_DEVICE, 0}, CU_ACCESS_READWRITE};
	size_t bytes = 8 << 20, size = 0;
	uint64_t handle = 0, imported = 0, retained = 0;
	CUdeviceptr base = 0;
	int fd = -1, type = 0;
	void *at, *peer;

	CALL(cuMemCreate, 10020, (uint64_t *, size_t, const CUmemAllocationProp *, uint64_t), &handle, bytes,
	     &prop, 0);
	at = reserve_and_map(handle, bytes);
	CALL(cuMemSetAccess, 10020, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t),
	     (CUdeviceptr)(uintptr_t)at, bytes, &access, 1);
	CALL(cuMemRetainAllocationHandle, 11000, (uint64_t *, void *), &retained, at);
	CALL(cuMemGetAllocationPropertiesFromHandle, 10020, (CUmemAllocationProp *, uint64_t), &prop,
	     retained);
	CALL(cuMemExportToShareableHandle, 10020, (void *, uint64_t, int, uint64_t), &fd, handle, 1, 0);
	CALL(cuMemImportFromShareableHandle, 10020, (uint64_t *, void *, int), &imported,
	     (void *)(intptr_t)fd, 1);
	peer = reserve_and_map(imported, bytes);
	CALL(cuMemSetAccess, 10020, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t),
	     (CUdeviceptr)(uintptr_t)peer, bytes, &access, 1);
	CALL(cuMemGetAddressRange, 3020, (CUdeviceptr *, size_t *, CUdeviceptr), &base, &size,
	     (CUdeviceptr)(uintptr_t)at + 4096);
	printf("range %d %zu\n", base == (CUdeviceptr)(uintptr_t)at, size);
	CALL(cuPointerGetAttribute, 4000, (void *, int, CUdeviceptr), &type, 2, (CUdeviceptr)(uintptr_t)at);
	CALL(cuMemGetHandleForAddressRange, 11070, (void *, CUdeviceptr, size_t, int, uint64_t), &type,
	     (CUdeviceptr)(uintptr_t)at, 4096, 1, 0);
	close(fd);
	CALL(cuMemRelease, 10020, (uint64_t), imported);
	CALL(cuMemRelease, 10020, (uint64_t), retained);
	CALL(cuMemRelease, 10020, (uint64_t), handle);
	unmap_and_free(peer, bytes);
	unmap_and_free(at, bytes);
}

int main(int argc, char **argv)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	void (*begin)(uint32_t) = NULL;
	CUcontext context;
	CUdeviceptr kv = 0;

	(void)argv;
	*(void **)&get = library ? dlsym(library, "cuGetProcAddress_v2") : NULL;
	if (!get)
		return 1;
	CALL(cuInit, 2000, (unsigned), 0);
	CALL(cuDevicePrimaryCtxRetain, 7000, (CUcontext *, CUdevice), &context, 0);
	CALL(cuCtxSetCurrent, 4000, (CUcontext), context);
	*(void **)&begin = dlsym(RTLD_DEFAULT, "valve_kv_begin");
	if (argc > 1 && begin)
		begin(1);
	CALL(cuMemAlloc, 3020, (CUdeviceptr *, size_t), &kv, 8 << 20);
	host_buffer();
	device_buffer();
	CALL(cuMemFree, 3020, (CUdeviceptr), kv);
	return 0;
}
