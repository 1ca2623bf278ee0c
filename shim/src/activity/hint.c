/*
 * hint.c - the lifecycle hint: an engine in this process says how many requests it has open, and "at most one preemption
 * per request" is exact instead of guessed. The one function that other libraries may call; without a daemon it has no
 * visible effect.
 *
 *     void valve_hint_open_requests(uint32_t open);      found by dlsym(RTLD_DEFAULT), called whenever the number changes
 *
 * The first open request rings the doorbell as a launch would: offline work stops while the engine still plans its first
 * step, so that the launch finds the GPU free.
 *
 * valved believes a hint for its lease only, so the watcher's heartbeat renews it: a process that died, or whose watcher
 * cannot run, is not believed any more and its service falls back to the cooldown.
 */
#include "shim.h"

static struct {
	struct valve_lock lock;
	uint32_t said; /* called at least once */
	uint32_t open;
	uint64_t started, ended;
} hint;

/* The region may have been replaced since the last call: every word is written again. Precondition: lock is held. */
static void write_hint(uint64_t now)
{
	struct valve_region *region = VALVE_REGION;

	store_relaxed(&region->requests_started, hint.started);
	store_relaxed(&region->requests_ended, hint.ended);
	store_relaxed(&region->open_requests, hint.open);
	/* Last: valved takes a fresh hint_ns for the word that the numbers above are there. */
	store_release(&region->hint_ns, now);
}

void valve_hint_renew(uint64_t now)
{
	if (!load_relaxed(&hint.said))
		return;
	valve_lock(&hint.lock);
	write_hint(now);
	valve_unlock(&hint.lock);
}

VALVE_EXPORT void valve_hint_open_requests(uint32_t open);

void valve_hint_open_requests(uint32_t open)
{
	bool begins;

	valve_heed_child();
	valve_lock(&hint.lock);
	begins = open > 0 && hint.open == 0;
	hint.started += open > hint.open ? open - hint.open : 0;
	hint.ended += open < hint.open ? hint.open - open : 0;
	hint.open = open;
	store_relaxed(&hint.said, 1);
	write_hint(now_ns());
	valve_unlock(&hint.lock);
	if (begins && load_relaxed(&valve_shim.role) == VALVE_ROLE_ONLINE)
		valve_ring(); /* after the hint: the listener finds the request counted */
}

/* A forked child has no requests of its parent, and no other thread holds the lock there. */
void valve_hint_reset_child(void)
{
	valve_lock_reset(&hint.lock);
	if (!hint.said)
		return;
	hint.said = hint.open = 0;
	hint.started = hint.ended = 0;
}
