/*
 * watcher.c - proves that an online process left the GPU idle. In the flow: launches count; valved asks (control.watch);
 * after some quiet this thread records one event per context, waits until all completed, and if no launch was counted
 * meanwhile publishes "everything up to this count is done".
 *
 * It errs towards busy: an error, an open capture, an unknown context or a dead watcher all mean "not proven", and
 * then offline work waits. It never spins: 1 ms naps while a proof is wanted, else it sleeps on a futex.
 */
#include "contexts.h"

#include <stdlib.h>

#define NAP_NS       1000000u  /* period while a proof is wanted: the busy-to-idle edge may be that coarse */
#define IDLE_NAP_NS  10000000u /* longest nap while idle with the gate closed: bounds the error of a gap */
#define SLEEP_NS     1000000000u /* heartbeat while unasked; also finds a page that was replaced meanwhile */
#define QUERY_NS     50000u
#define ERROR_NAP_NS 100000000u
#define QUIET_US     500u /* when the daemon names none */
#define EXIT_WAIT    1000 /* times NAP_NS */

enum verdict { IDLE, RUNNING, MOVED, CAPTURING, NO_CONTEXT, FAILED };

static struct {
	CUresult (*set_current)(CUcontext);
	CUresult (*event_create)(CUevent *, unsigned);
	CUresult (*event_query)(CUevent);
	CUresult (*record)(CUcontext, CUevent); /* NULL before CUDA 12.5 */
	CUresult (*stream_query)(CUstream);
} cuda;

static bool load_driver(void)
{
	CUresult (*exchange_mode)(int *) =
	        (CUresult(*)(int *))valve_real_symbol("cuThreadExchangeStreamCaptureMode");
	int mode = CU_STREAM_CAPTURE_MODE_RELAXED;

	cuda.set_current = (CUresult(*)(CUcontext))valve_real_symbol("cuCtxSetCurrent");
	cuda.event_create = (CUresult(*)(CUevent *, unsigned))valve_real_symbol("cuEventCreate");
	cuda.event_query = (CUresult(*)(CUevent))valve_real_symbol("cuEventQuery");
	cuda.record = (CUresult(*)(CUcontext, CUevent))valve_real_symbol("cuCtxRecordEvent");
	cuda.stream_query = (CUresult(*)(CUstream))valve_real_symbol("cuStreamQuery");
	store_relaxed(&valve_contexts.asks_streams, !cuda.record);
	/* Else another thread's capture in GLOBAL mode would make our calls illegal. */
	if (!exchange_mode || exchange_mode(&mode) != CUDA_SUCCESS)
		return false;
	return cuda.set_current &&
	       (cuda.record ? cuda.event_create && cuda.event_query : cuda.stream_query != NULL);
}

/* ---- one probe ---- */

/* Precondition: probe_lock is held. */
static enum verdict can_probe(void)
{
	bool any = false;

	if (load_relaxed(&valve_shim.stopping) || valve_contexts.overflow)
		return FAILED;
	if (VALVE_REGION->capture_depth || load_relaxed(&valve_shim.unknown_capture))
		return CAPTURING;
	for (size_t i = 0; i < VALVE_CONTEXTS; i++) {
		if (valve_contexts.context[i].state == CONTEXT_GOING)
			return RUNNING;
		any |= valve_contexts.context[i].state == CONTEXT_LIVE;
	}
	return any ? IDLE : NO_CONTEXT;
}

/*
 * From here to end_asking() the context at `index` is not destroyed, and none captures in it: a thread that wants to
 * waits for this call, and no other thread does. An event may be asked about in a capture; nothing may be recorded there.
 */
static enum verdict begin_asking(size_t index, uint32_t generation, bool records, struct valve_context *out)
{
	enum verdict verdict;

	valve_lock(&valve_shim.probe_lock);
	verdict = generation == valve_contexts.generation ? can_probe() : MOVED;
	if (verdict == CAPTURING && cuda.record && !records)
		verdict = IDLE;
	*out = valve_contexts.context[index];
	if (verdict == IDLE && out->state == CONTEXT_LIVE) {
		store_relaxed(&valve_contexts.asked, out->context);
		add_full(&valve_contexts.asking, 1);
	}
	valve_unlock(&valve_shim.probe_lock);
	return verdict;
}

static void end_asking(size_t index, const struct valve_context *context)
{
	valve_lock(&valve_shim.probe_lock);
	if (valve_contexts.context[index].context == context->context)
		valve_contexts.context[index].event = context->event;
	add_full(&valve_contexts.asking, 1);
	valve_unlock(&valve_shim.probe_lock);
	futex_wake(&valve_contexts.asking, INT32_MAX);
}

static CUresult record_on(struct valve_context *context)
{
	CUresult result = CUDA_SUCCESS;

	if (!context->event) {
		result = cuda.set_current(context->context);
		if (result == CUDA_SUCCESS)
			result = cuda.event_create(&context->event, CU_EVENT_DISABLE_TIMING);
		cuda.set_current(NULL);
	}
	return result == CUDA_SUCCESS ? cuda.record(context->context, context->event) : result;
}

