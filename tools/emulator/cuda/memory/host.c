/* host.c - pinned host memory. The device sees it at its host address. */
#include "capture.h"
#include "memory.h"
#include "rm.h"

#include <stdlib.h>
#include <sys/mman.h>

#define HOST_FLAGS 7u
#define PAGE       4096ull

bool host_is_pinned(const void *address)
{
	const struct range *range = range_at((uintptr_t)address, false);

	return range && (range->kind == RANGE_HOST || range->kind == RANGE_REGISTERED);
}

static void enter(struct range *range)
{
	LOCKED(&memory.lock);
	range->id = ++memory.next_id;
	book_add(&memory.ranges, range);
}

static void leave(struct range *range)
{
	pthread_mutex_lock(&memory.lock);
	book_remove(&memory.ranges, range);
	pthread_mutex_unlock(&memory.lock);
	rm_free(range->dev->h_device, range->h_memory);
	free(range);
}

static CUresult pin(struct context *ctx, void *at, size_t bytes, enum range_kind kind, unsigned flags)
{
	struct range *range = calloc(1, sizeof(*range));

	REFUSE_IF(!range, CUDA_ERROR_OUT_OF_MEMORY);
	range->kind = kind;
	range->ctx = ctx;
	range->dev = ctx->dev;
	range->base = (uintptr_t)at;
	range->bytes = bytes;
	range->flags = flags;
	if (memory_object_new(ctx->dev, NV01_MEMORY_SYSTEM, (bytes + PAGE - 1) / PAGE * PAGE,
	                      &range->h_memory)) {
		free(range);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	enter(range);
	return CUDA_SUCCESS;
}

CUAPI(2020, cuMemHostAlloc, void **out, size_t bytes, unsigned flags)
{
	struct context *ctx;

	TRY(context_current(&ctx));
	TRY(capture_forbids_unsafe());
	REFUSE_IF(!out || !bytes || flags > HOST_FLAGS, CUDA_ERROR_INVALID_VALUE);
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	REFUSE_IF(at == MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
	CUresult result = pin(ctx, at, bytes, RANGE_HOST, flags | 2u);
	if (result)
		munmap(at, bytes);
	else
		*out = at;
	return result;
}

CUAPI(3020, cuMemAllocHost_v2, void **out, size_t bytes)
{
	return cuMemHostAlloc(out, bytes, 0);
}

CUAPI(2000, cuMemFreeHost, void *at)
{
	struct context *ctx;
	CUresult result = context_current(&ctx);

	if (!result)
		result = capture_forbids_unsafe();
	if (result || !at)
		return result;
	struct range *range = range_at((uintptr_t)at, true);
	REFUSE_IF(!range || range->kind != RANGE_HOST, CUDA_ERROR_INVALID_VALUE);
	result = context_wait(range->ctx);
	size_t bytes = range->bytes;
	leave(range);
	munmap(at, bytes);
	return result;
}

CUAPI(6050, cuMemHostRegister_v2, void *at, size_t bytes, unsigned flags)
{
	struct context *ctx;

	TRY(context_current(&ctx));
	TRY(capture_forbids_unsafe());
	REFUSE_IF(!at || !bytes || flags > 15, CUDA_ERROR_INVALID_VALUE);
	pthread_mutex_lock(&memory.lock);
	bool taken = book_overlaps(&memory.ranges, (uintptr_t)at, bytes);
	pthread_mutex_unlock(&memory.lock);
	return taken ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
	             : pin(ctx, at, bytes, RANGE_REGISTERED, flags);
}

CUAPI(4000, cuMemHostUnregister, void *at)
{
	struct context *ctx;

	TRY(context_current(&ctx));
	TRY(capture_forbids_unsafe());
	struct range *range = range_at((uintptr_t)at, true);
	REFUSE_IF(!range || range->kind != RANGE_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
	CUresult result = context_wait(range->ctx);
	leave(range);
	return result;
}

CUAPI(3020, cuMemHostGetDevicePointer_v2, CUdeviceptr *out, void *at, unsigned flags)
{
	TRY(driver_check());
	REFUSE_IF(!out || flags || !host_is_pinned(at), CUDA_ERROR_INVALID_VALUE);
	*out = (uintptr_t)at;
	return CUDA_SUCCESS;
}

CUAPI(2030, cuMemHostGetFlags, unsigned *out, void *at)
{
	const struct range *range = range_at((uintptr_t)at, false);

	REFUSE_IF(!out || !range || !host_is_pinned(at), CUDA_ERROR_INVALID_VALUE);
	*out = range->flags;
	return CUDA_SUCCESS;
}
