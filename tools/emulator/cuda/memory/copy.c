/*
 * copy.c - memory copies. Host-device copies run on the copy engines' channels, device-device copies on compute, as on
 * the card; so a gate that stops compute lets transfers finish. Bytes really move, in steps, and the rest of the
 * modelled time is spent on the grant.
 */
#include "copy.h"
#include "memory.h"
#include "turn.h"

#include <stdlib.h>

#define STEP_BYTES   65536u
#define STAGED_BYTES 65536u /* pageable sources up to this size are copied aside before the call returns */

struct copy_work {
	struct work work;
	struct box box;
	void *staged;
	uint64_t mbps;
};

static bool is_device(uint64_t address)
{
	return address >= ARENA_BASE && address < ARENA_BASE + ARENA_BYTES;
}

static bool copy_row(struct channel *channel, uint64_t to, uint64_t from, size_t width)
{
	for (size_t at = 0; at < width; at += STEP_BYTES) {
		size_t n = width - at < STEP_BYTES ? width - at : STEP_BYTES;
		if (!turn_check(channel))
			return false;
		memmove((void *)(uintptr_t)(to + at), (const void *)(uintptr_t)(from + at), n);
	}
	return true;
}

static CUresult run_copy(struct work *work, struct channel *channel)
{
	const struct copy_work *copy = (const struct copy_work *)work;
	const struct box *b = &copy->box;
	uint64_t clock = turn_clock(channel);
	uint64_t bytes = (uint64_t)b->width * b->height * b->depth;
	uint64_t model = copy->mbps ? real_ns(bytes * 1000u / copy->mbps) : 0;

	for (size_t z = 0; z < b->depth; z++)
		for (size_t y = 0; y < b->height; y++)
			if (!copy_row(channel, b->to + z * b->to_slice + y * b->to_pitch,
			              b->from + z * b->from_slice + y * b->from_pitch, b->width))
				return CUDA_SUCCESS;
	turn_run_until(channel, clock + model);
	return CUDA_SUCCESS;
}

static void drop_staged(struct work *work)
{
	free(((struct copy_work *)work)->staged);
}

static bool is_pageable(uint64_t address)
{
	return !is_device(address) && !host_is_pinned((const void *)(uintptr_t)address);
}

CUresult copy_box(const struct box *box, CUstream handle, bool wait)
{
	METERED(COPY);
	struct stream *stream;

	TRY(stream_resolve(handle, &stream));
	if (!box->width || !box->height || !box->depth)
		return CUDA_SUCCESS;
	REFUSE_IF(!box->to || !box->from, CUDA_ERROR_INVALID_VALUE);
	bool inside = is_device(box->to) && is_device(box->from);
	struct copy_work *copy = work_new(sizeof(*copy), run_copy);
	copy->work.node_type = NODE_MEMCPY;
	copy->work.drop = drop_staged;
	copy->box = *box;
	copy->mbps = inside ? 1000u * emu.board->copy_gbps : setting(SETTING_h2d_mbps);
	if (inside)
		wait = false;
	if (!wait && !stream->capture && (is_pageable(box->to) || is_pageable(box->from))) {
		bool is_flat = box->height == 1 && box->depth == 1 && box->width <= STAGED_BYTES;
		wait = is_pageable(box->to) || !is_flat;
		copy->staged = wait ? NULL : malloc(box->width);
	}
	if (copy->staged) {
		memcpy(copy->staged, (const void *)(uintptr_t)box->from, box->width);
		copy->box.from = (uintptr_t)copy->staged;
	}
	enum lane lane = inside ? LANE_COMPUTE : LANE_COPY;
	return wait ? work_submit_wait(stream, lane, &copy->work) : work_submit(stream, lane, &copy->work);
}

CUresult copy_flat(uint64_t to, uint64_t from, size_t bytes, CUstream stream, bool wait)
{
	struct box box = {.to = to, .from = from, .width = bytes, .height = 1, .depth = 1};

	return copy_box(&box, stream, wait);
}

/* Each form twice: with the legacy stream, and with the thread's own. */
#define COPY(since, name, to_type, from_type)                                                            \
	CUAPI(since, name, to_type to, from_type from, size_t bytes)                                     \
	{                                                                                                \
		return copy_flat((uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, bytes, NULL, true); \
	}                                                                                                \
	CUAPI(PER_THREAD_SINCE, name##_ptds, to_type to, from_type from, size_t bytes)                   \
	{                                                                                                \
		return copy_flat((uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, bytes,              \
		                 CU_STREAM_PER_THREAD, true);                                            \
	}
#define COPY_ASYNC(since, name, to_type, from_type)                                                         \
	CUAPI(since, name, to_type to, from_type from, size_t bytes, CUstream stream)                       \
	{                                                                                                   \
		return copy_flat((uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, bytes, stream, false); \
	}                                                                                                   \
	CUAPI(PER_THREAD_SINCE, name##_ptsz, to_type to, from_type from, size_t bytes, CUstream stream)     \
	{                                                                                                   \
		return copy_flat((uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, bytes,                 \
		                 PER_THREAD(stream), false);                                                \
	}
COPY(4000, cuMemcpy, CUdeviceptr, CUdeviceptr)
COPY(3020, cuMemcpyHtoD_v2, CUdeviceptr, const void *)
COPY(3020, cuMemcpyDtoH_v2, void *, CUdeviceptr)
COPY(3020, cuMemcpyDtoD_v2, CUdeviceptr, CUdeviceptr)
COPY_ASYNC(4000, cuMemcpyAsync, CUdeviceptr, CUdeviceptr)
COPY_ASYNC(3020, cuMemcpyHtoDAsync_v2, CUdeviceptr, const void *)
COPY_ASYNC(3020, cuMemcpyDtoHAsync_v2, void *, CUdeviceptr)
COPY_ASYNC(3020, cuMemcpyDtoDAsync_v2, CUdeviceptr, CUdeviceptr)

/* Addresses are unique across devices, so a peer copy is a copy. */
CUAPI(4000, cuMemcpyPeer, CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx,
      size_t bytes)
{
	(void)to_ctx, (void)from_ctx;
	return copy_flat(to, from, bytes, NULL, true);
}

CUAPI(4000, cuMemcpyPeerAsync, CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx,
      size_t bytes, CUstream stream)
{
	(void)to_ctx, (void)from_ctx;
	return copy_flat(to, from, bytes, stream, false);
}