static enum verdict record_all(uint32_t generation)
{
	enum verdict verdict = IDLE;

	for (size_t i = 0; cuda.record && verdict == IDLE && i < VALVE_CONTEXTS; i++) {
		struct valve_context context;

		verdict = begin_asking(i, generation, true, &context);
		if (verdict != IDLE || context.state != CONTEXT_LIVE)
			continue;
		if (record_on(&context) != CUDA_SUCCESS)
			verdict = FAILED;
		end_asking(i, &context);
	}
	return verdict;
}

static enum verdict verdict_of(CUresult result)
{
	if (result == CUDA_SUCCESS)
		return IDLE;
	return result == CUDA_ERROR_NOT_READY ? RUNNING : FAILED;
}

/* Before 12.5: every known stream and each context's legacy stream, asked one by one. */
static enum verdict query_streams(CUcontext context)
{
	enum verdict verdict;

	if (load_relaxed(&valve_contexts.stream_overflow) || load_relaxed(&valve_shim.ptds))
		return FAILED; /* work may be in streams that cannot be asked */
	if (cuda.set_current(context) != CUDA_SUCCESS)
		return FAILED;
	verdict = verdict_of(cuda.stream_query(NULL));
	for (size_t i = 0; verdict == IDLE && i < VALVE_STREAMS; i++) {
		CUstream stream = load_relaxed(&valve_contexts.stream[i]);

		if (stream)
			verdict = stream == VALVE_STREAM_GOING ? RUNNING
			                                       : verdict_of(cuda.stream_query(stream));
	}
	cuda.set_current(NULL);
	return verdict;
}

static enum verdict query_all(uint32_t generation)
{
	enum verdict verdict = IDLE;

	for (size_t i = 0; verdict == IDLE && i < VALVE_CONTEXTS; i++) {
		struct valve_context context;

		verdict = begin_asking(i, generation, false, &context);
		if (verdict != IDLE || context.state != CONTEXT_LIVE)
			continue;
		verdict = cuda.record ? verdict_of(cuda.event_query(context.event))
		                      : query_streams(context.context);
		end_asking(i, &context);
	}
	return verdict;
}

static uint32_t generation_now(void)
{
	uint32_t generation;

	valve_lock(&valve_shim.probe_lock);
	generation = valve_contexts.generation;
	valve_unlock(&valve_shim.probe_lock);
	return generation;
}

/* Records, then polls until done or until a thread submits. Returns what is proven about the count `sum`. */
static enum verdict probe(uint64_t sum)
{
	uint64_t nap_ns = QUERY_NS;
	uint32_t generation = generation_now();
	enum verdict verdict = record_all(generation);

	store_relaxed(&VALVE_REGION->probes, VALVE_REGION->probes + 1);
	while (verdict == IDLE) {
		verdict = query_all(generation);
		if (verdict != RUNNING)
			break;
		if (valve_submitted() != sum)
			return MOVED;
		sleep_ns(nap_ns);
		nap_ns = nap_ns * 2 < NAP_NS ? nap_ns * 2 : NAP_NS;
		verdict = IDLE;
	}
	return verdict == IDLE && valve_submitted() != sum ? MOVED : verdict;
}

/* ---- what valved reads ---- */

/* The hint comes first, and valved reads it last: after a long stall a process that lives would else be one whose open
 * requests are too old to be believed, and its GPUs would be given away. */
static void write_idle(uint64_t sum, uint64_t idle_ns, uint64_t beat_ns)
{
	struct valve_region *region = VALVE_REGION;
	uint32_t seq = region->idle_seq;

	valve_hint_renew(beat_ns);
	store_relaxed(&region->idle_seq, seq + 1); /* odd: readers wait */
	release_fence(); /* nothing below comes before it, on a weakly ordered CPU either */
	store_relaxed(&region->idle_submitted, sum);
	store_relaxed(&region->idle_ns, idle_ns);
	store_relaxed(&region->watcher_ns, beat_ns);
	store_release(&region->idle_seq, seq + 2);
}

static void beat(enum valve_watcher state)
{
	struct valve_region *region = VALVE_REGION;

	store_relaxed(&region->watcher_state, (uint32_t)state);
	write_idle(region->idle_submitted, region->idle_ns, now_ns());
}

/*
 * busy falls after the proof is out, and rises again if a launch was counted in between: that launch may have rung before
 * we cleared the word, and it rings once per epoch only. Pairs with "count, then busy" of the slow path.
 */
static void publish_idle(uint64_t sum)
{
	uint64_t now = now_ns();

	write_idle(sum, now, now);
	exchange_full(&VALVE_REGION->busy, 0); /* full: the count is read again after it */
	if (valve_submitted() != sum)
		store_release(&VALVE_REGION->busy, 1);
	else
		store_relaxed(&VALVE_REGION->watcher_state, VALVE_WATCHER_IDLE);
}

