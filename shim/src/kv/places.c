/*
 * places.c - the contexts in which KV ranges live: for each its device, a zero page, and a stream of our own for zeroing,
 * so that it waits for nothing of the application's. All are made on the application's thread, in its allocation call:
 * a new stream may bring a new channel, which the ioctl hooks must see.
 */
#include "contexts.h"
#include "memory.h"

#include <string.h>

#define STREAM_NON_BLOCKING 1u
#define GRANULARITY_MINIMUM 0

struct valve_kv_calls valve_cu;

static struct {
	struct valve_lock lock; /* held while a place is made */
	uint32_t loaded;
	struct valve_place place[VALVE_PLACES];
} places;

static bool load_driver(void)
{
	bool all = true;

	if (load_acquire(&places.loaded))
		return true;
	valve_lock(&places.lock);
#define X(name, parameters)                                                       \
	if (!load_relaxed(&places.loaded))                                        \
		valve_cu.name = (CUresult(*) parameters)valve_real_symbol(#name); \
	all &= valve_cu.name != NULL;
	VALVE_KV_CALLS(X)
#undef X
	store_release(&places.loaded, all);
	valve_unlock(&places.lock);
	return all;
}

/* Of the calling thread. Returns what it was, -1 when the driver is not known yet. */
int valve_place_capture_mode(int mode)
{
	if (!load_acquire(&places.loaded) || valve_cu.cuThreadExchangeStreamCaptureMode(&mode))
		return -1;
	return mode;
}

static bool is_primary(CUcontext context, int device)
{
	bool found = false;

	valve_lock(&valve_shim.probe_lock);
	for (size_t i = 0; i < VALVE_CONTEXTS && !found; i++)
		found = valve_contexts.context[i].context == context &&
		        valve_contexts.context[i].device == device;
	valve_unlock(&valve_shim.probe_lock);
	return found;
}

/* The driver does not promise that fresh memory is zero, so it is filled, once, through a mapping for just that. */
static CUresult clear_page(struct valve_place *place)
{
	const CUmemAccessDesc access = {{CU_MEM_LOCATION_DEVICE, place->device}, CU_ACCESS_READWRITE};
	uint64_t bytes = place->handle_bytes;
	CUdeviceptr at;
	CUresult result = valve_cu.cuMemAddressReserve(&at, bytes, 0, 0, 0);

	if (result)
		return result;
	result = valve_cu.cuMemMap(at, bytes, 0, place->zero, 0);
	if (!result) {
		result = valve_cu.cuMemSetAccess(at, bytes, &access, 1);
		if (!result)
			result = valve_cu.cuMemsetD32Async(at, 0, bytes / 4, place->stream);
		if (!result)
			result = valve_cu.cuStreamSynchronize(place->stream);
		valve_cu.cuMemUnmap(at, bytes);
	}
	valve_cu.cuMemAddressFree(at, bytes);
	return result;
}

static bool fill_place(struct valve_place *place)
{
	const CUmemAllocationProp prop = {.type = CU_MEM_TYPE_PINNED,
	                                  .location = {CU_MEM_LOCATION_DEVICE, place->device}};
	size_t granularity = 0;

	if (valve_cu.cuMemGetAllocationGranularity(&granularity, &prop, GRANULARITY_MINIMUM) ||
	    !granularity || place->handle_bytes % granularity ||
	    valve_cu.cuDeviceGetUuid(&place->uuid, place->device) ||
	    valve_cu.cuStreamCreate(&place->stream, STREAM_NON_BLOCKING))
		return false;
	if (valve_cu.cuMemCreate(&place->zero, place->handle_bytes, &prop, 0))
		return false;
	if (!clear_page(place))
		return true;
	valve_cu.cuMemRelease(place->zero);
	return false;
}

static struct valve_place *make_place(CUcontext context, int device, uint64_t handle_bytes)
{
	struct valve_place fresh = {.device = device, .handle_bytes = handle_bytes};

	for (size_t i = 0; i < VALVE_PLACES; i++) {
		struct valve_place *place = &places.place[i];

		if (place->context)
			continue;
		fresh.is_primary = is_primary(context, device);
		if (!fill_place(&fresh))
			return NULL;
		*place = fresh;
		store_release(&place->context, context);
		return place;
	}
	return NULL;
}

struct valve_place *valve_place_here(uint64_t handle_bytes)
{
	struct valve_place *found = NULL;
	CUcontext context = NULL;
	CUdevice device;

	if (!load_driver() || valve_cu.cuCtxGetCurrent(&context) || !context ||
	    valve_cu.cuCtxGetDevice(&device))
		return NULL;
	valve_lock(&places.lock);
	for (size_t i = 0; i < VALVE_PLACES && !found; i++)
		if (places.place[i].context == context && places.place[i].handle_bytes == handle_bytes)
			found = &places.place[i];
	if (!found)
		found = make_place(context, device, handle_bytes);
	valve_unlock(&places.lock);
	return found;
}

struct valve_place *valve_place_at(uint32_t index)
{
	return index < VALVE_PLACES ? &places.place[index] : NULL;
}

/* Makes the place's context current; give `before` back to cuCtxSetCurrent where the thread is not ours. */
CUresult valve_place_enter(const struct valve_place *place, CUcontext *before)
{
	CUresult result = before ? valve_cu.cuCtxGetCurrent(before) : CUDA_SUCCESS;

	return result ? result : valve_cu.cuCtxSetCurrent(place->context);
}

/* Everything that the application submitted is done when this returns. */
void valve_places_drain(void)
{
	for (size_t i = 0; i < VALVE_PLACES; i++) {
		CUcontext before = NULL;

		if (!load_acquire(&places.place[i].context))
			continue;
		if (!valve_place_enter(&places.place[i], &before))
			valve_cu.cuCtxSynchronize();
		valve_cu.cuCtxSetCurrent(before);
	}
}

/* Its context is gone, and stream and events with it. */
void valve_place_forget(struct valve_place *place)
{
	valve_cu.cuMemRelease(place->zero);
	valve_lock(&places.lock);
	memset(place, 0, sizeof(*place));
	valve_unlock(&places.lock);
}

void valve_places_reset(void)
{
	valve_lock_reset(&places.lock);
	for (size_t i = 0; places.loaded && i < VALVE_PLACES; i++)
		if (places.place[i].context)
			memset(&places.place[i], 0, sizeof(places.place[i]));
}
