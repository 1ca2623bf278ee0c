/* copy.h - a box of bytes to copy, in the terms that every memcpy form reduces to. */
#ifndef EMU_CUDA_COPY_H
#define EMU_CUDA_COPY_H

#include "core.h"

struct box {
	uint64_t to, from;
	size_t width, height, depth;
	size_t to_pitch, from_pitch, to_slice, from_slice;
};

CUresult copy_box(const struct box *box, CUstream stream, bool wait);
CUresult copy_flat(uint64_t to, uint64_t from, size_t bytes, CUstream stream, bool wait);

/* What the entry points with the suffixes _ptds and _ptsz make of stream 0. */
#define PER_THREAD(stream) ((stream) ? (stream) : CU_STREAM_PER_THREAD)
#define PER_THREAD_SINCE   7000 /* of calls that are older */

#endif
