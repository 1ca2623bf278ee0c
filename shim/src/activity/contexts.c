/*
 * contexts.c - observers: which contexts and streams live, and whether a capture is open. What the watcher is asking about
 * is not destroyed, and no capture begins in it, before the answer: that alone is waited for (contexts.h).
 *
 * A context that is being destroyed is "going" until the real call returned: the watcher then proves nothing. The
 * lock is never held across a real call, so no thread waits for a driver's slow teardown.
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

/* What comes after it began is kept away by the book: no capture may be open, nothing asked about may be going. */
void valve_contexts_await(CUcontext context)
{
	uint32_t seen = load_acquire(&valve_contexts.asking);

	if (!(seen & 1) || (context && !load_relaxed(&valve_contexts.asks_streams) &&
	                    load_relaxed(&valve_contexts.asked) != context))
		return;
	while (load_acquire(&valve_contexts.asking) == seen)
		futex_wait(&valve_contexts.asking, seen, 0);
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

/*
 * Contexts that match go from one state to another. `context` NULL: the primary context of `device`. The event of one that
 * lives on is forgotten: it may be another context by now, under the same address.
 */
static void turn_contexts(CUcontext context, int device, enum valve_context_state from,
                          enum valve_context_state to)
{
	CUcontext waited_for = NULL;

	valve_lock(&valve_shim.probe_lock);
	valve_contexts.generation++;
	for (size_t i = 0; i < VALVE_CONTEXTS; i++) {
		struct valve_context *known = &valve_contexts.context[i];
		bool matches = context ? known->context == context : known->device == device;

		if (known->state != from || !matches)
			continue;
		known->state = to;
		if (to == CONTEXT_GOING)
			waited_for = known->context;
		else
			known->event = NULL;
	}
	valve_unlock(&valve_shim.probe_lock);
	if (waited_for)
		valve_contexts_await(waited_for);
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

/* Attach and Detach count the users of a context; the last Detach destroys it. Deprecated, and in older programs. */
static bool count_attached(CUcontext context, bool adds)
{
	bool lives = false;

	valve_lock(&valve_shim.probe_lock);
	for (size_t i = 0; i < VALVE_CONTEXTS; i++) {
		struct valve_context *known = &valve_contexts.context[i];

		if (known->state == CONTEXT_FREE || known->context != context)
			continue;
		lives = adds || known->attached;
		known->attached += adds ? 1 : (uint32_t) - (known->attached > 0);
	}
	valve_unlock(&valve_shim.probe_lock);
	return lives;
}

CUresult valve_on_cuCtxAttach(uintptr_t out, uintptr_t a1, uintptr_t a2, uintptr_t a3, uintptr_t a4,
                              uintptr_t a5, struct valve_entry *entry)
{
	CUresult result = call(entry, out, a1, a2, a3, a4, a5);

	if (result == CUDA_SUCCESS && out)
		count_attached(*(CUcontext *)out, true);
	return result;
}

CUresult valve_on_cuCtxDetach(uintptr_t context, uintptr_t a1, uintptr_t a2, uintptr_t a3, uintptr_t a4,
                              uintptr_t a5, struct valve_entry *entry)
{
	if (context && count_attached((CUcontext)context, false))
		return call(entry, context, a1, a2, a3, a4, a5);
	return valve_on_cuCtxDestroy(context, a1, a2, a3, a4, a5, entry);
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
			store_relaxed(&valve_contexts.stream[i], to);
			goto out;
		}
	if (!from)
		store_relaxed(&valve_contexts.stream_overflow, 1);
out:
	valve_unlock(&valve_shim.probe_lock);
	if (to == VALVE_STREAM_GOING && load_relaxed(&valve_contexts.asks_streams))
		valve_contexts_await(NULL);
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

/* NULL: unknown. Handles up to 2 are the default streams of the current context. */
static CUcontext context_of(CUstream stream)
{
	CUresult (*of_stream)(CUstream, CUcontext *) =
	        (CUresult(*)(CUstream, CUcontext *))valve_real_symbol("cuStreamGetCtx");
	CUresult (*current)(CUcontext *) = (CUresult(*)(CUcontext *))valve_real_symbol("cuCtxGetCurrent");
	CUcontext context = NULL;

	if ((uintptr_t)stream > 2)
		return of_stream && of_stream(stream, &context) == CUDA_SUCCESS ? context : NULL;
	return current && current(&context) == CUDA_SUCCESS ? context : NULL;
}

/* Counted before it begins: the watcher records nothing more, and what it records there already is waited for. */
CUresult valve_on_cuStreamBeginCapture(uintptr_t stream, uintptr_t a1, uintptr_t a2, uintptr_t a3,
                                       uintptr_t a4, uintptr_t a5, struct valve_entry *entry)
{
	CUresult result;

	count_capture(1);
	if (load_acquire(&valve_contexts.asking) & 1)
		valve_contexts_await(context_of((CUstream)stream));
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