static void note_gap(void)
{
	struct valve_region *region = VALVE_REGION;
	struct valve_gap *ring = (struct valve_gap *)(void *)((unsigned char *)region + VALVE_GAP_OFFSET);
	uint64_t idle_ns = region->idle_ns, now = now_ns();
	uint64_t launch_ns = load_relaxed(&region->launch_ns);
	uint64_t end_ns = load_relaxed(&region->busy) && launch_ns > idle_ns ? launch_ns : now;

	if (!idle_ns)
		return; /* born busy: that is no gap */
	ring[region->gaps % VALVE_GAPS] = (struct valve_gap){.end_ns = end_ns, .gap_ns = end_ns - idle_ns};
	store_release(&region->gaps, region->gaps + 1);
}

static bool is_proven(void)
{
	return !load_relaxed(&VALVE_REGION->busy) && VALVE_REGION->idle_ns &&
	       valve_submitted() == VALVE_REGION->idle_submitted;
}

/* Proven idle: with the gate open a launch wakes us, with the gate closed none does, so naps grow to 10 ms. */
static void stay_idle(void)
{
	uint64_t nap_ns = NAP_NS;

	while (is_proven() && load_relaxed(&VALVE_CONTROL->watch) && !load_relaxed(&valve_shim.stopping)) {
		beat(VALVE_WATCHER_IDLE);
		futex_wait(&VALVE_REGION->busy, 0,
		           (load_relaxed(&VALVE_CONTROL->gate_epoch) & 1) ? SLEEP_NS : nap_ns);
		nap_ns = nap_ns * 2 < IDLE_NAP_NS ? nap_ns * 2 : IDLE_NAP_NS;
	}
}

/* One attempt; returns how long to rest. */
static uint64_t try_to_prove(void)
{
	static const enum valve_watcher state_of[] = {[RUNNING] = VALVE_WATCHER_WATCHING,
	                                              [MOVED] = VALVE_WATCHER_WATCHING,
	                                              [CAPTURING] = VALVE_WATCHER_CAPTURE,
	                                              [NO_CONTEXT] = VALVE_WATCHER_NO_CONTEXT,
	                                              [FAILED] = VALVE_WATCHER_ERROR};
	uint32_t quiet_us =
	        load_relaxed(&VALVE_CONTROL->quiet_us) ? load_relaxed(&VALVE_CONTROL->quiet_us) : QUIET_US;
	uint64_t sum = valve_submitted();
	enum verdict verdict = MOVED;

	sleep_ns((uint64_t)quiet_us * 1000u);
	if (valve_submitted() == sum)
		verdict = probe(sum);
	if (verdict == IDLE) {
		publish_idle(sum);
		return 0;
	}
	beat(state_of[verdict]);
	return verdict == FAILED ? ERROR_NAP_NS : NAP_NS;
}

static void *watch(void *unused)
{
	bool works = load_driver(), was_idle = false;

	(void)unused;
	while (!load_relaxed(&valve_shim.stopping)) {
		if (!load_relaxed(&VALVE_CONTROL->watch) ||
		    load_relaxed(&valve_shim.role) != VALVE_ROLE_ONLINE) {
			beat(VALVE_WATCHER_ASLEEP);
			futex_wait(&VALVE_CONTROL->watch, 0, SLEEP_NS);
		} else if (!works) {
			beat(VALVE_WATCHER_ERROR);
			sleep_ns(SLEEP_NS);
		} else if (is_proven()) {
			was_idle = true;
			stay_idle();
		} else {
			if (was_idle)
				note_gap(); /* also one that ended while valved did not ask */
			sleep_ns(try_to_prove());
			was_idle = VALVE_REGION->watcher_state == VALVE_WATCHER_IDLE;
		}
	}
	return NULL;
}

/* At exit the driver is torn down under us: begin no other probe, let the last one end unless the driver sits on it. */
static void stop(void)
{
	store_relaxed(&valve_shim.stopping, 1);
	generation_now(); /* a thread that held the lock has said by now that it asks */
	for (int i = 0; i < EXIT_WAIT && (load_acquire(&valve_contexts.asking) & 1); i++)
		sleep_ns(NAP_NS);
}

/* Called when a context appears and when valved made us online; whichever comes second starts the thread. */
void valve_watcher_start(void)
{
	uint32_t no = 0;

	if (load_relaxed(&valve_shim.role) != VALVE_ROLE_ONLINE || !load_relaxed(&valve_contexts.generation))
		return;
	if (!swap_if(&valve_shim.watcher_runs, &no, 1))
		return;
	if (valve_spawn(watch, VALVE_STACK_MOST)) {
		valve_say("cannot start the watcher thread; this process counts as busy until it can");
		store_relaxed(&valve_shim.watcher_runs, 0);
	} else {
		atexit(stop);
	}
}
