/*
 * beatpage.c - lets the GPU write into the shared beat file. Where a driver or sandbox cannot pin a file's pages, the GPU
 * writes into pinned memory of its own and a thread copies it over every few microseconds: exact enough, and said so.
 */
#include "gpu.h"

#include <pthread.h>
#include <string.h>

enum { HOST_MAP = 3, COPY_US = 5 };
static struct {
	struct beat *beat;
	volatile uint64_t *from;
} mirror;

static void *copy_over(void *unused)
{
	(void)unused;
	while (!atomic_load(&mirror.beat->done)) {
		mirror.beat->at = mirror.from[0];
		mirror.beat->mark = mirror.from[1];
		for (unsigned i = 0; i < mirror.beat->slots && i < BEAT_SLOTS; i++)
			mirror.beat->slot[i] = mirror.from[2 + i];
		sleep_us(COPY_US);
	}
	return NULL;
}

CUresult beat_share(struct beat *beat, struct beat_page *page)
{
	enum { BYTES = (2 + BEAT_SLOTS) * 8 };
	CUdeviceptr at;
	void *pinned;
	pthread_t thread;

	if (!gpu.cuMemHostRegister_v2(beat, BEAT_BYTES, HOST_MAP)) {
		CUresult code = gpu.cuMemHostGetDevicePointer_v2(&at, beat, 0);
		*page = (struct beat_page){at + offsetof(struct beat, at), at + offsetof(struct beat, slot),
		                           &beat->mark};
		return code;
	}
	CUresult code = gpu.cuMemHostAlloc(&pinned, BYTES, HOST_MAP);
	if (!code)
		code = gpu.cuMemHostGetDevicePointer_v2(&at, pinned, 0);
	if (code)
		return code;
	memset(pinned, 0, BYTES);
	mirror.beat = beat;
	mirror.from = pinned;
	beat->is_mirrored = 1;
	*page = (struct beat_page){at, at + 16, mirror.from + 1};
	return pthread_create(&thread, NULL, copy_over, NULL) ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}
