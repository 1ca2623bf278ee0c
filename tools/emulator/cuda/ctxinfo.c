/* ctxinfo.c - what a context says about itself, its limits, and the calls kept for callers that make them in passing. */
#include "core.h"

#define API_VERSION    3020u
#define LIMITS         10
#define SCHEDULE_FLAGS 0x3fu

static CUresult given_or_current(CUcontext handle, struct context **out)
{
	if (!handle)
		return context_current(out);
	*out = (struct context *)handle;
	return context_valid(handle) ? driver_check() : CUDA_ERROR_INVALID_CONTEXT;
}

CUAPI(cuCtxGetDevice, CUdevice *out)
{
	struct context *ctx = NULL;
	CUresult result = context_current(&ctx);

	if (!ctx)
		return result;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = ctx->dev->ordinal;
	return CUDA_SUCCESS;
}

CUAPI(cuCtxGetDevice_v2, CUdevice *out, CUcontext handle)
{
	struct context *ctx = NULL;
	CUresult result = given_or_current(handle, &ctx);

	if (result)
		return result;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = ctx->dev->ordinal;
	return CUDA_SUCCESS;
}

CUAPI(cuCtxGetFlags, unsigned *out)
{
	struct context *ctx;
	CUresult result = context_current(&ctx);

	if (result)
		return result;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = ctx->flags;
	return CUDA_SUCCESS;
}

CUAPI(cuCtxSetFlags, unsigned flags)
{
	struct context *ctx;
	CUresult result = context_current(&ctx);

	if (result)
		return result;
	if (flags & ~SCHEDULE_FLAGS)
		return CUDA_ERROR_INVALID_VALUE;
	ctx->flags = flags;
	return CUDA_SUCCESS;
}

CUAPI(cuCtxGetApiVersion, CUcontext handle, unsigned *out)
{
	struct context *ctx;
	CUresult result = given_or_current(handle, &ctx);

	if (result)
		return result;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = API_VERSION;
	return CUDA_SUCCESS;
}

CUAPI(cuCtxGetId, CUcontext handle, unsigned long long *out)
{
	struct context *ctx;
	CUresult result = given_or_current(handle, &ctx);

	if (result)
		return result;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = ctx->id;
	return CUDA_SUCCESS;
}

CUAPI(cuCtxGetStreamPriorityRange, int *least, int *greatest)
{
	struct context *ctx;
	CUresult result = context_current(&ctx);

	if (result)
		return result;
	if (least)
		*least = 0;
	if (greatest)
		*greatest = -5;
	return CUDA_SUCCESS;
}

CUAPI(cuCtxGetLimit, size_t *out, int limit)
{
	struct context *ctx;
	CUresult result = context_current(&ctx);

	if (result)
		return result;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	if (limit < 0 || limit >= LIMITS)
		return CUDA_ERROR_UNSUPPORTED_LIMIT;
	*out = ctx->limits[limit];
	return CUDA_SUCCESS;
}

CUAPI(cuCtxSetLimit, int limit, size_t value)
{
	struct context *ctx;
	CUresult result = context_current(&ctx);

	if (result)
		return result;
	if (limit < 0 || limit >= LIMITS)
		return CUDA_ERROR_UNSUPPORTED_LIMIT;
	ctx->limits[limit] = value;
	return CUDA_SUCCESS;
}

CUAPI(cuCtxGetCacheConfig, int *out)
{
	struct context *ctx;
	CUresult result = context_current(&ctx);

	if (result)
		return result;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = ctx->cache_config;
	return CUDA_SUCCESS;
}

CUAPI(cuCtxSetCacheConfig, int config)
{
	struct context *ctx;
	CUresult result = context_current(&ctx);

	if (!result)
		ctx->cache_config = config;
	return result;
}

CUAPI(cuCtxResetPersistingL2Cache, void)
{
	struct context *ctx;

	return context_current(&ctx);
}

/* Every device of the node sees every other's memory; enabling it twice is refused as on the card. */
static CUresult peer_access(CUcontext handle, bool enable)
{
	struct context *ctx, *peer = (struct context *)handle;
	CUresult result = context_current(&ctx);

	if (result)
		return result;
	if (!context_valid(handle) || peer == ctx)
		return CUDA_ERROR_INVALID_CONTEXT;
	uint32_t bit = 1u << peer->dev->ordinal;
	if (enable == ((ctx->peers & bit) != 0))
		return enable ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
	ctx->peers ^= bit;
	return CUDA_SUCCESS;
}

CUAPI(cuCtxEnablePeerAccess, CUcontext peer, unsigned flags)
{
	return flags ? CUDA_ERROR_INVALID_VALUE : peer_access(peer, true);
}

CUAPI(cuCtxDisablePeerAccess, CUcontext peer)
{
	return peer_access(peer, false);
}
