/*
 * exercise.c - everything at once, for a libcuda built with a sanitizer: threads with streams of their own launch, copy,
 * record, capture, map and free for a while, each its own objects and all of them the same ones; then a context faults,
 * and another is made and destroyed.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "types.h"

#define CALLS(X)                                                                                             \
	X(cuInit, (unsigned))                                                                                \
	X(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))                                                 \
	X(cuDevicePrimaryCtxRelease_v2, (CUdevice))                                                          \
	X(cuCtxCreate_v2, (CUcontext *, unsigned, CUdevice))                                                 \
	X(cuCtxDestroy_v2, (CUcontext))                                                                      \
	X(cuCtxSetCurrent, (CUcontext))                                                                      \
	X(cuCtxSynchronize, (void))                                                                          \
	X(cuCtxRecordEvent, (CUcontext, CUevent))                                                            \
	X(cuModuleLoadData, (CUmodule *, const void *))                                                      \
	X(cuModuleGetFunction, (CUfunction *, CUmodule, const char *))                                       \
	X(cuModuleUnload, (CUmodule))                                                                        \
	X(cuStreamCreate, (CUstream *, unsigned))                                                            \
	X(cuStreamSynchronize, (CUstream))                                                                   \
	X(cuStreamDestroy_v2, (CUstream))                                                                    \
	X(cuStreamWaitEvent, (CUstream, CUevent, unsigned))                                                  \
	X(cuStreamBeginCapture_v2, (CUstream, int))                                                          \
	X(cuStreamEndCapture, (CUstream, CUgraph *))                                                         \
	X(cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, unsigned long long))                         \
	X(cuGraphLaunch, (CUgraphExec, CUstream))                                                            \
	X(cuGraphExecDestroy, (CUgraphExec))                                                                 \
	X(cuGraphDestroy, (CUgraph))                                                                         \
	X(cuEventCreate, (CUevent *, unsigned))                                                              \
	X(cuEventRecord, (CUevent, CUstream))                                                                \
	X(cuEventSynchronize, (CUevent))                                                                     \
	X(cuEventQuery, (CUevent))                                                                           \
	X(cuEventDestroy_v2, (CUevent))                                                                      \
	X(cuMemAlloc_v2, (CUdeviceptr *, size_t))                                                            \
	X(cuMemFree_v2, (CUdeviceptr))                                                                       \
	X(cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream))                                                \
	X(cuMemFreeAsync, (CUdeviceptr, CUstream))                                                           \
	X(cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, size_t, CUstream))                               \
	X(cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream))                                     \
	X(cuMemCreate,                                                                                       \
	  (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long))         \
	X(cuMemRelease, (CUmemGenericAllocationHandle))                                                      \
	X(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))             \
	X(cuMemAddressFree, (CUdeviceptr, size_t))                                                           \
	X(cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))         \
	X(cuMemUnmap, (CUdeviceptr, size_t))                                                                 \
	X(cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))                            \
	X(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle *, void *))                             \
	X(cuPointerGetAttribute, (void *, int, CUdeviceptr))                                                 \
	X(cuMemGetAccess, (unsigned long long *, const CUmemLocation *, CUdeviceptr))                        \
	X(cuDeviceGetDefaultMemPool, (CUmemoryPool *, CUdevice))                                             \
	X(cuDeviceSetMemPool, (CUdevice, CUmemoryPool))                                                      \
	X(cuMemPoolSetAttribute, (CUmemoryPool, int, void *))                                                \
	X(cuMemPoolGetAttribute, (CUmemoryPool, int, void *))                                                \
	X(cuDevicePrimaryCtxGetState, (CUdevice, unsigned *, int *))                                         \
	X(cuCtxSetFlags, (unsigned))                                                                         \
	X(cuCtxGetFlags, (unsigned *))                                                                       \
	X(cuModuleGetFunctionCount, (unsigned *, CUmodule))                                                  \
	X(cuFuncSetAttribute, (CUfunction, int, int))                                                        \
	X(cuEventElapsedTime, (float *, CUevent, CUevent))                                                   \
	X(cuLaunchHostFunc, (CUstream, CUhostFn, void *))                                                    \
	X(cuLaunchKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
	                   CUstream, void **, void **))
#define X(name, parameters) CUresult name parameters;
CALLS(X)
#undef X

#define THREADS 4
#define ROUNDS  6
#define AT_ONCE 20 /* times in each round, so that threads meet there */
#define MIB     (1u << 20)

