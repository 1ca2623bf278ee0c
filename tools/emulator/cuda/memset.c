/* memset.c - fills of 1, 2 and 4 byte patterns, flat and pitched. They run on compute, as the card's do. */
#include "copy.h"
#include "turn.h"

#define STEP_BYTES 65536u

struct fill_work {
	struct work work;
	uint64_t to;
	size_t pitch, width, height; /* width in elements */
	unsigned element;
	uint32_t value;
};

static void fill_some(uint64_t to, const struct fill_work *fill, size_t count)
{
	if (fill->element == 1) {
		memset((void *)(uintptr_t)to, (int)(fill->value & 0xffu), count);
		return;
	}
	for (size_t i = 0; i < count; i++)
		memcpy((void *)(uintptr_t)(to + i * fill->element), &fill->value, fill->element);
}

static CUresult run_fill(struct work *work, struct channel *channel)
{
	const struct fill_work *fill = (const struct fill_work *)work;
	size_t step = STEP_BYTES / fill->element;

	for (size_t y = 0; y < fill->height; y++) {
		for (size_t x = 0; x < fill->width; x += step) {
			if (!turn_check(channel))
				return CUDA_SUCCESS;
			fill_some(fill->to + y * fill->pitch + x * fill->element, fill,
			          fill->width - x < step ? fill->width - x : step);
		}
	}
	return CUDA_SUCCESS;
}

static CUresult fill(struct fill_work shape, CUstream handle, bool wait)
{
	struct stream *stream;
	CUresult result = stream_resolve(handle, &stream);

	if (result)
		return result;
	if (!shape.width || !shape.height)
		return CUDA_SUCCESS;
	if (!shape.to || shape.to % shape.element)
		return CUDA_ERROR_INVALID_VALUE;
	struct fill_work *work = work_new(sizeof(*work), run_fill);
	shape.work = work->work;
	*work = shape;
	work->work.node_type = NODE_MEMSET;
	/* Host-side memset calls return before the device is done, except on memory the host can see. */
	return wait ? work_submit_wait(stream, LANE_COMPUTE, &work->work)
	            : work_submit(stream, LANE_COMPUTE, &work->work);
}

#define FILL(name, type)                                                                                     \
	CUAPI(cuMemsetD##name##_v2, CUdeviceptr to, type value, size_t count)                                \
	{                                                                                                    \
		return fill((struct fill_work){.to = to,                                                     \
		                               .width = count,                                               \
		                               .height = 1,                                                  \
		                               .element = sizeof(type),                                      \
		                               .value = value},                                              \
		            NULL, true);                                                                     \
	}                                                                                                    \
	CUAPI(cuMemsetD##name##_v2_ptds, CUdeviceptr to, type value, size_t count)                           \
	{                                                                                                    \
		return fill((struct fill_work){.to = to,                                                     \
		                               .width = count,                                               \
		                               .height = 1,                                                  \
		                               .element = sizeof(type),                                      \
		                               .value = value},                                              \
		            CU_STREAM_PER_THREAD, true);                                                     \
	}                                                                                                    \
	CUAPI(cuMemsetD##name##Async, CUdeviceptr to, type value, size_t count, CUstream stream)             \
	{                                                                                                    \
		return fill((struct fill_work){.to = to,                                                     \
		                               .width = count,                                               \
		                               .height = 1,                                                  \
		                               .element = sizeof(type),                                      \
		                               .value = value},                                              \
		            stream, false);                                                                  \
	}                                                                                                    \
	CUAPI(cuMemsetD##name##Async_ptsz, CUdeviceptr to, type value, size_t count, CUstream stream)        \
	{                                                                                                    \
		return cuMemsetD##name##Async(to, value, count, PER_THREAD(stream));                         \
	}                                                                                                    \
	CUAPI(cuMemsetD2D##name##_v2, CUdeviceptr to, size_t pitch, type value, size_t width, size_t height) \
	{                                                                                                    \
		return fill((struct fill_work){.to = to,                                                     \
		                               .pitch = pitch,                                               \
		                               .width = width,                                               \
		                               .height = height,                                             \
		                               .element = sizeof(type),                                      \
		                               .value = value},                                              \
		            NULL, true);                                                                     \
	}                                                                                                    \
	CUAPI(cuMemsetD2D##name##_v2_ptds, CUdeviceptr to, size_t pitch, type value, size_t width,           \
	      size_t height)                                                                                 \
	{                                                                                                    \
		return fill((struct fill_work){.to = to,                                                     \
		                               .pitch = pitch,                                               \
		                               .width = width,                                               \
		                               .height = height,                                             \
		                               .element = sizeof(type),                                      \
		                               .value = value},                                              \
		            CU_STREAM_PER_THREAD, true);                                                     \
	}                                                                                                    \
	CUAPI(cuMemsetD2D##name##Async, CUdeviceptr to, size_t pitch, type value, size_t width,              \
	      size_t height, CUstream stream)                                                                \
	{                                                                                                    \
		return fill((struct fill_work){.to = to,                                                     \
		                               .pitch = pitch,                                               \
		                               .width = width,                                               \
		                               .height = height,                                             \
		                               .element = sizeof(type),                                      \
		                               .value = value},                                              \
		            stream, false);                                                                  \
	}                                                                                                    \
	CUAPI(cuMemsetD2D##name##Async_ptsz, CUdeviceptr to, size_t pitch, type value, size_t width,         \
	      size_t height, CUstream stream)                                                                \
	{                                                                                                    \
		return cuMemsetD2D##name##Async(to, pitch, value, width, height, PER_THREAD(stream));        \
	}
FILL(8, uint8_t)
FILL(16, uint16_t)
FILL(32, uint32_t)
