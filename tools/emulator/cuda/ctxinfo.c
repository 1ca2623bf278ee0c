/* ctxinfo.c - what a context says about itself, its limits, and the calls kept for callers that make them in passing. */
#include "core.h"

#define API_VERSION    3020u
#define LIMITS         10
#define SCHEDULE_FLAGS 0x3fu

/* The context that is asked about; NULL and *result when there is none, or nowhere to put the answer. */
static struct context *ask(CUcontext handle, const void *out, CUresult *result)
{
	struct context *ctx = (struct context *)handle;

	if (!handle)
		*result = context_current(&ctx);
	else
		*result = context_valid(handle) ? driver_check() : CUDA_ERROR_INVALID_CONTEXT;
	if (!*result && !out)
		*result = CUDA_ERROR_INVALID_VALUE;
	return *result ? NULL : ctx;
}

#define ANSWER(handle, value)                                    \
	{                                                        \
		CUresult result;                                 \
		struct context *ctx = ask(handle, out, &result); \
		if (ctx)                                         \
			*out = (value);                          \
		return result;                                   \
	}

/* Answers on a context that died, too. */
CUAPI(2000, cuCtxGetDevice, CUdevice *out)
{
	struct context *ctx = NULL;
	CUresult result = context_current(&ctx);

	if (!ctx)
		return result;
	REFUSE_IF(!out, CUDA_ERROR_INVALID_VALUE);
	*out = ctx->dev->ordinal;
	return CUDA_SUCCESS;
}

CUAPI(13000, cuCtxGetDevice_v2, CUdevice *out, CUcontext handle)
ANSWER(handle, ctx->dev->ordinal)

CUAPI(7000, cuCtxGetFlags, unsigned *out)
ANSWER(NULL, __atomic_load_n(&ctx->flags, __ATOMIC_RELAXED))

CUAPI(3020, cuCtxGetApiVersion, CUcontext handle, unsigned *out)
ANSWER(handle, API_VERSION)

CUAPI(12000, cuCtxGetId, CUcontext handle, unsigned long long *out)
ANSWER(handle, ctx->id)

CUAPI(3020, cuCtxGetCacheConfig, int *out)
ANSWER(NULL, ctx->cache_config)

CUAPI(12010, cuCtxSetFlags, unsigned flags)
{
	struct context *ctx;

	TRY(context_current(&ctx));
	REFUSE_IF(flags & ~SCHEDULE_FLAGS, CUDA_ERROR_INVALID_VALUE);
	__atomic_store_n(&ctx->flags, flags, __ATOMIC_RELAXED);
	return CUDA_SUCCESS;
}

CUAPI(5050, cuCtxGetStreamPriorityRange, int *least, int *greatest)
{
	struct context *ctx;

	TRY(context_current(&ctx));
	if (least)
		*least = 0;
	if (greatest)
		*greatest = -5;
	return CUDA_SUCCESS;
}

CUAPI(3010, cuCtxGetLimit, size_t *out, int limit)
{
	CUresult result;
	struct context *ctx = ask(NULL, out, &result);

	if (!ctx)
		return result;
	REFUSE_IF(limit < 0 || limit >= LIMITS, CUDA_ERROR_UNSUPPORTED_LIMIT);
	*out = ctx->limits[limit];
	return CUDA_SUCCESS;
}

CUAPI(3010, cuCtxSetLimit, int limit, size_t value)
{
	struct context *ctx;

	TRY(context_current(&ctx));
	REFUSE_IF(limit < 0 || limit >= LIMITS, CUDA_ERROR_UNSUPPORTED_LIMIT);
	ctx->limits[limit] = value;
	return CUDA_SUCCESS;
}

CUAPI(3020, cuCtxSetCacheConfig, int config)
{
	struct context *ctx;
	CUresult result = context_current(&ctx);

	if (!result)
		ctx->cache_config = config;
	return result;
}

CUAPI(11000, cuCtxResetPersistingL2Cache, void)
{
	struct context *ctx;

	return context_current(&ctx);
}

/* Every device of the node sees every other's memory; enabling it twice is refused as on the card. */
static CUresult peer_access(CUcontext handle, bool enable)
{
	struct context *ctx, *peer = (struct context *)handle;

	TRY(context_current(&ctx));
	REFUSE_IF(!context_valid(handle) || peer == ctx, CUDA_ERROR_INVALID_CONTEXT);
	uint32_t bit = 1u << peer->dev->ordinal;
	uint32_t before = enable ? __atomic_fetch_or(&ctx->peers, bit, __ATOMIC_RELAXED)
	                         : __atomic_fetch_and(&ctx->peers, ~bit, __ATOMIC_RELAXED);
	if (enable == ((before & bit) != 0))
		return enable ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
	return CUDA_SUCCESS;
}

CUAPI(4000, cuCtxEnablePeerAccess, CUcontext peer, unsigned flags)
{
	return flags ? CUDA_ERROR_INVALID_VALUE : peer_access(peer, true);
}

CUAPI(4000, cuCtxDisablePeerAccess, CUcontext peer)
{
	return peer_access(peer, false);
}
