/*
 * cycles.c - pauses, timed: disable, watch whether the GPU stands, enable, wait until it moves. Two clocks say when it
 * stopped: the GPU's own time stamp of its last beat, carried to host time by the smallest difference seen before the
 * pause, and a second thread that notes when the host last saw a change, which needs no trust in the GPU's clock.
 */
#include "probe.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CYCLES = 2000, RESUME_MS = 3000, HOLD_MS = 5000, REFUSALS = 3, SILENCES = 5, PATIENT_PAUSES = 8 };
enum outcome { DONE, WORKLOAD_ENDED, NO_GUARD, STUCK };
#define NO_TIME INT64_MIN /* a real one may be negative: the last beat came before the call */

struct cycle {
	struct rm_result off, on;
	int64_t last_beat, last_seen, resume; /* ns after the entry of the call */
	unsigned moved_slots;
	bool is_frozen;
};
struct plan {
	unsigned n, pause_lo, pause_hi, gap_lo, gap_hi, limit_s;
	enum rm_select select;
};
static struct cycle cycle[MAX_CYCLES];
static _Atomic uint64_t seen_ns;
static _Atomic bool is_watching;

static unsigned between(unsigned lo, unsigned hi)
{
	static uint32_t x = 2463534242u;

	x ^= x << 13;
	x ^= x >> 17;
	x ^= x << 5;
	return hi > lo ? lo + x % (hi - lo + 1) : lo;
}

static void *observe(void *unused)
{
	uint64_t last = probe.beat->mark;

	(void)unused;
	for (; atomic_load_explicit(&is_watching, memory_order_relaxed); look_again()) {
		uint64_t mark = probe.beat->mark;
		if (mark == last)
			continue;
		last = mark;
		atomic_store_explicit(&seen_ns, now_ns(), memory_order_release);
	}
	return NULL;
}

/* Watches beats for the gap before a pause. The smallest (host - GPU) difference is the offset of the two clocks. */
static enum outcome gap(const struct plan *plan, int64_t *offset)
{
	uint64_t t, end = now_ns() + between(plan->gap_lo, plan->gap_hi) * 1000ull, last = probe.beat->mark;
	bool beaten = false;

	*offset = INT64_MAX;
	for (; (t = now_ns()) < end || !beaten; look_again()) {
		uint64_t mark = probe.beat->mark;
		if (mark != last) {
			int64_t d = (int64_t)(now_ns() - probe.beat->at);
			*offset = d < *offset ? d : *offset;
			last = mark;
			beaten = true;
		}
		if (atomic_load(&probe.beat->done) || stop_now)
			return WORKLOAD_ENDED;
		if (t > end + RESUME_MS * 1000000ull)
			return STUCK; /* not one beat: dead before we began */
	}
	return DONE;
}

/* Frozen: nothing moved in the second half of the pause, neither the beat nor any multiprocessor's word. */
static void watch_pause(struct cycle *c, uint64_t start, unsigned pause_us)
{
	static uint64_t slot[BEAT_SLOTS];
	const struct beat *beat = probe.beat;
	uint64_t t, half = start + pause_us * 500ull, mark = beat->mark;
	bool taken = false, moved = false;

	for (; (t = now_ns()) < start + pause_us * 1000ull; look_again()) {
		if (beat->mark != mark) {
			mark = beat->mark;
			moved = moved || t > half;
		}
		if (!taken && t > half) {
			memcpy(slot, (const void *)(uintptr_t)beat->slot, sizeof(slot));
			taken = true;
		}
	}
	for (unsigned i = 0; taken && i < beat->slots && i < BEAT_SLOTS; i++)
		c->moved_slots += beat->slot[i] != slot[i];
	c->is_frozen = !moved && !c->moved_slots;
}

static enum outcome one(const struct plan *plan, struct cycle *c)
{
	struct beat *beat = probe.beat;
	int64_t offset;
	enum outcome outcome = gap(plan, &offset);

	*c = (struct cycle){.last_beat = NO_TIME, .last_seen = NO_TIME, .resume = -1};
	if (outcome != DONE)
		return outcome;
	if (!guard_ask("hold", HOLD_MS))
		return NO_GUARD;
	uint64_t start = now_ns();
	c->off = switch_channels(plan->select, true);
	watch_pause(c, now_ns(), between(plan->pause_lo, plan->pause_hi));
	c->last_seen = (int64_t)(atomic_load(&seen_ns) - start);
	if (beat->has_time)
		c->last_beat = (int64_t)beat->at + offset - (int64_t)start;
	uint64_t before = beat->mark, on = now_ns(), t;
	c->on = switch_channels(plan->select, false);
	while ((t = now_ns()) < on + RESUME_MS * 1000000ull && beat->mark == before &&
	       !atomic_load(&beat->done))
		look_again();
	if (beat->mark != before)
		c->resume = (int64_t)(t - on);
	guard_ask("release", 0);
	probe.left_off = false;
	if (c->resume < 0)
		return atomic_load(&beat->done) ? WORKLOAD_ENDED : STUCK;
	return DONE;
}

