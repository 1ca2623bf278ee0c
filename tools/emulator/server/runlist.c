/*
 * runlist.c - which group of channels executes. One thread per GPU walks the TSGs that are scheduled, enabled and have
 * work, a time slice each, and grants execution by a word per channel on the board. With one TSG
 * running and no other one waiting it sleeps until a process kicks; a disabled TSG takes no slot.
 * TSGs of copy engines have runlists of their own: they are granted as long as they are enabled.
 */
#include "server.h"
#include <stdlib.h>
#include <sys/prctl.h>

enum { LOOK_AGAIN_NS = 5000000 }; /* while a TSG leaves the engine: its process may have died */

static bool tsg_is_graphics(const struct tsg *t)
{
	return t->engine == NV_ENGINE_NULL || NV_ENGINE_IS_GR(t->engine);
}

static bool has_work(struct tsg *t)
{
	struct channel *c;

	TAILQ_FOREACH(c, &t->channels, link)
		if (channel_may_run(c) && load(&c->slot->pending))
			return true;
	return false;
}

void runlist_poke(struct gpu *g)
{
	bump(&g->board->kick);
	futex_wake(&g->board->kick);
	bump(&g->board->ack);
	futex_wake(&g->board->ack);
}

/* Only one TSG executes on the engine: the one that was taken off must have stopped before the next is let on. */
static bool has_left(struct gpu *g, uint64_t now)
{
	struct channel *c;

	if (!g->stopping_since_ns)
		g->stopping_since_ns = now;
	if (g->leaving)
		TAILQ_FOREACH(c, &g->leaving->channels, link)
			if (!channel_stopped(c, now - g->stopping_since_ns))
				return false;
	g->leaving = NULL;
	g->stopping_since_ns = 0;
	return true;
}

/* ---- slices ---- */

/* The first other TSG in the queue that has work. Those that have none leave it until one of their channels gets some. */
static struct tsg *next_with_work(struct gpu *g)
{
	struct tsg *t, *next;

	for (t = TAILQ_FIRST(&g->ready); t; t = next) {
		next = TAILQ_NEXT(t, in_ready);
		if (t == g->running)
			continue;
		if (has_work(t))
			return t;
		TAILQ_REMOVE(&g->ready, t, in_ready);
		t->is_ready = false;
	}
	return NULL;
}

void runlist_ready(struct tsg *t)
{
	struct channel *c;

	if (!tsg_is_graphics(t)) {
		TAILQ_FOREACH(c, &t->channels, link)
			if (channel_may_run(c))
				channel_give(c);
	} else if (!t->is_ready) {
		TAILQ_INSERT_TAIL(&t->gpu->ready, t, in_ready);
		t->is_ready = true;
	}
}

static void to_the_tail(struct tsg *t)
{
	if (t->is_ready)
		TAILQ_REMOVE(&t->gpu->ready, t, in_ready);
	t->is_ready = false;
	runlist_ready(t);
}

/* Which channels got work since the last look: a kick alone would mean to look at thousands. */
static void collect_work(struct gpu *g)
{
	for (uint32_t i = 0; i < EMU_CHANNELS / 32; i++) {
		uint32_t bits = load(&g->board->work[i])
		                        ? __atomic_exchange_n(&g->board->work[i], 0, __ATOMIC_SEQ_CST)
		                        : 0;

		for (; bits; bits &= bits - 1) {
			struct channel *c = channel_of_slot(i * 32 + (uint32_t)__builtin_ctz(bits));

			if (c)
				runlist_ready(c->tsg);
		}
	}
}

static void give_all(struct tsg *t)
{
	struct channel *c;

	TAILQ_FOREACH(c, &t->channels, link)
		if (channel_may_run(c))
			channel_give(c);
}

static void take_all(struct tsg *t)
{
	struct channel *c;

	TAILQ_FOREACH(c, &t->channels, link)
		channel_take(c);
	t->once_off = false;
}

/* Disabled with bOnlyDisableScheduling, or "late": off the runlist, but still on the engine until
 * its slice ends. */
static bool lingers(struct tsg *t)
{
	struct channel *c;

	TAILQ_FOREACH(c, &t->channels, link)
		if (!channel_may_run(c) && load(&c->slot->grant))
			return true;
	return false;
}

/* A TSG that ran alone had its slice renewed again and again: a newcomer waits for the rest of the
 * current one. */
static uint64_t end_of_slice(struct gpu *g, uint64_t now)
{
	uint64_t slice_us = g->running->slice_us, slice_ns;

	slice_ns = slice_us ? slice_us * 1000u : (uint64_t)knob(K_slice_us);
	slice_ns = model_to_real_ns(slice_ns);
	slice_ns = slice_ns ? slice_ns : 1;
	return g->slice_start_ns + ((now - g->slice_start_ns) / slice_ns + 1) * slice_ns;
}

