/*
 * alloc.c - cuMemAlloc. Memory comes from the RM as objects of whole 2 MiB pages, so out-of-memory is the server's
 * answer; small allocations are cut from 2 MiB slabs at 512 bytes, as the real driver does. Mapping and unmapping are
 * UVM ioctls: the pages appear and vanish in this process before the ioctl returns (emu.h, "Pages").
 */
#include "capture.h"
#include "memory.h"
#include "rm.h"

#include <stdlib.h>

#define BLOCK       512u
#define SMALL_LIMIT (1u << 20)

uint32_t memory_object_new(struct device *dev, uint32_t cls, uint64_t bytes, uint32_t *h_memory)
{
	struct nv_memory_alloc p = {.owner = emu.h_client, .size = bytes, .alignment = LARGE_PAGE};

	*h_memory = rm_new_handle();
	return rm_alloc(RM_NVOS21, dev->h_device, *h_memory, cls, &p, sizeof(p));
}

/* Backs an area with memory of the device; the area is given back when that fails. */
static CUresult back_area(struct context *ctx, struct range *area)
{
	struct device *dev = ctx->dev;
	uint32_t h_memory, status = memory_object_new(dev, NV01_MEMORY_LOCAL_USER, area->bytes, &h_memory);

	if (status) {
		area_give(area);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	status = uvm_create_range(area->base, area->bytes);
	if (!status)
		status = uvm_map(dev, area->base, area->bytes, 0, h_memory);
	if (!status) {
		pthread_mutex_lock(&memory.lock); /* others find it already */
		area->ctx = ctx;
		area->dev = dev;
		area->h_memory = h_memory;
		pthread_mutex_unlock(&memory.lock);
		return CUDA_SUCCESS;
	}
	uvm_free_range(area->base);
	rm_free(dev->h_device, h_memory);
	area_give(area);
	return CUDA_ERROR_OPERATING_SYSTEM;
}

static void release_area(struct range *area)
{
	free(area->blocks);
	uvm_free_range(area->base);
	rm_free(area->dev->h_device, area->h_memory);
	area_give(area);
}

static CUresult take_area(struct context *ctx, uint64_t bytes, struct range **out)
{
	uint64_t whole_pages = (bytes + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
	struct range *area = area_take(RANGE_DEVICE, whole_pages, LARGE_PAGE, 0);

	REFUSE_IF(!area, CUDA_ERROR_OUT_OF_MEMORY);
	CUresult result = back_area(ctx, area);
	*out = area;
	return result;
}

/* The first run of free blocks; sets them. Returns the offset, or the slab's size when it is too full. */
static uint64_t slab_cut(struct range *slab, uint64_t bytes)
{
	unsigned need = (unsigned)((bytes + BLOCK - 1) / BLOCK), run = 0;

	for (unsigned i = 0; i < LARGE_PAGE / BLOCK; i++) {
		run = slab->blocks[i / 8] & (1u << i % 8) ? 0 : run + 1;
		if (run < need)
			continue;
		for (unsigned k = i + 1 - need; k <= i; k++)
			slab->blocks[k / 8] = (uint8_t)(slab->blocks[k / 8] | 1u << k % 8);
		slab->used += need;
		return (uint64_t)(i + 1 - need) * BLOCK;
	}
	return LARGE_PAGE;
}

static void slab_return(struct range *slab, const struct range *piece)
{
	unsigned first = (unsigned)((piece->base - slab->base) / BLOCK);
	unsigned count = (unsigned)((piece->bytes + BLOCK - 1) / BLOCK);

	for (unsigned k = first; k < first + count; k++)
		slab->blocks[k / 8] = (uint8_t)(slab->blocks[k / 8] & ~(1u << k % 8));
	slab->used -= count;
}

static bool cut_from_slabs_locked(struct context *ctx, struct range *piece)
{
	for (unsigned i = 0; i < memory.areas.count; i++) {
		struct range *slab = memory.areas.at[i];
		if (slab->kind != RANGE_SLAB || slab->ctx != ctx)
			continue;
		uint64_t offset = slab_cut(slab, piece->bytes);
		if (offset == LARGE_PAGE)
			continue;
		piece->base = slab->base + offset;
		piece->slab = slab;
		return true;
	}
	return false;
}

static CUresult alloc_small(struct context *ctx, struct range *piece)
{
	struct range *slab;

	pthread_mutex_lock(&memory.lock);
	bool found = cut_from_slabs_locked(ctx, piece);
	pthread_mutex_unlock(&memory.lock);
	if (found)
		return CUDA_SUCCESS;
	TRY(take_area(ctx, LARGE_PAGE, &slab));
	pthread_mutex_lock(&memory.lock);
	slab->blocks = calloc(1, LARGE_PAGE / BLOCK / 8);
	if (!slab->blocks)
		abort();
	slab->kind = RANGE_SLAB;
	piece->base = slab->base + slab_cut(slab, piece->bytes);
	piece->slab = slab;
	pthread_mutex_unlock(&memory.lock);
	return CUDA_SUCCESS;
}

CUresult device_alloc(struct context *ctx, size_t bytes, struct pool *pool, struct range **out)
{
	struct range *area = NULL, *range = cell_new();
	CUresult result;

	range->kind = RANGE_DEVICE;
	range->ctx = ctx;
	range->dev = ctx->dev;
	range->pool = pool;
	range->bytes = bytes;
	if (bytes < SMALL_LIMIT) {
		result = alloc_small(ctx, range);
	} else {
		result = take_area(ctx, bytes, &area);
		if (!result)
			range->base = area->base;
	}
	if (result) {
		cell_free(range);
		return result;
	}
	pthread_mutex_lock(&memory.lock);
	range->id = ++memory.next_id;
	book_add(&memory.ranges, range);
	pthread_mutex_unlock(&memory.lock);
	*out = range;
	return CUDA_SUCCESS;
}

CUresult device_free(struct range *range)
{
	struct range *area = NULL;

	pthread_mutex_lock(&memory.lock);
	book_remove(&memory.ranges, range);
	if (range->slab) {
		slab_return(range->slab, range);
		area = range->slab->used ? NULL : range->slab;
		if (area)
			area->kind = RANGE_DEVICE; /* no pool cuts from it any more */
	} else {
		area = book_find(&memory.areas, range->base);
	}
	pthread_mutex_unlock(&memory.lock);
	cell_free(range);
	if (area)
		release_area(area);
	return CUDA_SUCCESS;
}

struct range *range_at(uint64_t address, bool only_base)
{
	LOCKED(&memory.lock);
	struct range *range = book_find(&memory.ranges, address);
	return range && (!only_base || range->base == address) ? range : NULL;
}

/* A context takes its memory along. */
void memory_forget_context(struct context *ctx)
{
	for (;;) {
		struct range *victim = NULL;
		pthread_mutex_lock(&memory.lock);
		for (unsigned i = 0; i < memory.ranges.count && !victim; i++)
			if (memory.ranges.at[i]->ctx == ctx && memory.ranges.at[i]->kind == RANGE_DEVICE)
				victim = memory.ranges.at[i];
		pthread_mutex_unlock(&memory.lock);
		if (!victim)
			return;
		device_free(victim);
	}
}

CUAPI(3020, cuMemAlloc_v2, CUdeviceptr *out, size_t bytes)
{
	METERED(ALLOC);
	struct context *ctx;
	struct range *range;

	TRY(context_current(&ctx));
	TRY(capture_forbids_unsafe());
	REFUSE_IF(!out || !bytes, CUDA_ERROR_INVALID_VALUE);
	CUresult result = device_alloc(ctx, bytes, NULL, &range);
	if (!result)
		*out = range->base;
	return result;
}

CUAPI(3020, cuMemAllocPitch_v2, CUdeviceptr *out, size_t *pitch, size_t width, size_t height,
      unsigned element)
{
	REFUSE_IF(!pitch || (element != 4 && element != 8 && element != 16), CUDA_ERROR_INVALID_VALUE);
	*pitch = (width + BLOCK - 1) / BLOCK * BLOCK;
	return cuMemAlloc_v2(out, *pitch * height);
}

/* Managed memory is device memory that the host may touch: here that is all device memory. */
CUAPI(6000, cuMemAllocManaged, CUdeviceptr *out, size_t bytes, unsigned flags)
{
	return flags != 1 && flags != 2 ? CUDA_ERROR_INVALID_VALUE : cuMemAlloc_v2(out, bytes);
}

/* Waits for the context's work, as the real one: a process whose channels are off hangs in it. */
CUAPI(3020, cuMemFree_v2, CUdeviceptr address)
{
	METERED(FREE);
	struct context *ctx;
	CUresult result = context_current(&ctx);

	if (!result)
		result = capture_forbids_unsafe();
	if (result || !address)
		return result;
	struct range *range = range_at(address, true);
	REFUSE_IF(!range || range->kind != RANGE_DEVICE, CUDA_ERROR_INVALID_VALUE);
	result = context_wait(range->ctx);
	return result ? result : device_free(range);
}

CUAPI(3020, cuMemGetInfo_v2, size_t *available, size_t *total)
{
	struct context *ctx;

	TRY(context_current(&ctx));
	const struct emu_gpu *gpu = ctx->dev->board;
	uint64_t used = __atomic_load_n(&gpu->used_bytes, __ATOMIC_RELAXED);
	if (available)
		*available = used < gpu->total_bytes ? gpu->total_bytes - used : 0;
	if (total)
		*total = gpu->total_bytes;
	return CUDA_SUCCESS;
}
