/*
 * stubcuda.c - a libcuda.so.1 with just enough in it to be hooked: launches are counted, contexts and events exist, and
 * what the events answer is set by the test. cuGetProcAddress returns internal twins, not the exported functions, as
 * the real driver may.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "cuda.h"

#define EXPORT __attribute__((visibility("default")))

static struct {
	uint64_t launches, internal, last[11], records, queries, captures, events, sits, blocked;
	int query_answer, record_answer, per_thread, active;
} stub;

/* What the test reads and sets. */
EXPORT uint64_t stub_count(const char *what)
{
	if (!strcmp(what, "launches"))
		return stub.launches;
	if (!strcmp(what, "internal"))
		return stub.internal;
	if (!strcmp(what, "records"))
		return __atomic_load_n(&stub.records, __ATOMIC_SEQ_CST);
	if (!strcmp(what, "captures"))
		return __atomic_load_n(&stub.captures, __ATOMIC_SEQ_CST);
	if (!strcmp(what, "events"))
		return __atomic_load_n(&stub.events, __ATOMIC_SEQ_CST);
	if (!strcmp(what, "sits"))
		return __atomic_load_n(&stub.sits, __ATOMIC_SEQ_CST);
	if (!strcmp(what, "per_thread"))
		return (uint64_t)stub.per_thread;
	return __atomic_load_n(&stub.queries, __ATOMIC_SEQ_CST);
}

EXPORT uint64_t stub_argument(int index)
{
	return stub.last[index];
}

EXPORT void stub_answer(int query, int record)
{
	__atomic_store_n(&stub.query_answer, query, __ATOMIC_SEQ_CST);
	__atomic_store_n(&stub.record_answer, record, __ATOMIC_SEQ_CST);
}

/* Records in that context do not come back until it is another's turn. */
EXPORT void stub_block(uint64_t context)
{
	__atomic_store_n(&stub.blocked, context, __ATOMIC_SEQ_CST);
}

/* Somebody else holds the primary contexts, too. */
EXPORT void stub_shared(int is_shared)
{
	stub.active = is_shared;
}

static CUresult launch(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g,
                       uint64_t h, uint64_t i, uint64_t j, uint64_t k)
{
	const uint64_t all[] = {a, b, c, d, e, f, g, h, i, j, k};

	memcpy(stub.last, all, sizeof(all));
	__atomic_add_fetch(&stub.launches, 1, __ATOMIC_RELAXED);
	return CUDA_SUCCESS;
}
#define LAUNCH(name)                                                                                 \
	EXPORT CUresult name(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, \
	                     uint64_t g, uint64_t h, uint64_t i, uint64_t j, uint64_t k)             \
	{                                                                                            \
		return launch(a, b, c, d, e, f, g, h, i, j, k);                                      \
	}
LAUNCH(cuLaunchKernel)
LAUNCH(cuLaunchKernel_ptsz)
LAUNCH(cuLaunchKernelEx)
LAUNCH(cuGraphLaunch)
LAUNCH(cuMemcpyHtoDAsync_v2)
LAUNCH(cuMemcpyHtoDAsync_v2_ptsz)
LAUNCH(cuMemsetD8_v2)

static CUresult internal_launch(void)
{
	stub.internal++;
	return CUDA_SUCCESS;
}

static CUresult internal_launch_ptsz(void)
{
	stub.internal++;
	stub.per_thread++;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuInit(unsigned flags)
{
	(void)flags;
	return open("/dev/nvidiactl", O_RDWR) >= 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	*context = (CUcontext)(uintptr_t)(0x1000 + device);
	return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	(void)device;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
	(void)device;
	*flags = 0;
	*active = stub.active;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device)
{
	(void)flags;
	*context = (CUcontext)(uintptr_t)(0x2000 + device);
	return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
	return context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuCtxAttach(CUcontext *context, unsigned flags)
{
	(void)flags;
	*context = (CUcontext)(uintptr_t)0x2000;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxDetach(CUcontext context)
{
	(void)context;
	return CUDA_SUCCESS;
}

/* The last digit of a stream says on which device it is. */
EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext *context)
{
	*context = (CUcontext)(0x1000 + ((uintptr_t)stream & 0xf));
	return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
	(void)context;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
	*mode = 0;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuEventCreate(CUevent *event, unsigned flags)
{
	(void)flags;
	*event = (CUevent)(uintptr_t)0x3000;
	__atomic_add_fetch(&stub.events, 1, __ATOMIC_SEQ_CST);
	return CUDA_SUCCESS;
}

#ifndef STUB_WITHOUT_CONTEXT_EVENTS
EXPORT CUresult cuCtxRecordEvent(CUcontext context, CUevent event)
{
	(void)event;
	if (__atomic_load_n(&stub.captures, __ATOMIC_SEQ_CST))
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	__atomic_add_fetch(&stub.sits, 1, __ATOMIC_SEQ_CST);
	while (__atomic_load_n(&stub.blocked, __ATOMIC_SEQ_CST) == (uint64_t)(uintptr_t)context)
		usleep(1000);
	__atomic_sub_fetch(&stub.sits, 1, __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&stub.records, 1, __ATOMIC_SEQ_CST);
	return __atomic_load_n(&stub.record_answer, __ATOMIC_SEQ_CST);
}
#endif

EXPORT CUresult cuEventQuery(CUevent event)
{
	(void)event;
	__atomic_add_fetch(&stub.queries, 1, __ATOMIC_SEQ_CST);
	return __atomic_load_n(&stub.query_answer, __ATOMIC_SEQ_CST);
}

EXPORT CUresult cuStreamQuery(CUstream stream)
{
	return cuEventQuery((CUevent)stream);
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
	(void)flags;
	*stream = (CUstream)(uintptr_t)0x4000;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, int mode)
{
	(void)mode;
	if (!stream)
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	__atomic_add_fetch(&stub.captures, 1, __ATOMIC_SEQ_CST);
	return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
	(void)stream;
	*graph = NULL;
	__atomic_sub_fetch(&stub.captures, 1, __ATOMIC_SEQ_CST);
	return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status);
EXPORT CUresult cuGetProcAddress(const char *name, void **found, int version, uint64_t flags);

static void *lookup(const char *name, int version, uint64_t flags)
{
	if (!strcmp(name, "cuLaunchKernel"))
		return flags & 2 ? (void *)internal_launch_ptsz : (void *)internal_launch;
	if (!strcmp(name, "cuGraphLaunch") || !strncmp(name, "cuLaunchSomethingNew", 20) ||
	    !strcmp(name, "cuStreamBeginSomethingNew") || !strcmp(name, "cuMemcpyBatchAsync"))
		return (void *)internal_launch;
	if (!strcmp(name, "cuGetProcAddress"))
		return version >= 12000 ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress;
	if (!strcmp(name, "cuStreamBeginCapture"))
		return (void *)cuStreamBeginCapture_v2;
	if (!strcmp(name, "cuCtxSetCurrent"))
		return (void *)cuCtxSetCurrent;
	return NULL;
}

CUresult cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status)
{
	*found = lookup(name, version, flags);
	if (status)
		*status = *found ? 0 : 1;
	return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *name, void **found, int version, uint64_t flags)
{
	*found = lookup(name, version, flags);
	return *found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