/* The running TSG gets to work; its slice counts from here. */
static void begin(struct gpu *g, uint64_t now)
{
	g->cold_until_ns = 0;
	g->last = g->running;
	g->slice_start_ns = now;
	g->slice_end_ns = 0;
	give_all(g->running);
}

/* The one that comes on after another waits for its registers and caches first. */
static void come_on(struct gpu *g, struct tsg *t, uint64_t now)
{
	uint64_t cold_ns = g->last && g->last != t ? model_to_real_ns((uint64_t)knob(K_switch_us)) : 0;

	g->running = t;
	to_the_tail(t);
	t->once_off = false; /* asked while it was off: it has been */
	g->cold_until_ns = now + cold_ns;
	if (!cold_ns)
		begin(g, now);
}

struct wait {
	uint32_t *word;
	uint64_t deadline_ns;
};

/* Whether the running TSG keeps the engine; then *w says what to wait for. */
static bool keeps(struct gpu *g, struct tsg *next, uint64_t now, struct wait *w)
{
	struct tsg *t = g->running;
	bool wanted_off = next || lingers(t);

	if (now < t->hold_until_ns) {
		*w = (struct wait){&g->board->ack, t->hold_until_ns};
		return true;
	}
	if (t->hold_until_ns || t->once_off) {
		t->hold_until_ns = 0;
		return false;
	}
	if (g->cold_until_ns && has_work(t)) {
		*w = (struct wait){&g->board->ack, g->cold_until_ns};
		if (now < g->cold_until_ns)
			return true;
		begin(g, now);
	}
	if (!wanted_off) {
		g->slice_end_ns = 0;
		if (!g->cold_until_ns)
			give_all(t); /* one of its channels may have become runnable */
		*w = (struct wait){&g->board->kick, 0};
		return true;
	}
	if (!has_work(t) && !lingers(t))
		return false;
	if (!g->slice_end_ns)
		g->slice_end_ns = end_of_slice(g, now);
	*w = (struct wait){&g->board->ack, g->slice_end_ns};
	return now < g->slice_end_ns;
}

static struct wait next_step(struct gpu *g)
{
	struct wait w = {&g->board->kick, 0};
	uint64_t now = now_ns();
	struct tsg *next;

	collect_work(g);
	next = next_with_work(g);
	if (g->running) {
		struct tsg *before = g->running;

		if (keeps(g, next, now, &w))
			return w;
		take_all(before);
		g->running = NULL;
		g->cold_until_ns = 0;
		g->leaving = before;
		if (!next && has_work(before))
			next = before;
	}
	if (!next)
		return w;
	if (!has_left(g, now))
		return (struct wait){&g->board->ack, now + LOOK_AGAIN_NS};
	come_on(g, next, now);
	next = next_with_work(g);
	if (!keeps(g, next, now, &w))
		return (struct wait){&g->board->ack, now}; /* look again at once: a TSG waits for the rest */
	return w;
}

static void *gpu_thread(void *argument)
{
	struct gpu *g = argument;

	prctl(PR_SET_TIMERSLACK, 1);
	for (;;) {
		uint32_t kick = load(&g->board->kick), ack = load(&g->board->ack);
		struct wait w;

		state_lock();
		w = next_step(g);
		state_unlock();
		futex_wait(w.word, w.word == &g->board->kick ? kick : ack, w.deadline_ns);
	}
	return NULL;
}

int runlists_start(void)
{
	for (uint32_t i = 0; i < S.gpus; i++)
		if (pthread_create(&S.gpu[i].thread, NULL, gpu_thread, &S.gpu[i]))
			return -1;
	return 0;
}

struct tsg *tsg_new(struct gpu *g, uint32_t engine)
{
	struct tsg *t = calloc(1, sizeof *t);

	if (!t)
		return NULL;
	t->gpu = g;
	t->engine = engine;
	t->refs = 1;
	t->id = ++S.next_tsg;
	TAILQ_INIT(&t->channels);
	TAILQ_INSERT_TAIL(&g->tsgs, t, link);
	return t;
}

void tsg_put(struct tsg *t)
{
	if (--t->refs)
		return;
	if (t->gpu->running == t)
		t->gpu->running = NULL;
	if (t->gpu->leaving == t)
		t->gpu->leaving = NULL;
	if (t->gpu->last == t)
		t->gpu->last = NULL;
	if (t->is_ready)
		TAILQ_REMOVE(&t->gpu->ready, t, in_ready);
	TAILQ_REMOVE(&t->gpu->tsgs, t, link);
	free(t);
}

void gpu_lose(struct gpu *g)
{
	struct tsg *t;

	store(&g->board->lost, 1);
	xid(g, 79, 0, "GPU has fallen off the bus");
	TAILQ_FOREACH(t, &g->tsgs, link)
		take_all(t);
	runlist_poke(g);
}
