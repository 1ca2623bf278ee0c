/*
 * alloc.c - cuMemAlloc and cuMemFree of KV memory. In a bracket (valve_kv_begin) or by the size rule of the control page,
 * an allocation becomes a range of handles that valved may give and take; everything else, and everything that goes
 * wrong here, is the driver's own allocation. Only an offline process that valved has no memory for is told so: memory
 * taken past valved would be missing to online work.
 */
#include "memory.h"

#include <errno.h>

/*
 * How long nothing may happen while valved backs a range. Online pays it once for a valved that does not answer: this one
 * is not asked again. Offline waits as long as it is stopped.
 */
#define ONLINE_SILENCE_MS  5000
#define OFFLINE_SILENCE_MS 600000

#define EXIT_LOOK_NS 20000000u /* how soon a free sees that the process exits */

#define CALL(entry, ...) (((valve_call)(entry)->target)(__VA_ARGS__))

static uint32_t silent_generation; /* of the link whose valved did not answer in time */

VALVE_EXPORT void valve_kv_begin(uint32_t flags);
VALVE_EXPORT void valve_kv_end(void);

/* Brackets nest; the outermost says what kind of ranges. */
void valve_kv_begin(uint32_t flags)
{
	if (!valve_tls.kv_depth++) {
		valve_tls.kv_flags = flags & VALVE_KV_ELASTIC;
		valve_tls.kv_asked = 0;
	}
}

static bool is_managed(void)
{
	return load_acquire(&valve_shim.state) == VALVE_STATE_LINKED &&
	       (valve_shim.daemon_features & VALVE_FEATURE_MEMORY);
}

void valve_kv_end(void)
{
	if (valve_tls.kv_depth && !--valve_tls.kv_depth && !valve_tls.kv_asked && is_managed())
		valve_say(
		        "the KV cache is ordinary memory and is not shared: cuMemAlloc did not make it "
		        "(backend:cudaMallocAsync or expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF?)");
}

/* ---- making a range ---- */

/* 0: not ours. Else the size of a handle. */
static uint64_t wanted_handle(size_t bytes, uint32_t *flags)
{
	uint64_t handle_bytes = load_relaxed(&VALVE_CONTROL->kv_handle_bytes);
	uint64_t rule = load_relaxed(&VALVE_CONTROL->kv_size_rule);
	bool is_ruled = rule && bytes >= rule;

	*flags = valve_tls.kv_depth ? valve_tls.kv_flags : 0;
	if (!handle_bytes || bytes < handle_bytes || valve_tls.inside || !is_managed() ||
	    load_relaxed(&silent_generation) == load_relaxed(&valve_shim.link_generation))
		return 0;
	return valve_tls.kv_depth || is_ruled ? handle_bytes : 0;
}

static bool is_offline(void)
{
	return load_relaxed(&valve_shim.role) == VALVE_ROLE_OFFLINE;
}

/* Tells valved and waits until it has backed the range; orders for it come meanwhile. 0 or -errno. */
static int announce(struct valve_range *range)
{
	uint32_t generation = load_acquire(&valve_shim.link_generation);
	struct valve_link_kv_range message;
	int err;

	valve_range_told(range, generation);
	range->stays = valve_scratch_is_wanted();
	valve_announce_describe(range, 0, &message);
	err = valve_link_request_fds(&message, sizeof(message), VALVE_LINK_KV_RANGE, NULL, 0,
	                             is_offline() ? OFFLINE_SILENCE_MS : ONLINE_SILENCE_MS, &range->progress);
	if (err == -EBUSY) /* it read nothing all that time */
		err = -ETIMEDOUT;
	if (err == -ETIMEDOUT && !is_offline())
		store_relaxed(&silent_generation, generation);
	return err;
}

/* The application is about to clear all of it, so there must be no hole. */
static int close_holes(struct valve_range *range)
{
	CUcontext before = NULL;
	int err = 0;

	valve_lock(&range->lock);
	if (range->flags & VALVE_KV_ELASTIC) {
		if (valve_place_enter(range->place, &before) || valve_vmm_fill(range))
			err = -EIO;
		valve_cu.cuCtxSetCurrent(before);
	} else if (valve_range_backed(range) != range->slots) {
		err = -ENOMEM;
	}
	valve_unlock(&range->lock);
	return err;
}

/* Waits until no order works on it. The memory goes back to the driver, or to the pool if it holds the handles. At process exit
 * nobody is left to say that a zeroing has ended. */
static void destroy(struct valve_range *range)
{
	CUcontext before = NULL;
	uint32_t clearing;

	for (;;) {
		valve_lock(&range->lock);
		clearing = load_acquire(&range->clearing);
		if (!clearing || valve_orders_are_over())
			break;
		valve_unlock(&range->lock);
		futex_wait(&range->clearing, clearing, EXIT_LOOK_NS);
	}
	valve_place_enter(range->place, &before);
	if (clearing)
		valve_cu.cuCtxSynchronize();
	valve_vmm_empty(range);
	valve_cu.cuCtxSetCurrent(before);
	valve_unlock(&range->lock);
	/* Where valved changes memory from outside it may be about to: addresses it knows never mean something else. */
	if (!range->stays &&
	    valve_cu.cuMemAddressFree(range->base, (uint64_t)range->slots * range->handle_bytes))
		valve_say("a KV range could not be unmapped; its memory is lost until this process ends");
	if (valve_announce_end(range))
		return;
	valve_range_turn(range, RANGE_GOING, RANGE_UNTOLD);
	valve_orders_wake();
}

