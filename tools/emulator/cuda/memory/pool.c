/*
 * pool.c - stream-ordered allocation. A pool hands out device memory at once and takes it back when the stream comes by;
 * it keeps nothing, as with the default release threshold of 0.
 */
#include "memory.h"
#include "turn.h"

#include <stdlib.h>

#define MAGIC_POOL 0x504f4f4cu

enum { FIRST_ATTRIBUTE = 1, RELEASE_THRESHOLD = 4, RESERVED_NOW = 5, USED_HIGH = 8 };

struct pool {
	uint32_t magic;
	struct device *dev;
	uint64_t used, highest, attributes[USED_HIGH + 1];
};

struct free_work {
	struct work work;
	struct range *range;
};

static HANDLE(pool_from, CUmemoryPool, struct pool, MAGIC_POOL)

        static struct pool *pool_new(struct device *dev)
{
	struct pool *pool = zeroed(sizeof(*pool));

	pool->magic = MAGIC_POOL;
	pool->dev = dev;
	return pool;
}

static struct pool *pool_of(struct device *dev)
{
	LOCKED(&emu.lock);
	if (!dev->default_pool)
		dev->pool = dev->default_pool = pool_new(dev);
	return dev->pool;
}

static void account(struct pool *pool, int64_t bytes)
{
	LOCKED(&memory.lock);
	pool->used += (uint64_t)bytes;
	if (pool->used > pool->highest)
		pool->highest = pool->used;
}

static CUresult alloc_from(struct pool *pool, CUdeviceptr *out, size_t bytes, CUstream handle)
{
	struct stream *stream;
	struct range *range;

	TRY(stream_resolve(handle, &stream));
	REFUSE_IF(!out || !bytes, CUDA_ERROR_INVALID_VALUE);
	pthread_mutex_lock(&emu.lock);
	bool is_captured = stream->capture != NULL;
	pthread_mutex_unlock(&emu.lock);
	if (is_captured)
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; /* memory nodes are not emulated */
	pool = pool ? pool : pool_of(stream->ctx->dev);
	TRY(device_alloc(stream->ctx, bytes, pool, &range));
	account(pool, (int64_t)bytes);
	*out = range->base;
	return CUDA_SUCCESS;
}

CUAPI(11020, cuMemAllocAsync, CUdeviceptr *out, size_t bytes, CUstream stream)
{
	return alloc_from(NULL, out, bytes, stream);
}