/* A workload without a beat (a whole engine): only the calls are timed; the pause itself cannot be seen. */
static enum outcome one_blind(const struct plan *plan, struct cycle *c)
{
	*c = (struct cycle){.last_beat = NO_TIME, .last_seen = NO_TIME, .resume = -1};
	sleep_us(between(plan->gap_lo, plan->gap_hi));
	if (stop_now)
		return WORKLOAD_ENDED;
	if (!guard_ask("hold", HOLD_MS))
		return NO_GUARD;
	c->off = switch_channels(plan->select, true);
	sleep_us(between(plan->pause_lo, plan->pause_hi));
	c->on = switch_channels(plan->select, false);
	guard_ask("release", 0);
	probe.left_off = false;
	if (c->off.err || c->on.err)
		return WORKLOAD_ENDED;
	c->is_frozen = rm_good(c->off);
	return DONE;
}

/* Never leave it like this: everything on, and one more look. */
static const char *rescue(void)
{
	uint64_t mark = probe.beat->mark, until = now_ns() + RESUME_MS * 1000000ull;

	switch_channels(SELECT_ALL, false);
	guard_ask("enable-all", 0);
	for (; now_ns() < until; look_again())
		if (probe.beat->mark != mark)
			return "resumed only after the guard";
	return "stuck";
}

static const char *run(const struct plan *plan, unsigned *n)
{
	unsigned refused = 0, silent = 0, frozen = 0;
	uint64_t end = now_ns() + plan->limit_s * 1000000000ull;

	while (*n < plan->n) {
		if (stop_now || now_ns() > end)
			return stop_now ? "signal" : "time limit";
		struct cycle *c = &cycle[*n];
		enum outcome outcome = probe.beat ? one(plan, c) : one_blind(plan, c);
		if (outcome == NO_GUARD)
			return "the guard did not acknowledge";
		if (outcome == WORKLOAD_ENDED)
			return "workload ended";
		(*n)++;
		if (probe.is_slow)
			return "slow";
		if (outcome == STUCK)
			return rescue();
		if (!rm_good(c->off) || !rm_good(c->on)) {
			if (++refused == REFUSALS)
				return "refused";
		} else if (!c->is_frozen && ++silent == SILENCES && !frozen) {
			return "silent";
		}
		frozen += rm_good(c->off) && c->is_frozen;
	}
	return "complete";
}

static void print_column(const char *name, unsigned n, int64_t (*value)(const struct cycle *))
{
	const char *comma = "";

	printf(", \"%s\": [", name);
	for (unsigned i = 0; i < n; i++) {
		int64_t ns = value(&cycle[i]);
		if (ns == NO_TIME)
			continue;
		printf("%s%.1f", comma, (double)ns / 1e3);
		comma = ", ";
	}
	printf("]");
}

static int64_t off_ns(const struct cycle *c)
{
	return (int64_t)c->off.ns;
}

static int64_t on_ns(const struct cycle *c)
{
	return (int64_t)c->on.ns;
}

static int64_t beat_ns(const struct cycle *c)
{
	return c->is_frozen ? c->last_beat : NO_TIME;
}

static int64_t last_seen_ns(const struct cycle *c)
{
	return c->is_frozen ? c->last_seen : NO_TIME;
}

static int64_t resume_ns(const struct cycle *c)
{
	return c->resume < 0 ? NO_TIME : c->resume;
}

static void print(unsigned n, const char *note)
{
	unsigned frozen = 0, refused = 0, moved = 0;
	struct rm_result bad = {0};

	for (unsigned i = 0; i < n; i++) {
		bool good = rm_good(cycle[i].off) && rm_good(cycle[i].on);
		frozen += good && cycle[i].is_frozen;
		moved += cycle[i].moved_slots > 0;
		if (good)
			continue;
		refused++;
		bad = rm_good(cycle[i].off) ? cycle[i].on : cycle[i].off;
	}
	printf("{\"n\": %u, \"frozen\": %u, \"refused\": %u, \"slots_moved\": %u, \"note\": \"%s\", "
	       "\"slow\": %s, ",
	       n, frozen, refused, moved, note, probe.is_slow ? "true" : "false");
	print_result("", bad);
	print_column("off_us", n, off_ns);
	print_column("on_us", n, on_ns);
	print_column("last_beat_us", n, beat_ns);
	print_column("last_seen_us", n, last_seen_ns);
	print_column("resume_us", n, resume_ns);
	printf("}\n");
}

void cycles(const char *rest)
{
	struct plan plan = {.n = 10, .limit_s = 30};
	char word[16] = "gr";
	pthread_t thread;
	unsigned n = 0;

	sscanf(rest, "%u %15s %u %u %u %u %u", &plan.n, word, &plan.pause_lo, &plan.pause_hi, &plan.gap_lo,
	       &plan.gap_hi, &plan.limit_s);
	plan.select = select_of(word);
	plan.n = plan.n < MAX_CYCLES ? plan.n : MAX_CYCLES;
	if (probe.is_patient) { /* a descheduled emulator must not look like a stopped GPU */
		plan.pause_lo *= PATIENT_PAUSES;
		plan.pause_hi *= PATIENT_PAUSES;
	}
	atomic_store(&is_watching, probe.beat != NULL);
	if (probe.beat && pthread_create(&thread, NULL, observe, NULL)) {
		printf("{\"error\": \"no thread\"}\n");
		return;
	}
	const char *note = run(&plan, &n);
	if (atomic_exchange(&is_watching, false))
		pthread_join(thread, NULL);
	print(n, note);
}
