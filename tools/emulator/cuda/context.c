/* context.c - contexts: the primary one of each device, others, and each thread's stack of current ones. */
#include "core.h"
#include "memory.h"

#include <stdlib.h>

static _Thread_local struct context *stack[CONTEXT_STACK];
static _Thread_local unsigned depth;

bool context_valid(const void *handle)
{
	LOCKED(&emu.lock);
	const struct context *ctx = emu.contexts;
	while (ctx && ctx != handle)
		ctx = ctx->next;
	return ctx != NULL;
}

static struct context *context_peek(void)
{
	return depth ? stack[depth - 1] : NULL;
}

CUresult context_current(struct context **out)
{
	TRY(driver_check());
	*out = context_peek();
	REFUSE_IF(!*out, CUDA_ERROR_INVALID_CONTEXT);
	REFUSE_IF(!context_valid(*out), CUDA_ERROR_CONTEXT_IS_DESTROYED);
	return (*out)->sticky;
}

static CUresult create(struct device *dev, unsigned flags, bool is_primary, struct context **out)
{
	static const uint64_t limits[10] = {1024, 1048576, 8388608, 2, 2048, 64, 0, 0, 0, 0};
	struct context *ctx = calloc(1, sizeof(*ctx));

	REFUSE_IF(!ctx, CUDA_ERROR_OUT_OF_MEMORY);
	ctx->magic = MAGIC_CONTEXT;
	ctx->dev = dev;
	ctx->flags = flags;
	ctx->is_primary = is_primary;
	memcpy(ctx->limits, limits, sizeof(limits));
	CUresult result = channels_create(ctx);
	if (result) {
		free(ctx);
		return result;
	}
	pthread_mutex_lock(&emu.lock);
	ctx->id = ++emu.next_id;
	ctx->legacy = stream_make(ctx, 0, 0);
	ctx->next = emu.contexts;
	emu.contexts = ctx;
	pthread_mutex_unlock(&emu.lock);
	*out = ctx;
	return CUDA_SUCCESS;
}

/* Waits for the work, then frees: a context whose channels are off keeps its destroyer waiting, as the real one. */
static void destroy(struct context *ctx)
{
	context_wait(ctx);
	pthread_mutex_lock(&emu.lock);
	UNLINK(emu.contexts, ctx);
	pthread_mutex_unlock(&emu.lock);
	channels_destroy(ctx);
	memory_forget_context(ctx);
	pthread_mutex_lock(&emu.lock);
	while (ctx->streams)
		stream_free_locked(ctx->streams);
	deps_clear(&ctx->orphans);
	pthread_mutex_unlock(&emu.lock);
	ctx->magic = 0;
	free(ctx);
}

static pthread_mutex_t primary_lock = PTHREAD_MUTEX_INITIALIZER;

CUAPI(7000, cuDevicePrimaryCtxRetain, CUcontext *out, CUdevice handle)
{
	struct device *dev;
	CUresult result = CUDA_SUCCESS;

	TRY(device_of(handle, &dev));
	REFUSE_IF(!out, CUDA_ERROR_INVALID_VALUE);
	LOCKED(&primary_lock);
	if (!dev->primary) {
		struct context *ctx = NULL;

		result = create(dev, __atomic_load_n(&dev->primary_flags, __ATOMIC_RELAXED), true, &ctx);
		__atomic_store_n(&dev->primary, ctx, __ATOMIC_RELEASE); /* cuDevicePrimaryCtxGetState */
	}
	if (!result) {
		dev->primary_refs++;
		*out = (CUcontext)dev->primary;
	}
	return result;
}

static CUresult primary_drop(CUdevice handle, bool reset)
{
	struct device *dev;

	TRY(device_of(handle, &dev));
	LOCKED(&primary_lock);
	REFUSE_IF(!dev->primary && !reset, CUDA_ERROR_INVALID_CONTEXT);
	if (dev->primary && (reset || --dev->primary_refs == 0)) {
		destroy(dev->primary);
		__atomic_store_n(&dev->primary, NULL, __ATOMIC_RELEASE);
		dev->primary_refs = 0;
	}
	return CUDA_SUCCESS;
}

CUAPI(11000, cuDevicePrimaryCtxRelease_v2, CUdevice handle)
{
	return primary_drop(handle, false);
}

CUAPI(11000, cuDevicePrimaryCtxReset_v2, CUdevice handle)
{
	return primary_drop(handle, true);
}

