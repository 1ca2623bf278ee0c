/*
 * scratch.c - memory of our own, one handle in each context with ranges, on which valved tries what it means to do to KV
 * memory from outside before it relies on it. In the flow: the first range of a context -> scratch, with a pattern ->
 * KV_SCRATCH with the uvm descriptor -> valved makes it sparse -> order TRY -> here: it must read zero, take a write
 * without harm, and after unmap + map + set access have its bytes back; the memory behind it must never change.
 *
 * It is made on the application's thread (places.c says why) and looked at on the memory thread, which never waits for
 * the copies: they need channels that are on.
 */
#include "memory.h"

#include <errno.h>
#include <string.h>

#define PATTERN 0x7a11feedu
#define OTHER   0xdeadbeefu
#define SAMPLE  65536u /* at either end, and beside it; sparse pages are that large */
#define BESIDE  2u     /* the sample behind the two of the scratch memory */
#define SAMPLES 3u

/* X(name, parameters): beyond VALVE_KV_CALLS. A driver without them has no trial, and is not relied upon */
#define SCRATCH_CALLS(X)                        \
	X(cuMemAllocHost_v2, (void **, size_t)) \
	X(cuMemFreeHost, (void *))              \
	X(cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream))

static struct {
#define X(name, parameters) CUresult(*name) parameters;
	SCRATCH_CALLS(X)
#undef X
} call;

static struct valve_lock
        lock; /* all scratch memory, but for making it. Its holder may sit in a driver call */

