/*
 * channel.c - one channel: its words on the board, giving and taking the right to execute, and waiting until it has
 * truly stopped. runlist.c decides when.
 */
#include "server.h"
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LIVENESS_NS = 5000000 }; /* how often a wait for a stop looks whether the process still exists */

static struct channel *by_slot[EMU_CHANNELS];

struct channel *channel_of_slot(uint32_t slot)
{
	return by_slot[slot];
}

bool channel_may_run(const struct channel *c)
{
	return c->scheduled && !c->disabled && !c->reset && !load(&c->tsg->gpu->board->lost);
}

void channel_give(struct channel *c)
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
void channel_take(struct channel *c)
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

/* Xid 109: context switch timeout. The group is lost, as after robust-channel recovery. */
static void reset(struct channel *c)
{
	if (!c->reset)
		xid(c->tsg->gpu, 109, c->pid, "channel did not stop, reset");
	c->reset = true;
	store(&c->slot->reset, 1);
	store(&c->slot->active, 0);
}

/* A process that died while executing never lowers its words, and one that was stopped by a signal executes nothing
 * (let go on, it looks at the grant before its next piece of work). waited_ns counts from the start of
 * this wait, not from the revoke: an executor of a channel that is off raises active for a moment
 * each time it looks. state held. */
bool channel_stopped(struct channel *c, uint64_t waited_ns)
{
	if (!load(&c->slot->active) || c->reset)
		return true;
	if (waited_ns > LIVENESS_NS && process_stands(c->pid))
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
	uint32_t lost = 0; /* reset before this wait: they cannot fail to stop any more */
	bool all = false;
	uint64_t start_ns = now_ns();

	for (uint32_t i = 0; i < n; i++)
		lost += list[i]->reset;
	while (n && !all) {
		uint32_t seen = load(&g->board->ack);

		all = true;
		state_lock();
		for (uint32_t i = 0; i < n; i++)
			all = channel_stopped(list[i], now_ns() - start_ns) && all;
		state_unlock();
		if (!all)
			futex_wait(&g->board->ack, seen, now_ns() + LIVENESS_NS);
	}
	for (uint32_t i = 0; i < n; i++)
		lost -= list[i]->reset;
	return lost == 0;
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
	by_slot[cid % EMU_CHANNELS] = c;
	TAILQ_INSERT_TAIL(&t->channels, c, link);
	return c;
}

/* Of a process that died within a native step. */
static void forget_parks(const struct channel *c)
{
	for (uint32_t i = 0; load(&c->slot->parks) && i < EMU_PARKS; i++) {
		struct emu_park *p = &S.board->park[i];

		if (load(&p->cid) != c->cid)
			continue;
		store(&p->ready, 0);
		store(&p->cid, 0);
	}
}

void channel_gone(struct channel *c)
{
	struct tsg *t = c->tsg;
	struct gpu *g = t->gpu;

	channel_take(c);
	forget_parks(c);
	g->board->busy_ns += load(&c->slot->busy_ns);
	by_slot[c->cid % EMU_CHANNELS] = NULL;
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
	if (!channel_may_run(c) && revoke)
		channel_take(c);
	if (channel_may_run(c))
		runlist_ready(c->tsg);
}
