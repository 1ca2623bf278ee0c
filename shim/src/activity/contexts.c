/*
 * contexts.c - observers: which contexts and streams live, and whether a capture is open. The watcher reads this
 * under probe_lock, so nothing it is about to query can be destroyed, and no capture can begin, while it probes.
 *
 * A context that is being destroyed is "going" until the real call returned: the watcher then proves nothing. The
 * lock is never held across a real call, so nobody waits for a driver's slow teardown.
 */
#include "contexts.h"

#include <string.h>

struct valve_contexts valve_contexts;

void valve_contexts_reset(void)
{
	if (valve_contexts.generation)
		memset(&valve_contexts, 0, sizeof(valve_contexts));
}

static CUresult call(struct valve_entry *entry, uintptr_t a0, uintptr_t a1, uintptr_t a2, uintptr_t a3,
                     uintptr_t a4, uintptr_t a5)
{
	return ((valve_call)entry->target)(a0, a1, a2, a3, a4, a5);
}

/* ---- contexts ---- */

static void add_context(CUcontext context, int device)
{
	struct valve_context *free_slot = NULL;

	valve_lock(&valve_shim.probe_lock);
	for (size_t i = 0; i < VALVE_CONTEXTS; i++) {
		struct valve_context *known = &valve_contexts.context[i];

		if (known->state != CONTEXT_FREE && known->context == context)
			goto out; /* a primary context retained once more */
		if (known->state == CONTEXT_FREE && !free_slot)
			free_slot = known;
	}
	valve_contexts.generation++;
	if (free_slot)
		*free_slot =
		        (struct valve_context){.context = context, .device = device, .state = CONTEXT_LIVE};
	else
		valve_contexts.overflow = 1; /* never idle again: better than a wrong proof */
out:
	valve_unlock(&valve_shim.probe_lock);
	valve_watcher_start();
}

/* Contexts that match go from one state to another. `context` NULL: the primary context of `device`. */
static void turn_contexts(CUcontext context, int device, enum valve_context_state from,
                          enum valve_context_state to)
{
	valve_lock(&valve_shim.probe_lock);
	valve_contexts.generation++;
	for (size_t i = 0; i < VALVE_CONTEXTS; i++) {
		struct valve_context *known = &valve_contexts.context[i];
		bool matches = context ? known->context == context : known->device == device;

		if (known->state == from && matches)
			known->state = to;
	}
	valve_unlock(&valve_shim.probe_lock);
}

CUresult valve_on_cuCtxCreate(uintptr_t out, uintptr_t a1, uintptr_t a2, uintptr_t a3, uintptr_t a4,
                              uintptr_t a5, struct valve_entry *entry)
{
	CUresult result = call(entry, out, a1, a2, a3, a4, a5);

	if (result == CUDA_SUCCESS && out)
		add_context(*(CUcontext *)out, -1);
	return result;
}

CUresult valve_on_cuCtxDestroy(uintptr_t context, uintptr_t a1, uintptr_t a2, uintptr_t a3, uintptr_t a4,
                               uintptr_t a5, struct valve_entry *entry)
{
	CUresult result;

	if (!context)
		return call(entry, context, a1, a2, a3, a4, a5);
	valve_memory_forget((CUcontext)context, -1, false);
	turn_contexts((CUcontext)context, -1, CONTEXT_LIVE, CONTEXT_GOING);
	result = call(entry, context, a1, a2, a3, a4, a5);
	turn_contexts((CUcontext)context, -1, CONTEXT_GOING,
	              result == CUDA_SUCCESS ? CONTEXT_FREE : CONTEXT_LIVE);
	return result;
}

CUresult valve_on_cuDevicePrimaryCtxRetain(uintptr_t out, uintptr_t device, uintptr_t a2, uintptr_t a3,
                                           uintptr_t a4, uintptr_t a5, struct valve_entry *entry)
{
	CUresult result = call(entry, out, device, a2, a3, a4, a5);

	if (result == CUDA_SUCCESS && out)
		add_context(*(CUcontext *)out, (int)device);
	return result;
}

/* Release counts down and reset destroys at once; only the driver knows whether the context is still there. */
static bool primary_is_active(int device)
{
	CUresult (*get_state)(CUdevice, unsigned *, int *) =
	        (CUresult(*)(CUdevice, unsigned *, int *))valve_real_symbol("cuDevicePrimaryCtxGetState");
	unsigned flags = 0;
	int active = 0;

	return get_state && get_state(device, &flags, &active) == CUDA_SUCCESS && active;
}