#define CHECK(call)                                                                   \
	do {                                                                          \
		CUresult code_ = (call);                                              \
		if (code_) {                                                          \
			fprintf(stderr, "line %d: %s: %d\n", __LINE__, #call, code_); \
			exit(1);                                                      \
		}                                                                     \
	} while (0)

static CUcontext context;
static CUmodule module;
static CUfunction fill, spin;
static CUevent begin, end;  /* recorded and read by every thread */
static CUdeviceptr mapping; /* of every thread */
static int called;

static void on_host(void *user)
{
	__atomic_fetch_add((int *)user, 1, __ATOMIC_RELAXED);
}

static CUresult run(CUfunction f, CUstream stream, uint64_t a, uint64_t b, uint64_t c)
{
	void *params[] = {&a, &b, &c};

	return cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL);
}

static void graphs(CUstream stream, CUdeviceptr memory)
{
	CUgraph graph;
	CUgraphExec exec;

	CHECK(cuStreamBeginCapture_v2(stream, 1));
	CHECK(run(fill, stream, memory, 4096, 7));
	CHECK(run(spin, stream, 5, 0, 0));
	CHECK(cuStreamEndCapture(stream, &graph));
	CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
	CHECK(cuGraphDestroy(graph));
	CHECK(cuGraphLaunch(exec, stream));
	CHECK(cuGraphLaunch(exec, stream));
	CHECK(cuGraphExecDestroy(exec));
}

static void mappings(CUstream stream)
{
	CUmemAllocationProp prop = {.type = 1, .location = {1, 0}};
	CUmemAccessDesc access = {{1, 0}, 3};
	CUmemGenericAllocationHandle handle;
	CUdeviceptr base;

	CHECK(cuMemAddressReserve(&base, 4 * MIB, 0, 0, 0));
	CHECK(cuMemCreate(&handle, 2 * MIB, &prop, 0));
	CHECK(cuMemMap(base, 2 * MIB, 0, handle, 0));
	CHECK(cuMemMap(base + 2 * MIB, 2 * MIB, 0, handle, 0));
	CHECK(cuMemSetAccess(base, 4 * MIB, &access, 1));
	CHECK(cuMemRelease(handle));
	CHECK(run(fill, stream, base, 4 * MIB, 9));
	CHECK(cuStreamSynchronize(stream));
	CHECK(cuMemUnmap(base, 4 * MIB));
	CHECK(cuMemAddressFree(base, 4 * MIB));
}

/* What the real library's callers share without a lock of their own. */
static void same_objects(CUstream stream, unsigned round)
{
	static const char *const names[] = {"emu_copy", "emu_touch", "emu_tag", "emu_fill"};
	CUmemAccessDesc access = {{1, 0}, 3};
	CUmemGenericAllocationHandle handle;
	CUfunction f;
	CUmemoryPool pool;
	uint64_t bytes = 0;
	unsigned long long flags;
	unsigned count, primary;
	float elapsed;
	int active;

	CHECK(cuModuleGetFunction(&f, module, names[round % 4]));
	CHECK(cuFuncSetAttribute(f, 8, 1024));
	CHECK(cuModuleGetFunctionCount(&count, module));
	CHECK(cuDevicePrimaryCtxGetState(0, &primary, &active));
	CHECK(cuCtxSetFlags(round % 2));
	CHECK(cuCtxGetFlags(&primary));
	CHECK(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)mapping));
	CHECK(cuMemSetAccess(mapping, 2 * MIB, &access, 1));
	CHECK(cuPointerGetAttribute(&active, 16, mapping));
	CHECK(cuMemGetAccess(&flags, &access.location, mapping));
	CHECK(cuMemRelease(handle));
	CHECK(cuDeviceGetDefaultMemPool(&pool, 0));
	CHECK(cuDeviceSetMemPool(0, pool));
	CHECK(cuMemPoolSetAttribute(pool, 8, &bytes));
	CHECK(cuMemPoolGetAttribute(pool, 7, &bytes));
	CHECK(cuEventRecord(begin, stream));
	CHECK(cuEventRecord(end, stream));
	cuEventElapsedTime(&elapsed, begin, end); /* another thread may just have recorded them */
}