static struct valve_range *reserve(size_t bytes, uint64_t handle_bytes, uint32_t flags)
{
	struct valve_place *place = valve_place_here(handle_bytes);
	struct valve_range *range = place ? valve_range_new(place, bytes, flags) : NULL;
	CUdeviceptr base;

	if (!range)
		return NULL;
	valve_scratch_make(place);
	if (!valve_orders_start() &&
	    !valve_cu.cuMemAddressReserve(&base, range->slots * range->handle_bytes, 0, 0, 0)) {
		range->base = base;
		return range;
	}
	valve_range_turn(range, RANGE_BORN, RANGE_GOING);
	valve_range_drop(range);
	return NULL;
}

/* NOT_SUPPORTED: it is the driver's then. */
static CUresult make_range(size_t bytes, uint64_t handle_bytes, uint32_t flags, CUdeviceptr *out)
{
	struct valve_range *range = reserve(bytes, handle_bytes, flags);
	int err;

	if (!range)
		return CUDA_ERROR_NOT_SUPPORTED;
	err = announce(range);
	if (!err)
		err = close_holes(range);
	if (!err && valve_range_turn(range, RANGE_BORN, RANGE_LIVE)) {
		*out = range->base;
		valve_orders_wake(); /* a valved that came in between has not heard of it */
		return CUDA_SUCCESS;
	}
	valve_range_turn(range, RANGE_BORN, RANGE_GOING);
	destroy(range);
	if (is_offline() && (err == -ENOMEM || err == -ETIMEDOUT))
		return CUDA_ERROR_OUT_OF_MEMORY;
	valve_say("valved has no KV memory to give; the cache is allocated as ordinary memory");
	return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult valve_on_cuMemAlloc(uintptr_t out, uintptr_t bytes, uintptr_t a2, uintptr_t a3, uintptr_t a4,
                             uintptr_t a5, struct valve_entry *entry)
{
	CUresult result = CUDA_ERROR_NOT_SUPPORTED;
	uint32_t flags;
	uint64_t handle_bytes = out ? wanted_handle(bytes, &flags) : 0;

	valve_tls.kv_asked += valve_tls.kv_depth && !valve_tls.inside;
	if (handle_bytes) {
		int mode = valve_place_capture_mode(CU_STREAM_CAPTURE_MODE_RELAXED);

		valve_tls.pool_depth++;
		result = make_range(bytes, handle_bytes, flags, (CUdeviceptr *)out);
		valve_tls.pool_depth--;
		if (mode >= 0)
			valve_place_capture_mode(mode);
	}
	if (result == CUDA_ERROR_NOT_SUPPORTED)
		result = CALL(entry, out, bytes, a2, a3, a4, a5);
	if (result == CUDA_ERROR_OUT_OF_MEMORY && load_relaxed(&valve_shim.role) == VALVE_ROLE_ONLINE)
		valve_note(VALVE_NOTE_NO_MEMORY, 0, 0, "an allocation of device memory failed");
	return result;
}

/* As the driver's own free, it waits for what the application submitted; not in a capture, where that is not allowed. */
static void drain(const struct valve_range *range)
{
	CUcontext before = NULL;

	if (load_relaxed(&VALVE_REGION->capture_depth))
		return;
	if (!valve_place_enter(range->place, &before))
		valve_cu.cuCtxSynchronize();
	valve_cu.cuCtxSetCurrent(before);
}

CUresult valve_on_cuMemFree(uintptr_t address, uintptr_t a1, uintptr_t a2, uintptr_t a3, uintptr_t a4,
                            uintptr_t a5, struct valve_entry *entry)
{
	struct valve_range *range = valve_range_claim(address);

	if (!range)
		return CALL(entry, address, a1, a2, a3, a4, a5);
	drain(range);
	destroy(range);
	return CUDA_SUCCESS;
}

/*
 * A context takes its memory along. `context` NULL: the primary context of `device`. Called before it goes, or after, where
 * only the driver knew whether it would (`is_gone`).
 */
void valve_memory_forget(CUcontext context, int device, bool is_gone)
{
	struct valve_place *place;
	struct valve_range *range;

	for (uint32_t p = 0; (place = valve_place_at(p)); p++) {
		if (!place->context ||
		    (context ? place->context != context : !place->is_primary || place->device != device))
			continue;
		for (uint32_t i = 0; (range = valve_range_at(i)); i++)
			if (range->place == place && valve_range_turn(range, RANGE_LIVE, RANGE_GOING)) {
				if (!is_gone)
					drain(range);
				destroy(range);
			}
		valve_scratch_forget(place);
		valve_place_forget(place);
	}
}

/* A forked child has no CUDA: its parent's ranges, orders and places are forgotten. */
void valve_memory_reset(void)
{
	if (silent_generation)
		silent_generation = 0;
	valve_orders_reset();
	valve_ranges_reset();
	valve_places_reset();
	valve_scratch_reset();
	valve_announce_reset();
}
