/*
 * runlist.c - who executes. One thread per GPU walks the TSGs that are scheduled, enabled and have
 * work, a time slice each, and grants execution by a word per channel on the board. With one TSG
 * running and nobody else waiting it sleeps until a process kicks; a disabled TSG takes no slot.
 * TSGs of copy engines have runlists of their own: they are granted as long as they are enabled.
 */
#include "server.h"
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LIVENESS_NS = 5000000 }; /* how often a wait for a stop looks whether the process still exists */

static bool is_graphics(const struct tsg *t)
{
	return t->engine == NV_ENGINE_NULL || NV_ENGINE_IS_GR(t->engine);
}

static bool may_run(const struct channel *c)
{
	return c->scheduled && !c->disabled && !c->reset && !load(&c->tsg->gpu->board->lost);
}

static bool has_work(struct tsg *t)
{
	struct channel *c;

	TAILQ_FOREACH(c, &t->channels, link)
		if (may_run(c) && load(&c->slot->pending))
			return true;
	return false;
}

static void give(struct channel *c)
{
	if (load(&c->slot->grant))
		return;
	c->slot->granted_ns = now_ns();
	store(&c->slot->grant, 1);
	if (load(&c->slot->pending))
		futex_wake(&c->slot->grant);
}

/* Threads that cannot look at the grant themselves are told; they lower active when they have parked. */
static void park_threads(const struct channel *c)
{
	siginfo_t info = {.si_signo = EMU_PARK_SIGNAL, .si_code = SI_QUEUE, .si_pid = getpid()};

	for (uint32_t i = 0; load(&c->slot->parks) && i < EMU_PARKS; i++) {
		struct emu_park *p = &S.board->park[i];

		if (load(&p->cid) == c->cid && load(&p->ready))
			syscall(SYS_rt_tgsigqueueinfo, p->pid, p->tid, EMU_PARK_SIGNAL, &info);
	}
}

/* The executor raised active before it read grant, so active 0 here means that it will see grant 0.
 */
static void take(struct channel *c)
{
	if (!load(&c->slot->grant))
		return;
	c->slot->revoked_ns = now_ns();
	store(&c->slot->grant, 0);
	if (!load(&c->slot->active))
		return;
	futex_wake(&c->slot->grant);
	park_threads(c);
}

void runlist_poke(struct gpu *g)
{
	bump(&g->board->kick);
	futex_wake(&g->board->kick);
	bump(&g->board->ack);
	futex_wake(&g->board->ack);
}

/* ---- stopping ---- */

/* Xid 109: context switch timeout. The group is lost, as after robust-channel recovery. */
static void reset(struct channel *c)
{
	if (!c->reset)
		xid(c->tsg->gpu, 109, c->pid, "channel did not stop, reset");
	c->reset = true;
	store(&c->slot->reset, 1);
	store(&c->slot->active, 0);
}

/* A process that died while executing never lowers its words. waited_ns counts from the start of
 * this wait, not from the revoke: an executor of a channel that is off raises active for a moment
 * each time it looks. state held. */
static bool stopped(struct channel *c, uint64_t waited_ns)
{
	if (!load(&c->slot->active) || c->reset)
		return true;
	if (waited_ns > LIVENESS_NS && process_gone(c->pid)) {
		store(&c->slot->pending, 0);
		store(&c->slot->active, 0);
		return true;
	}
	if (waited_ns > model_to_real_ns((uint64_t)knob(K_preempt_timeout_ms)))
		reset(c);
	return false;
}

bool channels_wait_stopped(struct channel **list, uint32_t n)
{
	struct gpu *g = n ? list[0]->tsg->gpu : NULL;
	bool all = false, in_time = true;
	uint64_t start_ns = now_ns();

	while (n && !all) {
		uint32_t seen = load(&g->board->ack);

		all = true;
		state_lock();
		for (uint32_t i = 0; i < n; i++)
			all = stopped(list[i], now_ns() - start_ns) && all;
		state_unlock();
		if (!all)
			futex_wait(&g->board->ack, seen, now_ns() + LIVENESS_NS);
	}
	for (uint32_t i = 0; i < n; i++)
		in_time = in_time && !list[i]->reset;
	return in_time;
}