CUresult valve_on_cuDevicePrimaryCtxRelease(uintptr_t device, uintptr_t a1, uintptr_t a2, uintptr_t a3,
                                            uintptr_t a4, uintptr_t a5, struct valve_entry *entry)
{
	CUresult result;
	bool is_active;

	turn_contexts(NULL, (int)device, CONTEXT_LIVE, CONTEXT_GOING);
	result = call(entry, device, a1, a2, a3, a4, a5);
	is_active = primary_is_active((int)device);
	turn_contexts(NULL, (int)device, CONTEXT_GOING, is_active ? CONTEXT_LIVE : CONTEXT_FREE);
	if (!is_active)
		valve_memory_forget(NULL, (int)device, true);
	return result;
}

CUresult valve_on_cuDevicePrimaryCtxReset(uintptr_t device, uintptr_t a1, uintptr_t a2, uintptr_t a3,
                                          uintptr_t a4, uintptr_t a5, struct valve_entry *entry)
{
	valve_memory_forget(NULL, (int)device, false);
	return valve_on_cuDevicePrimaryCtxRelease(device, a1, a2, a3, a4, a5, entry);
}

/* ---- streams: only for drivers without whole-context events ---- */

static void turn_stream(CUstream from, CUstream to)
{
	valve_lock(&valve_shim.probe_lock);
	valve_contexts.generation++;
	for (size_t i = 0; i < VALVE_STREAMS; i++)
		if (valve_contexts.stream[i] == from) {
			valve_contexts.stream[i] = to;
			goto out;
		}
	if (!from)
		valve_contexts.stream_overflow = 1;
out:
	valve_unlock(&valve_shim.probe_lock);
}

CUresult valve_on_cuStreamCreate(uintptr_t out, uintptr_t a1, uintptr_t a2, uintptr_t a3, uintptr_t a4,
                                 uintptr_t a5, struct valve_entry *entry)
{
	CUresult result = call(entry, out, a1, a2, a3, a4, a5);

	if (result == CUDA_SUCCESS && out)
		turn_stream(NULL, *(CUstream *)out);
	return result;
}

CUresult valve_on_cuStreamCreateWithPriority(uintptr_t out, uintptr_t a1, uintptr_t a2, uintptr_t a3,
                                             uintptr_t a4, uintptr_t a5, struct valve_entry *entry)
{
	return valve_on_cuStreamCreate(out, a1, a2, a3, a4, a5, entry);
}

/* Forgotten before the real call: what still runs on it then goes unproven, so the count alone keeps us busy. */
CUresult valve_on_cuStreamDestroy(uintptr_t stream, uintptr_t a1, uintptr_t a2, uintptr_t a3, uintptr_t a4,
                                  uintptr_t a5, struct valve_entry *entry)
{
	CUresult result;

	if (stream)
		turn_stream((CUstream)stream, VALVE_STREAM_GOING);
	result = call(entry, stream, a1, a2, a3, a4, a5);
	if (stream)
		turn_stream(VALVE_STREAM_GOING, result == CUDA_SUCCESS ? NULL : (CUstream)stream);
	return result;
}

/* ---- captures ---- */

static void count_capture(int step)
{
	valve_lock(&valve_shim.probe_lock);
	if (step > 0 || VALVE_REGION->capture_depth > 0)
		store_relaxed(&VALVE_REGION->capture_depth, VALVE_REGION->capture_depth + (uint32_t)step);
	valve_unlock(&valve_shim.probe_lock);
}

/* Counted before it begins: the watcher's records hold the same lock, so none can fall into the capture. */
CUresult valve_on_cuStreamBeginCapture(uintptr_t stream, uintptr_t a1, uintptr_t a2, uintptr_t a3,
                                       uintptr_t a4, uintptr_t a5, struct valve_entry *entry)
{
	CUresult result;

	count_capture(1);
	result = call(entry, stream, a1, a2, a3, a4, a5);
	if (result != CUDA_SUCCESS)
		count_capture(-1);
	return result;
}

CUresult valve_on_cuStreamBeginCaptureToGraph(uintptr_t stream, uintptr_t a1, uintptr_t a2, uintptr_t a3,
                                              uintptr_t a4, uintptr_t a5, struct valve_entry *entry)
{
	return valve_on_cuStreamBeginCapture(stream, a1, a2, a3, a4, a5, entry);
}

/*
 * Only answers that mean "the capture is over" count down. In doubt it stays open: then the process looks busy, which
 * costs offline work, whereas a probe inside a live capture would break the application.
 */
CUresult valve_on_cuStreamEndCapture(uintptr_t stream, uintptr_t a1, uintptr_t a2, uintptr_t a3, uintptr_t a4,
                                     uintptr_t a5, struct valve_entry *entry)
{
	CUresult result = call(entry, stream, a1, a2, a3, a4, a5);

	if (result == CUDA_SUCCESS || result == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED ||
	    result == CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
		count_capture(-1);
	return result;
}