static bool load_calls(void)
{
	bool all = true;
#define X(name, parameters)                                           \
	call.name = (CUresult(*) parameters)valve_real_symbol(#name); \
	all &= call.name != NULL;
	SCRATCH_CALLS(X)
#undef X
	return all;
}

bool valve_scratch_is_wanted(void)
{
	return load_acquire(&valve_shim.state) == VALVE_STATE_LINKED &&
	       load_relaxed(&valve_shim.role) == VALVE_ROLE_OFFLINE &&
	       (valve_shim.daemon_features & VALVE_FEATURE_SPARSE);
}

/* ---- making it ---- */

static CUresult show_at(const struct valve_place *place, CUdeviceptr at, uint64_t bytes, uint64_t handle)
{
	const CUmemAccessDesc access = {{CU_MEM_LOCATION_DEVICE, place->device}, CU_ACCESS_READWRITE};
	CUresult result = valve_cu.cuMemMap(at, bytes, 0, handle, 0);

	return result ? result : valve_cu.cuMemSetAccess(at, bytes, &access, 1);
}

static CUresult show(const struct valve_place *place, uint64_t handle)
{
	return show_at(place, place->scratch.at, place->handle_bytes, handle);
}

static CUresult show_instead(const struct valve_place *place, uint64_t handle)
{
	CUresult result = valve_cu.cuMemUnmap(place->scratch.at, place->handle_bytes);

	return result ? result : show(place, handle);
}

static CUresult fill(const struct valve_place *place, uint32_t word)
{
	return valve_cu.cuMemsetD32Async(place->scratch.at, word, place->handle_bytes / 4, place->stream);
}

/* The least that the driver maps, filled with the pattern as well. */
static CUresult make_beside(struct valve_place *place, const CUmemAllocationProp *prop)
{
	struct valve_scratch *scratch = &place->scratch;
	CUresult result = valve_cu.cuMemCreate(&scratch->beside_handle, scratch->beside_bytes, prop, 0);

	if (!result)
		result = show_at(place, scratch->beside, scratch->beside_bytes, scratch->beside_handle);
	if (!result)
		result = valve_cu.cuMemsetD32Async(scratch->beside, PATTERN, scratch->beside_bytes / 4,
		                                   place->stream);
	return result;
}

static CUresult make(struct valve_place *place)
{
	const CUmemAllocationProp prop = {.type = CU_MEM_TYPE_PINNED,
	                                  .location = {CU_MEM_LOCATION_DEVICE, place->device}};
	struct valve_scratch *scratch = &place->scratch;
	void *seen = NULL;
	size_t least = 0;
	CUresult result = valve_cu.cuMemGetAllocationGranularity(&least, &prop, 0);

	scratch->beside_bytes = least < SAMPLE ? SAMPLE : least;
	if (!result)
		result = valve_cu.cuMemAddressReserve(&scratch->at,
		                                      place->handle_bytes + scratch->beside_bytes, 0, 0, 0);
	scratch->beside = scratch->at + place->handle_bytes;
	if (!result)
		result = valve_cu.cuMemCreate(&scratch->handle, place->handle_bytes, &prop, 0);
	if (!result)
		result = show(place, scratch->handle);
	if (!result)
		result = fill(place, PATTERN);
	if (!result)
		result = make_beside(place, &prop);
	if (!result)
		result = valve_cu.cuStreamSynchronize(place->stream);
	if (!result)
		result = call.cuMemAllocHost_v2(&seen, SAMPLES * SAMPLE);
	scratch->seen = seen;
	if (!result)
		result = valve_cu.cuEventCreate(&scratch->event, CU_EVENT_DISABLE_TIMING);
	return result;
}

static void unmake(struct valve_place *place)
{
	struct valve_scratch *scratch = &place->scratch;

	if (scratch->seen)
		call.cuMemFreeHost(scratch->seen);
	if (scratch->handle) {
		valve_cu.cuMemUnmap(scratch->at, place->handle_bytes);
		valve_cu.cuMemRelease(scratch->handle);
	}
	if (scratch->beside_handle) {
		valve_cu.cuMemUnmap(scratch->beside, scratch->beside_bytes);
		valve_cu.cuMemRelease(scratch->beside_handle);
	}
	if (scratch->at &&
	    !scratch->generation) /* else valved knows the address: it never means something else */
		valve_cu.cuMemAddressFree(scratch->at, place->handle_bytes + scratch->beside_bytes);
	*scratch = (struct valve_scratch){.state = SCRATCH_NONE};
}

/* Precondition: the place's context is current, on the application's thread. Once; without it nothing is tried. */
void valve_scratch_make(struct valve_place *place)
{
	if (load_acquire(&place->scratch.state) != SCRATCH_NONE || place->handle_bytes < SAMPLE ||
	    !valve_scratch_is_wanted())
		return;
	valve_lock(&lock);
	if (place->scratch.state == SCRATCH_NONE && load_calls()) {
		if (make(place))
			unmake(place);
		else
			store_release(&place->scratch.state, (uint32_t)SCRATCH_RESTS);
	}
	valve_unlock(&lock);
	valve_orders_wake();
}

/* The context is about to go, or has gone: then the driver's calls fail and only the book is cleared. */
void valve_scratch_forget(struct valve_place *place)
{
	valve_lock(&lock);
	if (place->scratch.state != SCRATCH_NONE)
		unmake(place);
	valve_unlock(&lock);
}

void valve_scratch_reset(void)
{
	valve_lock_reset(&lock);
}

/* ---- telling of it ---- */

static void tell(struct valve_place *place, uint32_t index, uint32_t generation)
{
	struct valve_link_kv_scratch message = {
	        .place = index, .base = place->scratch.at, .bytes = place->handle_bytes};
	int fd = valve_capture_uvm_fd();

	memcpy(message.gpu_uuid, &place->uuid, sizeof(message.gpu_uuid));
	if (fd < 0 || valve_link_send_fds(&message, sizeof(message), VALVE_LINK_KV_SCRATCH, &fd, 1,
	                                  generation) != -EAGAIN)
		place->scratch.generation = generation; /* else its socket is full: again */
}

/* true when one was due. */
bool valve_scratch_announce(void)
{
	uint32_t generation = load_acquire(&valve_shim.link_generation);
	struct valve_place *place;
	bool due = false;

	if (!valve_scratch_is_wanted())
		return false;
	valve_lock(&lock);
	for (uint32_t i = 0; (place = valve_place_at(i)); i++)
		if (place->scratch.state == SCRATCH_RESTS && place->scratch.generation != generation) {
			tell(place, i, generation);
			due = true;
		}
	valve_unlock(&lock);
	return due;
}

/* ---- the trial ---- */

static CUresult read_back(const struct valve_place *place)
{
	const struct valve_scratch *scratch = &place->scratch;
	CUresult result = call.cuMemcpyDtoHAsync_v2(scratch->seen, scratch->at, SAMPLE, place->stream);

	if (!result)
		result = call.cuMemcpyDtoHAsync_v2((char *)scratch->seen + SAMPLE,
		                                   scratch->at + place->handle_bytes - SAMPLE, SAMPLE,
		                                   place->stream);
	if (!result)
		result = call.cuMemcpyDtoHAsync_v2((char *)scratch->seen + BESIDE * SAMPLE, scratch->beside,
		                                   SAMPLE, place->stream);
	return result;
}

static CUresult mark(const struct valve_place *place)
{
	return valve_cu.cuEventRecord(place->scratch.event, place->stream);
}

static bool all_are(const uint32_t *seen, size_t bytes, uint32_t word)
{
	for (size_t i = 0; i < bytes / sizeof(word); i++)
		if (seen[i] != word)
			return false;
	return true;
}

static bool reads(const struct valve_place *place, uint32_t word)
{
	return all_are(place->scratch.seen, BESIDE * SAMPLE, word);
}

static bool is_untouched_beside(const struct valve_place *place)
{
	return all_are(place->scratch.seen + BESIDE * SAMPLE / sizeof(uint32_t), SAMPLE, PATTERN);
}

static void answer(struct valve_place *place, uint32_t status, CUresult result)
{
	struct valve_outcome out = {.status = status, .cu_result = result};

	store_release(&place->scratch.state, (uint32_t)SCRATCH_RESTS);
	valve_orders_report(place->scratch.number, place->scratch.order_generation, &out);
}

/* What failed may work at the next try: it begins with the pattern in place, or fails again. */
static void end(struct valve_place *place, uint32_t status, CUresult result)
{
	struct valve_scratch *scratch = &place->scratch;

	scratch->failed = result ? EIO : status;
	scratch->cu_result = result;
	if (scratch->failed && !show_instead(place, scratch->handle) && !fill(place, PATTERN) && !mark(place))
		store_release(&scratch->state, (uint32_t)SCRATCH_MENDED);
	else
		answer(place, scratch->failed, result);
}

static void begin(struct valve_place *place, const struct valve_queued *order)
{
	bool outside = order->how == VALVE_KV_OUTSIDE;
	CUresult result = valve_place_enter(place, NULL);

	place->scratch.number = order->number;
	place->scratch.order_generation = order->generation;
	if (!result && !outside)
		result = show_instead(place, place->zero);
	if (!result)
		result = read_back(place);
	if (!result && outside) /* dropped, unlike one to the zero page, which all quarantined slots share */
		result = fill(place, OTHER);
	if (!result)
		result = mark(place);
	store_release(&place->scratch.state, (uint32_t)SCRATCH_ZERO);
	if (result)
		end(place, 0, result);
}

void valve_scratch_try(const struct valve_queued *order)
{
	struct valve_place *place = valve_place_at(order->range);

	valve_lock(&lock);
	if (place && place->scratch.state == SCRATCH_RESTS) {
		begin(place, order);
	} else {
		struct valve_outcome out = {.status = place && place->scratch.state ? EBUSY : ESTALE};

		valve_orders_report(order->number, order->generation, &out);
	}
	valve_unlock(&lock);
}

static bool go_on(struct valve_place *place)
{
	CUresult result = valve_place_enter(place, NULL);

	if (!result)
		result = valve_cu.cuEventQuery(place->scratch.event);
	if (result == CUDA_ERROR_NOT_READY)
		return false;
	if (place->scratch.state == SCRATCH_MENDED) {
		answer(place, place->scratch.failed, place->scratch.cu_result);
		return true;
	}
	if (result || place->scratch.state == SCRATCH_OWN) {
		bool is_back = reads(place, PATTERN) && is_untouched_beside(place);

		end(place, is_back ? 0 : EBADMSG, result);
		return true;
	}
	if (!reads(place, 0) || !is_untouched_beside(place)) {
		end(place, is_untouched_beside(place) ? ENODATA : EFAULT, CUDA_SUCCESS);
		return true;
	}
	result = show_instead(place, place->scratch.handle);
	if (!result)
		result = read_back(place);
	if (!result)
		result = mark(place);
	store_release(&place->scratch.state, (uint32_t)SCRATCH_OWN);
	if (result)
		end(place, 0, result);
	return true;
}

/* Adds to *pending those that are looked at still; true when something moved. */
bool valve_scratch_go_on(uint32_t *pending)
{
	struct valve_place *place;
	bool moved = false;

	for (uint32_t i = 0; (place = valve_place_at(i)); i++) {
		if (load_relaxed(&place->scratch.state) < SCRATCH_ZERO)
			continue;
		valve_lock(&lock);
		if (place->scratch.state >= SCRATCH_ZERO) /* its context may have gone */
			moved |= go_on(place);
		*pending += place->scratch.state >= SCRATCH_ZERO;
		valve_unlock(&lock);
	}
	return moved;
}