/* The first forms, still exported for programs that were linked against CUDA 7 to 10. */
CUAPI(7000, cuDevicePrimaryCtxRelease, CUdevice handle)
{
	return primary_drop(handle, false);
}

CUAPI(7000, cuDevicePrimaryCtxReset, CUdevice handle)
{
	return primary_drop(handle, true);
}

CUAPI(7000, cuDevicePrimaryCtxGetState, CUdevice handle, unsigned *flags, int *active)
{
	struct device *dev;

	TRY(device_of(handle, &dev));
	/* Without the lock: a thread that destroys a context whose channels are off would hold it for long. */
	if (flags)
		*flags = __atomic_load_n(&dev->primary_flags, __ATOMIC_RELAXED);
	if (active)
		*active = __atomic_load_n(&dev->primary, __ATOMIC_ACQUIRE) != NULL;
	return CUDA_SUCCESS;
}

CUAPI(11000, cuDevicePrimaryCtxSetFlags_v2, CUdevice handle, unsigned flags)
{
	struct device *dev;

	TRY(device_of(handle, &dev));
	__atomic_store_n(&dev->primary_flags, flags, __ATOMIC_RELAXED);
	LOCKED(&primary_lock);
	if (dev->primary)
		__atomic_store_n(&dev->primary->flags, flags, __ATOMIC_RELAXED);
	return CUDA_SUCCESS;
}

CUAPI(7000, cuDevicePrimaryCtxSetFlags, CUdevice handle, unsigned flags)
{
	return cuDevicePrimaryCtxSetFlags_v2(handle, flags);
}

CUAPI(4000, cuCtxPushCurrent_v2, CUcontext handle)
{
	TRY(driver_check());
	REFUSE_IF(!context_valid(handle), CUDA_ERROR_INVALID_CONTEXT);
	REFUSE_IF(depth == CONTEXT_STACK, CUDA_ERROR_OUT_OF_MEMORY);
	stack[depth++] = (struct context *)handle;
	return CUDA_SUCCESS;
}

CUAPI(4000, cuCtxPopCurrent_v2, CUcontext *out)
{
	TRY(driver_check());
	REFUSE_IF(!depth, CUDA_ERROR_INVALID_CONTEXT);
	depth--;
	if (out)
		*out = (CUcontext)stack[depth];
	return CUDA_SUCCESS;
}

CUAPI(4000, cuCtxSetCurrent, CUcontext handle)
{
	TRY(driver_check());
	if (!handle) {
		depth -= depth > 0;
		return CUDA_SUCCESS;
	}
	REFUSE_IF(!context_valid(handle), CUDA_ERROR_INVALID_CONTEXT);
	depth += depth == 0;
	stack[depth - 1] = (struct context *)handle;
	return CUDA_SUCCESS;
}

CUAPI(4000, cuCtxGetCurrent, CUcontext *out)
{
	TRY(driver_check());
	REFUSE_IF(!out, CUDA_ERROR_INVALID_VALUE);
	*out = (CUcontext)context_peek();
	return CUDA_SUCCESS;
}

static CUresult create_current(CUcontext *out, unsigned flags, CUdevice handle)
{
	struct device *dev;
	struct context *ctx = NULL;

	TRY(device_of(handle, &dev));
	REFUSE_IF(!out, CUDA_ERROR_INVALID_VALUE);
	TRY(create(dev, flags, false, &ctx));
	*out = (CUcontext)ctx;
	return cuCtxPushCurrent_v2(*out);
}

CUAPI(3020, cuCtxCreate_v2, CUcontext *out, unsigned flags, CUdevice handle)
{
	return create_current(out, flags, handle);
}

CUAPI(11040, cuCtxCreate_v3, CUcontext *out, const void *affinity, int count, unsigned flags, CUdevice handle)
{
	return affinity && count ? CUDA_ERROR_NOT_SUPPORTED : create_current(out, flags, handle);
}

CUAPI(12050, cuCtxCreate_v4, CUcontext *out, const void *params, unsigned flags, CUdevice handle)
{
	(void)params; /* execution affinity and graphics interoperation ask for less, never for more */
	return create_current(out, flags, handle);
}

CUAPI(4000, cuCtxDestroy_v2, CUcontext handle)
{
	TRY(driver_check());
	REFUSE_IF(!context_valid(handle) || ((struct context *)handle)->is_primary,
	          CUDA_ERROR_INVALID_CONTEXT);
	if (context_peek() == (struct context *)handle)
		depth--;
	destroy((struct context *)handle);
	return CUDA_SUCCESS;
}