static void *worker(void *argument)
{
	CUstream stream, side;
	CUevent event, whole;
	CUdeviceptr memory, pooled;
	char host[4096];

	CHECK(cuCtxSetCurrent(context));
	CHECK(cuStreamCreate(&stream, 1));
	for (int round = 0; round < ROUNDS; round++) {
		CHECK(cuEventCreate(&event, 0));
		CHECK(cuEventCreate(&whole, 0));
		CHECK(cuStreamCreate(&side, (unsigned)round & 1u));
		CHECK(cuMemAlloc_v2(&memory, round % 3 ? 70000 : 3 * MIB));
		CHECK(run(fill, stream, memory, 65536, (uint64_t)round));
		CHECK(cuEventRecord(event, stream));
		CHECK(cuStreamWaitEvent(side, event, 0));
		CHECK(cuMemcpyDtoHAsync_v2(host, memory, sizeof(host), side));
		CHECK(cuMemcpyHtoDAsync_v2(memory, host, sizeof(host), stream));
		CHECK(cuLaunchHostFunc(stream, on_host, &called));
		CHECK(cuMemAllocAsync(&pooled, 4096, side));
		CHECK(run(fill, side, pooled, 4096, 3));
		CHECK(cuMemFreeAsync(pooled, side));
		CHECK(cuStreamDestroy_v2(side));
		graphs(stream, memory);
		mappings(stream);
		for (unsigned i = 0; i < AT_ONCE; i++)
			same_objects(stream, i);
		cuEventQuery(event);
		CHECK(cuEventSynchronize(event));
		CHECK(cuEventDestroy_v2(event));
		CHECK(cuEventDestroy_v2(whole));
		CHECK(cuStreamSynchronize(stream));
		CHECK(cuMemFree_v2(memory));
	}
	CHECK(cuStreamDestroy_v2(stream));
	return argument;
}

static void fault(void)
{
	CUcontext own;
	CUdeviceptr memory;

	CHECK(cuCtxCreate_v2(&own, 0, 0));
	CHECK(cuMemAlloc_v2(&memory, 2 * MIB));
	CHECK(cuMemFree_v2(memory));
	CHECK(run(fill, NULL, memory, 4096, 1));
	run(fill, NULL, memory, 4096, 1);
	if (cuCtxSynchronize() != CUDA_ERROR_ILLEGAL_ADDRESS)
		exit(3);
	CHECK(cuCtxDestroy_v2(own));
	CHECK(cuCtxSetCurrent(context));
}

int main(void)
{
	CUmemAllocationProp prop = {.type = 1, .location = {1, 0}};
	CUmemGenericAllocationHandle handle;
	pthread_t threads[THREADS];
	CUevent event;

	CHECK(cuInit(0));
	CHECK(cuDevicePrimaryCtxRetain(&context, 0));
	CHECK(cuCtxSetCurrent(context));
	CHECK(cuModuleLoadData(&module, "// valve-emu\n"));
	CHECK(cuModuleGetFunction(&fill, module, "emu_fill"));
	CHECK(cuModuleGetFunction(&spin, module, "emu_spin"));
	CHECK(cuEventCreate(&begin, 0));
	CHECK(cuEventCreate(&end, 0));
	CHECK(cuMemAddressReserve(&mapping, 2 * MIB, 0, 0, 0));
	CHECK(cuMemCreate(&handle, 2 * MIB, &prop, 0));
	CHECK(cuMemMap(mapping, 2 * MIB, 0, handle, 0));
	CHECK(cuMemRelease(handle));
	for (int i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, worker, NULL);
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	CHECK(cuMemUnmap(mapping, 2 * MIB));
	CHECK(cuMemAddressFree(mapping, 2 * MIB));
	CHECK(cuEventDestroy_v2(begin));
	CHECK(cuEventDestroy_v2(end));
	CHECK(cuEventCreate(&event, 0));
	CHECK(cuCtxRecordEvent(context, event));
	CHECK(cuEventSynchronize(event));
	CHECK(cuEventDestroy_v2(event));
	fault();
	CHECK(cuCtxSynchronize());
	CHECK(cuDevicePrimaryCtxRelease_v2(0));
	printf("done, %d host functions\n", called);
	return called == THREADS * ROUNDS ? 0 : 4;
}