CUAPI(11020, cuMemAllocFromPoolAsync, CUdeviceptr *out, size_t bytes, CUmemoryPool handle, CUstream stream)
{
	struct pool *pool = pool_from(handle);

	return pool ? alloc_from(pool, out, bytes, stream) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult run_free(struct work *work, struct channel *channel)
{
	struct range *range = ((struct free_work *)work)->range;

	turn_end(channel); /* the driver frees from the host */
	if (range->pool)
		account(range->pool, -(int64_t)range->bytes);
	return device_free(range);
}

CUAPI(11020, cuMemFreeAsync, CUdeviceptr address, CUstream handle)
{
	struct stream *stream;
	struct range *range = range_at(address, true);

	TRY(stream_resolve(handle, &stream));
	REFUSE_IF(!range || range->kind != RANGE_DEVICE, CUDA_ERROR_INVALID_VALUE);
	struct free_work *work = work_new(sizeof(*work), run_free);
	work->work.node_type = -1;
	work->range = range;
	return work_submit(stream, LANE_COMPUTE, &work->work);
}

static CUresult device_pool(CUmemoryPool *out, CUdevice handle, bool is_default)
{
	struct device *dev;

	TRY(device_of(handle, &dev));
	REFUSE_IF(!out, CUDA_ERROR_INVALID_VALUE);
	struct pool *pool = pool_of(dev);
	*out = (CUmemoryPool)(is_default ? dev->default_pool : pool);
	return CUDA_SUCCESS;
}

CUAPI(11020, cuDeviceGetDefaultMemPool, CUmemoryPool *out, CUdevice dev)
{
	return device_pool(out, dev, true);
}

CUAPI(11020, cuDeviceGetMemPool, CUmemoryPool *out, CUdevice dev)
{
	return device_pool(out, dev, false);
}

CUAPI(11020, cuDeviceSetMemPool, CUdevice handle, CUmemoryPool pool_handle)
{
	struct device *dev = device_at(handle);
	struct pool *pool = pool_from(pool_handle);

	if (!dev || !pool || pool->dev != dev)
		return dev ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
	pool_of(dev);
	LOCKED(&emu.lock);
	dev->pool = pool;
	return CUDA_SUCCESS;
}

CUAPI(13000, cuMemGetDefaultMemPool, CUmemoryPool *out, const CUmemLocation *location, int type)
{
	REFUSE_IF(!location || type != CU_MEM_TYPE_PINNED || location->type != CU_MEM_LOCATION_DEVICE,
	          CUDA_ERROR_NOT_SUPPORTED);
	return device_pool(out, location->id, true);
}

CUAPI(13000, cuMemGetMemPool, CUmemoryPool *out, const CUmemLocation *location, int type)
{
	REFUSE_IF(!location || type != CU_MEM_TYPE_PINNED || location->type != CU_MEM_LOCATION_DEVICE,
	          CUDA_ERROR_NOT_SUPPORTED);
	return device_pool(out, location->id, false);
}

CUAPI(11020, cuMemPoolCreate, CUmemoryPool *out, const CUmemPoolProps *props)
{
	TRY(driver_check());
	REFUSE_IF(!out || !props || props->alloc_type != CU_MEM_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
	REFUSE_IF(props->location.type != CU_MEM_LOCATION_DEVICE || props->handle_types,
	          CUDA_ERROR_NOT_SUPPORTED);
	struct device *dev = device_at(props->location.id);
	REFUSE_IF(!dev, CUDA_ERROR_INVALID_DEVICE);
	*out = (CUmemoryPool)pool_new(dev);
	return CUDA_SUCCESS;
}

/* Memory still out keeps its pointer to the pool for its books, so the pool itself is never freed. */
CUAPI(11020, cuMemPoolDestroy, CUmemoryPool handle)
{
	struct pool *pool = pool_from(handle);

	REFUSE_IF(!pool || pool == pool->dev->default_pool, CUDA_ERROR_INVALID_VALUE);
	pthread_mutex_lock(&emu.lock);
	if (pool->dev->pool == pool)
		pool->dev->pool = pool->dev->default_pool;
	pthread_mutex_unlock(&emu.lock);
	pool->magic = 0;
	return CUDA_SUCCESS;
}

CUAPI(11020, cuMemPoolTrimTo, CUmemoryPool handle, size_t keep)
{
	(void)keep;
	return pool_from(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static size_t attribute_bytes(int attribute)
{
	return attribute < RELEASE_THRESHOLD ? sizeof(int) : sizeof(uint64_t);
}

CUAPI(11020, cuMemPoolSetAttribute, CUmemoryPool handle, int attribute, void *value)
{
	struct pool *pool = pool_from(handle);

	REFUSE_IF(!pool || !value || attribute < FIRST_ATTRIBUTE || attribute > USED_HIGH,
	          CUDA_ERROR_INVALID_VALUE);
	LOCKED(&memory.lock);
	memcpy(&pool->attributes[attribute], value, attribute_bytes(attribute));
	if (attribute > RESERVED_NOW)
		pool->highest = pool->used;
	return CUDA_SUCCESS;
}

CUAPI(11020, cuMemPoolGetAttribute, CUmemoryPool handle, int attribute, void *value)
{
	const struct pool *pool = pool_from(handle);

	REFUSE_IF(!pool || !value || attribute < FIRST_ATTRIBUTE || attribute > USED_HIGH,
	          CUDA_ERROR_INVALID_VALUE);
	pthread_mutex_lock(&memory.lock);
	uint64_t now = pool->attributes[attribute];
	if (attribute >= RESERVED_NOW) /* reserved now, reserved at most, used now, used at most */
		now = (attribute - RESERVED_NOW) % 2 ? pool->highest : pool->used;
	pthread_mutex_unlock(&memory.lock);
	memcpy(value, &now, attribute_bytes(attribute));
	return CUDA_SUCCESS;
}

CUAPI(11020, cuMemPoolSetAccess, CUmemoryPool handle, const CUmemAccessDesc *descs, size_t count)
{
	return pool_from(handle) && (descs || !count) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUAPI(11020, cuMemPoolGetAccess, int *out, CUmemoryPool handle, const CUmemLocation *location)
{
	REFUSE_IF(!out || !pool_from(handle) || !location, CUDA_ERROR_INVALID_VALUE);
	*out = CU_ACCESS_READWRITE;
	return CUDA_SUCCESS;
}
