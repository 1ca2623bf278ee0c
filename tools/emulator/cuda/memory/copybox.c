/* copybox.c - the memcpy forms that copy boxes, and lists of copies. Arrays are not emulated. */
#include "copy.h"

static bool side2d(const struct copy2d_side *side, uint64_t *address, size_t *pitch)
{
	bool is_host = side->type == CU_MEMORYTYPE_HOST;

	if (side->type == CU_MEMORYTYPE_ARRAY)
		return false;
	*pitch = side->pitch;
	*address = (is_host ? (uintptr_t)side->host : side->device) + side->y * side->pitch + side->x;
	return true;
}

static CUresult copy2d(const CUDA_MEMCPY2D *copy, CUstream stream, bool wait)
{
	struct box box = {.depth = 1};

	REFUSE_IF(!copy, CUDA_ERROR_INVALID_VALUE);
	box.width = copy->width;
	box.height = copy->height;
	REFUSE_IF(!side2d(&copy->src, &box.from, &box.from_pitch) ||
	                  !side2d(&copy->dst, &box.to, &box.to_pitch),
	          CUDA_ERROR_NOT_SUPPORTED);
	REFUSE_IF(box.height > 1 && (box.from_pitch < box.width || box.to_pitch < box.width),
	          CUDA_ERROR_INVALID_VALUE);
	return copy_box(&box, stream, wait);
}

static bool side3d(const struct copy3d_side *side, uint64_t *address, size_t *pitch, size_t *slice)
{
	bool is_host = side->type == CU_MEMORYTYPE_HOST;

	if (side->type == CU_MEMORYTYPE_ARRAY)
		return false;
	*pitch = side->pitch;
	*slice = side->pitch * side->height;
	*address = (is_host ? (uintptr_t)side->host : side->device) + side->z * *slice +
	           side->y * side->pitch + side->x;
	return true;
}

static CUresult copy3d(const CUDA_MEMCPY3D *copy, CUstream stream, bool wait)
{
	struct box box = {0};

	REFUSE_IF(!copy, CUDA_ERROR_INVALID_VALUE);
	box.width = copy->width;
	box.height = copy->height;
	box.depth = copy->depth;
	if (!side3d(&copy->src, &box.from, &box.from_pitch, &box.from_slice) ||
	    !side3d(&copy->dst, &box.to, &box.to_pitch, &box.to_slice))
		return CUDA_ERROR_NOT_SUPPORTED;
	return copy_box(&box, stream, wait);
}

#define BOX(since, name, type, copy)                             \
	CUAPI(since, name, const type *params)                   \
	{                                                        \
		return copy(params, NULL, true);                 \
	}                                                        \
	CUAPI(PER_THREAD_SINCE, name##_ptds, const type *params) \
	{                                                        \
		return copy(params, CU_STREAM_PER_THREAD, true); \
	}
#define BOX_ASYNC(since, name, type, copy)                                        \
	CUAPI(since, name, const type *params, CUstream stream)                   \
	{                                                                         \
		return copy(params, stream, false);                               \
	}                                                                         \
	CUAPI(PER_THREAD_SINCE, name##_ptsz, const type *params, CUstream stream) \
	{                                                                         \
		return copy(params, PER_THREAD(stream), false);                   \
	}
BOX(3020, cuMemcpy2D_v2, CUDA_MEMCPY2D, copy2d)
BOX(3020, cuMemcpy2DUnaligned_v2, CUDA_MEMCPY2D, copy2d)
BOX(3020, cuMemcpy3D_v2, CUDA_MEMCPY3D, copy3d)
BOX(4000, cuMemcpy3DPeer, CUDA_MEMCPY3D, copy3d)
BOX_ASYNC(3020, cuMemcpy2DAsync_v2, CUDA_MEMCPY2D, copy2d)
BOX_ASYNC(3020, cuMemcpy3DAsync_v2, CUDA_MEMCPY3D, copy3d)
BOX_ASYNC(4000, cuMemcpy3DPeerAsync, CUDA_MEMCPY3D, copy3d)

static CUresult batch(const CUdeviceptr *to, const CUdeviceptr *from, const size_t *bytes, size_t count,
                      size_t *failed, CUstream stream)
{
	REFUSE_IF(!to || !from || !bytes || !count || (uintptr_t)stream <= 1, CUDA_ERROR_INVALID_VALUE);
	for (size_t i = 0; i < count; i++) {
		CUresult result = copy_flat(to[i], from[i], bytes[i], stream, false);
		if (!result)
			continue;
		if (failed)
			*failed = i;
		return result;
	}
	return CUDA_SUCCESS;
}

CUAPI(12080, cuMemcpyBatchAsync, const CUdeviceptr *to, const CUdeviceptr *from, const size_t *bytes,
      size_t count, const void *attributes, const size_t *indexes, size_t attribute_count, size_t *failed,
      CUstream stream)
{
	(void)attributes, (void)indexes, (void)attribute_count;
	return batch(to, from, bytes, count, failed, stream);
}

CUAPI(13000, cuMemcpyBatchAsync_v2, const CUdeviceptr *to, const CUdeviceptr *from, const size_t *bytes,
      size_t count, const void *attributes, const size_t *indexes, size_t attribute_count, CUstream stream)
{
	(void)attributes, (void)indexes, (void)attribute_count;
	return batch(to, from, bytes, count, NULL, stream);
}

CUAPI(12080, cuMemcpyBatchAsync_ptsz, const CUdeviceptr *to, const CUdeviceptr *from, const size_t *bytes,
      size_t count, const void *attributes, const size_t *indexes, size_t attribute_count, size_t *failed,
      CUstream stream)
{
	(void)attributes, (void)indexes, (void)attribute_count;
	return batch(to, from, bytes, count, failed, PER_THREAD(stream));
}

CUAPI(13000, cuMemcpyBatchAsync_v2_ptsz, const CUdeviceptr *to, const CUdeviceptr *from, const size_t *bytes,
      size_t count, const void *attributes, const size_t *indexes, size_t attribute_count, CUstream stream)
{
	(void)attributes, (void)indexes, (void)attribute_count;
	return batch(to, from, bytes, count, NULL, PER_THREAD(stream));
}
