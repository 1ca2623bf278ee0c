/* green.c - green contexts: shares of a card's processors with streams of their own. The counts are those of an H100;
 * which processors a kernel runs on is not modelled, so a green context works in the primary context. */
#include "core.h"

#include <stdlib.h>

#define MAGIC_DESC    0x44455343u
#define MAGIC_GREEN   0x47524545u
#define TYPE_SM       1
#define NON_BLOCKING  1u
#define DEFAULT_FLAG  1u /* CU_GREEN_CTX_DEFAULT_STREAM, which every caller must give */
#define FINE_FLAG     1u /* CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING */
#define ATTRIBUTE_SMS 16

enum { GRANULE = 8, FINE_GRANULE = 2, MOST_RESOURCES = 128 };

/* CUdevResource: what lies between type and count is the driver's own. */
struct resource {
	int type;
	unsigned char inside[92];
	unsigned sms;
	unsigned char rest[44];
};
_Static_assert(sizeof(struct resource) == 144, "CUdevResource");

struct desc {
	uint32_t magic;
	unsigned sms;
};

struct green {
	uint32_t magic;
	struct context *primary;
	unsigned sms;
};

CUresult cuDeviceGetAttribute(int *out, int attribute, CUdevice handle);
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice handle);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice handle);

static struct resource sm_resource(unsigned sms)
{
	return (struct resource){.type = TYPE_SM, .sms = sms};
}

CUAPI(12040, cuDeviceGetDevResource, CUdevice device, struct resource *out, int type)
{
	int sms = 0;

	TRY(out ? cuDeviceGetAttribute(&sms, ATTRIBUTE_SMS, device) : CUDA_ERROR_INVALID_VALUE);
	REFUSE_IF(type != TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
	*out = sm_resource((unsigned)sms);
	return CUDA_SUCCESS;
}

/* Without a place for the groups it only counts them. */
CUAPI(12040, cuDevSmResourceSplitByCount, struct resource *out, unsigned *groups,
      const struct resource *input, struct resource *remaining, unsigned flags, unsigned least)
{
	unsigned granule = flags & FINE_FLAG ? FINE_GRANULE : GRANULE;

	TRY(driver_check());
	REFUSE_IF(!groups || !input || flags & ~FINE_FLAG, CUDA_ERROR_INVALID_VALUE);
	REFUSE_IF(input->type != TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
	least = least ? (least + granule - 1) / granule * granule : granule;
	unsigned most = input->sms / least;
	REFUSE_IF(!most, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
	if (!out || *groups > most)
		*groups = most;
	for (unsigned i = 0; out && i < *groups; i++)
		out[i] = sm_resource(least);
	if (out && remaining)
		*remaining = sm_resource(input->sms - *groups * least);
	return CUDA_SUCCESS;
}

CUAPI(12040, cuDevResourceGenerateDesc, struct desc **out, const struct resource *resources, unsigned count)
{
	unsigned sms = 0;

	TRY(driver_check());
	REFUSE_IF(!out || !resources || !count || count > MOST_RESOURCES, CUDA_ERROR_INVALID_VALUE);
	for (unsigned i = 0; i < count; i++) {
		REFUSE_IF(resources[i].type != TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
		sms += resources[i].sms;
	}
	REFUSE_IF(!sms, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
	*out = calloc(1, sizeof(**out)); /* lives as long as the process, as there is no call that ends one */
	if (!*out)
		abort();
	**out = (struct desc){.magic = MAGIC_DESC, .sms = sms};
	return CUDA_SUCCESS;
}

/* Holds the primary context of its device until it is destroyed. */
CUAPI(12040, cuGreenCtxCreate, struct green **out, const struct desc *desc, CUdevice device, unsigned flags)
{
	CUcontext primary = NULL;

	TRY(driver_check());
	REFUSE_IF(!out || !desc || desc->magic != MAGIC_DESC || flags != DEFAULT_FLAG,
	          CUDA_ERROR_INVALID_VALUE);
	TRY(cuDevicePrimaryCtxRetain(&primary, device));
	*out = calloc(1, sizeof(**out));
	if (!*out)
		abort();
	**out = (struct green){.magic = MAGIC_GREEN, .primary = (struct context *)primary, .sms = desc->sms};
	return CUDA_SUCCESS;
}

static CUresult green_check(const struct green *green)
{
	TRY(driver_check());
	/* cuDevicePrimaryCtxReset takes the primary context away from under it */
	return green && green->magic == MAGIC_GREEN && context_valid(green->primary)
	               ? CUDA_SUCCESS
	               : CUDA_ERROR_INVALID_CONTEXT;
}

/* Its streams stay, and are their makers' to destroy. */
CUAPI(12040, cuGreenCtxDestroy, struct green *green)
{
	TRY(green_check(green));
	CUdevice device = green->primary->dev->ordinal;
	pthread_mutex_lock(&emu.lock);
	for (struct stream *stream = green->primary->streams; stream; stream = stream->next)
		if (stream->green == green)
			stream->green = NULL;
	pthread_mutex_unlock(&emu.lock);
	green->magic = 0;
	free(green);
	return cuDevicePrimaryCtxRelease_v2(device);
}

CUAPI(12040, cuCtxFromGreenCtx, CUcontext *out, struct green *green)
{
	CUresult result = out ? green_check(green) : CUDA_ERROR_INVALID_VALUE;

	if (!result)
		*out = (CUcontext)green->primary;
	return result;
}

CUAPI(12040, cuGreenCtxGetDevResource, struct green *green, struct resource *out, int type)
{
	TRY(out ? green_check(green) : CUDA_ERROR_INVALID_VALUE);
	REFUSE_IF(type != TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
	*out = sm_resource(green->sms);
	return CUDA_SUCCESS;
}

CUAPI(12050, cuGreenCtxStreamCreate, CUstream *out, struct green *green, unsigned flags, int priority)
{
	TRY(out && flags == NON_BLOCKING ? green_check(green) : CUDA_ERROR_INVALID_VALUE);
	if (green->primary->sticky)
		return green->primary->sticky;
	LOCKED(&emu.lock);
	struct stream *stream = stream_make(green->primary, flags, priority_clamp(priority));
	stream->green = green;
	*out = (CUstream)stream;
	return CUDA_SUCCESS;
}

CUAPI(12040, cuStreamGetGreenCtx, CUstream handle, void **out)
{
	struct stream *stream;

	TRY(stream_resolve(handle, &stream));
	REFUSE_IF(!out, CUDA_ERROR_INVALID_VALUE);
	*out = stream->green;
	return CUDA_SUCCESS;
}

/* A stream has one of the two. */
CUAPI(12050, cuStreamGetCtx_v2, CUstream handle, CUcontext *out, void **green)
{
	struct stream *stream;

	TRY(stream_resolve(handle, &stream));
	REFUSE_IF(!out || !green, CUDA_ERROR_INVALID_VALUE);
	*green = stream->green;
	*out = stream->green ? NULL : (CUcontext)stream->ctx;
	return CUDA_SUCCESS;
}