static bool others_stopped(struct gpu *g, const struct tsg *but, uint64_t now)
{
	uint64_t since_ns = g->stopping_since_ns ? g->stopping_since_ns : now;
	struct channel *c;
	struct tsg *t;

	g->stopping_since_ns = since_ns;
	TAILQ_FOREACH(t, &g->tsgs, link)
		if (t != but && is_graphics(t))
			TAILQ_FOREACH(c, &t->channels, link)
				if (!stopped(c, now - since_ns))
					return false;
	g->stopping_since_ns = 0;
	return true;
}

/* ---- slices ---- */

/* The next TSG with work after `after`, in a circle, not `after` itself. */
static struct tsg *next_with_work(struct gpu *g, struct tsg *after)
{
	struct tsg *start = after ? TAILQ_NEXT(after, link) : NULL, *t;

	if (!start)
		start = TAILQ_FIRST(&g->tsgs);
	for (t = start; t;) {
		if (t != after && is_graphics(t) && has_work(t))
			return t;
		t = TAILQ_NEXT(t, link) ? TAILQ_NEXT(t, link) : TAILQ_FIRST(&g->tsgs);
		if (t == start)
			break;
	}
	return NULL;
}

static void give_all(struct tsg *t)
{
	struct channel *c;

	TAILQ_FOREACH(c, &t->channels, link)
		if (may_run(c))
			give(c);
}

static void take_all(struct tsg *t)
{
	struct channel *c;

	TAILQ_FOREACH(c, &t->channels, link)
		take(c);
	t->once_off = false;
}

/* Disabled with bOnlyDisableScheduling, or "late": off the runlist, but still on the engine until
 * its slice ends. */
static bool lingers(struct tsg *t)
{
	struct channel *c;

	TAILQ_FOREACH(c, &t->channels, link)
		if (!may_run(c) && load(&c->slot->grant))
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
	if (!wanted_off) {
		g->slice_end_ns = 0;
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
	struct tsg *next = next_with_work(g, g->running);

	if (g->running) {
		struct tsg *before = g->running;

		if (keeps(g, next, now, &w))
			return w;
		take_all(before);
		g->running = NULL;
		if (!next && has_work(before))
			next = before;
	}
	if (!next)
		return w;
	if (!others_stopped(g, next, now))
		return (struct wait){&g->board->ack, now + LIVENESS_NS};
	g->running = next;
	g->slice_start_ns = now;
	g->slice_end_ns = 0;
	give_all(next);
	next = next_with_work(g, g->running);
	keeps(g, next, now, &w);
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

/* ---- what calls change ---- */

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
	TAILQ_REMOVE(&t->gpu->tsgs, t, link);
	free(t);
}

/* Unique while the server lives and never the slot of another live channel: the cid detects reused
 * handles. */
static uint32_t next_cid(void)
{
	for (uint32_t tries = 0; tries < EMU_CHANNELS; tries++) {
		uint32_t cid = ++S.next_cid;

		if (cid && !load(&S.board->channel[cid % EMU_CHANNELS].cid))
			return cid;
	}
	return 0;
}

struct channel *channel_new(struct tsg *t, struct object *o, uint32_t engine, pid_t pid)
{
	uint32_t cid = next_cid();
	struct channel *c = cid ? calloc(1, sizeof *c) : NULL;
	struct emu_channel *slot;

	if (!c)
		return NULL;
	slot = &S.board->channel[cid % EMU_CHANNELS];
	memset(slot, 0, sizeof *slot);
	*c = (struct channel){.tsg = t, .object = o, .slot = slot, .cid = cid, .engine = engine, .pid = pid};
	slot->gpu = t->gpu->index;
	slot->pid = (uint32_t)pid;
	slot->tsg = t->id;
	slot->engine = engine;
	store(&slot->cid, cid);
	t->refs++;
	TAILQ_INSERT_TAIL(&t->channels, c, link);
	return c;
}

void channel_gone(struct channel *c)
{
	struct tsg *t = c->tsg;
	struct gpu *g = t->gpu;

	take(c);
	g->board->busy_ns += load(&c->slot->busy_ns);
	TAILQ_REMOVE(&t->channels, c, link);
	store(&c->slot->cid, 0);
	free(c);
	tsg_put(t);
	runlist_poke(g);
}

void channel_set(struct channel *c, bool scheduled, bool disabled, bool revoke)
{
	c->scheduled = scheduled;
	c->disabled = disabled;
	store(&c->slot->scheduled, scheduled);
	store(&c->slot->disabled, disabled);
	if (!may_run(c) && revoke)
		take(c);
	if (may_run(c) && !is_graphics(c->tsg))
		give(c);
	runlist_poke(c->tsg->gpu);
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
