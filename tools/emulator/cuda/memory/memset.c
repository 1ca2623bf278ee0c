/*
 * memset.c - fills of 1, 2 and 4 byte patterns, flat and pitched. They run on compute, as the card's do, for as long as
 * the card would take. Zeroing whole pages gives them back to the machine, which is as good as writing zeros and leaves a
 * pool that is zeroed and not used without cost in host memory.
 */
#include "copy.h"
#include "turn.h"

#include <sys/mman.h>

#define STEP_BYTES 65536u
#define DROP_BYTES (2u << 20)
#define PAGE       4096u
#define FILL_SINCE 3020

struct fill_work {
	struct work work;
	uint64_t to;
	size_t pitch, width, height; /* width in elements */
	unsigned element;
	uint32_t value;
};

static void write_some(uint64_t to, const struct fill_work *fill, size_t count)
{
	if (fill->element == 1) {
		memset((void *)(uintptr_t)to, (int)(fill->value & 0xffu), count);
		return;
	}
	for (size_t i = 0; i < count; i++)
		memcpy((void *)(uintptr_t)(to + i * fill->element), &fill->value, fill->element);
}

/* The memory of a hole or of the host cannot be dropped: that is written, and faults as it should. */
static size_t drop_some(uint64_t to, const struct fill_work *fill, size_t bytes)
{
	size_t whole = bytes < DROP_BYTES ? bytes / PAGE * PAGE : DROP_BYTES;

	if (fill->value || to % PAGE || !whole || madvise((void *)(uintptr_t)to, whole, MADV_REMOVE))
		return 0;
	return whole;
}

static bool fill_row(struct channel *channel, const struct fill_work *fill, uint64_t to)
{
	size_t bytes = fill->width * fill->element, done = 0;

	while (done < bytes) {
		size_t step = bytes - done < STEP_BYTES ? bytes - done : STEP_BYTES, dropped;

		if (!turn_check(channel))
			return false;
		dropped = drop_some(to + done, fill, bytes - done);
		if (!dropped)
			write_some(to + done, fill, step / fill->element);
		done += dropped ? dropped : step;
	}
	return true;
}

static CUresult run_fill(struct work *work, struct channel *channel)
{
	const struct fill_work *fill = (const struct fill_work *)work;
	uint64_t clock = turn_clock(channel), gbps = emu.board->fill_gbps;

	for (size_t y = 0; y < fill->height && !emu.board->silent_fills; y++)
		if (!fill_row(channel, fill, fill->to + y * fill->pitch))
			return CUDA_SUCCESS;
	if (gbps)
		turn_run_until(channel, clock + real_ns(fill->width * fill->element * fill->height / gbps));
	return CUDA_SUCCESS;
}

static CUresult fill(struct fill_work shape, CUstream handle, bool wait)
{
	METERED(FILL);
	struct stream *stream;

	TRY(stream_resolve(handle, &stream));
	if (!shape.width || !shape.height)
		return CUDA_SUCCESS;
	REFUSE_IF(!shape.to || shape.to % shape.element, CUDA_ERROR_INVALID_VALUE);
	struct fill_work *work = work_new(sizeof(*work), run_fill);
	shape.work = work->work;
	*work = shape;
	work->work.node_type = NODE_MEMSET;
	/* Host-side memset calls return before the device is done, except on memory the host can see. */
	return wait ? work_submit_wait(stream, LANE_COMPUTE, &work->work)
	            : work_submit(stream, LANE_COMPUTE, &work->work);
}

#define FLAT(type) \
	((struct fill_work){.to = to, .width = count, .height = 1, .element = sizeof(type), .value = value})
#define PITCHED(type)                                \
	((struct fill_work){.to = to,                \
	                    .pitch = pitch,          \
	                    .width = width,          \
	                    .height = height,        \
	                    .element = sizeof(type), \
	                    .value = value})
#define PLANE CUdeviceptr to, size_t pitch
#define SIZE  size_t width, size_t height

#define FILL(name, type)                                                                                     \
	CUAPI(FILL_SINCE, cuMemsetD##name##_v2, CUdeviceptr to, type value, size_t count)                    \
	{                                                                                                    \
		return fill(FLAT(type), NULL, true);                                                         \
	}                                                                                                    \
	CUAPI(PER_THREAD_SINCE, cuMemsetD##name##_v2_ptds, CUdeviceptr to, type value, size_t count)         \
	{                                                                                                    \
		return fill(FLAT(type), CU_STREAM_PER_THREAD, true);                                         \
	}                                                                                                    \
	CUAPI(FILL_SINCE, cuMemsetD##name##Async, CUdeviceptr to, type value, size_t count, CUstream stream) \
	{                                                                                                    \
		return fill(FLAT(type), stream, false);                                                      \
	}                                                                                                    \
	CUAPI(PER_THREAD_SINCE, cuMemsetD##name##Async_ptsz, CUdeviceptr to, type value, size_t count,       \
	      CUstream stream)                                                                               \
	{                                                                                                    \
		return fill(FLAT(type), PER_THREAD(stream), false);                                          \
	}                                                                                                    \
	CUAPI(FILL_SINCE, cuMemsetD2D##name##_v2, PLANE, type value, SIZE)                                   \
	{                                                                                                    \
		return fill(PITCHED(type), NULL, true);                                                      \
	}                                                                                                    \
	CUAPI(PER_THREAD_SINCE, cuMemsetD2D##name##_v2_ptds, PLANE, type value, SIZE)                        \
	{                                                                                                    \
		return fill(PITCHED(type), CU_STREAM_PER_THREAD, true);                                      \
	}                                                                                                    \
	CUAPI(FILL_SINCE, cuMemsetD2D##name##Async, PLANE, type value, SIZE, CUstream stream)                \
	{                                                                                                    \
		return fill(PITCHED(type), stream, false);                                                   \
	}                                                                                                    \
	CUAPI(PER_THREAD_SINCE, cuMemsetD2D##name##Async_ptsz, PLANE, type value, SIZE, CUstream stream)     \
	{                                                                                                    \
		return fill(PITCHED(type), PER_THREAD(stream), false);                                       \
	}
FILL(8, uint8_t)
FILL(16, uint16_t)
FILL(32, uint32_t)
