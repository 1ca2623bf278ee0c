/*
 * until.c - granted time ends even where valved does not end it: the session stops this process's own channels a little after
 * run_until_ns, if the word still stands then. valved clears it only after its own stop came back. So once a living valved has
 * cleared it, everything is off by its hand, and our stop is dropped without enabling anything; the link stays as it is.
 *
 * valved may be at it just then. We claim first, and look again: either we find the word cleared and do nothing, or valved finds
 * the claim and enables nothing before ours is done (valved/native/until.c). An enable that it had begun before may still come
 * out after our stop; while it lives it stops that itself, and when its link is lost the session stops once more: nothing of it
 * comes after that. A valved that is gone leaves the word; its successor is asked as after any lost lease (session.c).
 */
#include "shim.h"

#define LOOK_NS 50000000u /* how soon a word that was cleared is noticed */
#define TICK_NS 1000000u

/* The end that was dealt with last; until_ns 0: none stands. The session's thread alone. */
static struct {
	uint64_t until_ns;
	uint32_t gpu;
	bool stopped; /* we told our channels to be off for it; what the driver refused of that is tried again */
	bool was_stopped; /* by another stop of our own, which goes on */
} over;

static uint64_t end_of(uint32_t gpu)
{
	const struct valve_grant *grant = (const void *)(VALVE_CONTROL_PAGE + VALVE_GRANT_OFFSET);

	return load_acquire(&grant->run_until_ns[gpu]);
}

static uint64_t first_end(uint32_t *gpu)
{
	uint64_t first_ns = 0;

	for (uint32_t i = 0; i < VALVE_GRANT_GPUS; i++) {
		uint64_t end_ns = end_of(i);

		if (!end_ns || (first_ns && end_ns >= first_ns))
			continue;
		first_ns = end_ns;
		*gpu = i;
	}
	return first_ns;
}

/* The present stop is valved's to end, by its own stop: valved is not asked for it. */
bool valve_until_stands(void)
{
	return over.stopped;
}

void valve_until_forget(void)
{
	over.until_ns = 0;
	over.stopped = over.was_stopped = false;
}

uint64_t valve_until_rest_ns(uint64_t most_ns)
{
	uint64_t now = now_ns(), end_ns, rest_ns;
	uint32_t gpu;

	if (over.until_ns) /* nothing clears it without a link */
		return most_ns < LOOK_NS || !valve_is_linked() ? most_ns : LOOK_NS;
	end_ns = first_end(&gpu);
	if (!end_ns)
		return most_ns;
	end_ns += VALVE_RUN_UNTIL_GRACE_NS;
	rest_ns = (end_ns > now ? end_ns - now : 0) + TICK_NS;
	return most_ns < rest_ns ? most_ns : rest_ns;
}

static void stop(uint64_t end_ns, uint32_t gpu, bool *stopped)
{
	struct valve_region *region = VALVE_REGION;

	exchange_full(&region->until_claim, end_ns);
	if (end_of(gpu) == end_ns) {
		region->self_stops++;
		store_relaxed(&valve_shim.self_stopped, 1);
		over.was_stopped = *stopped;
		*stopped = over.stopped = true;
		if (valve_self_gate(true, VALVE_GATE_ALL) && !valve_is_linked())
			valve_launches_hold();
		over.until_ns = end_ns;
		over.gpu = gpu;
		valve_say("granted time is over and valved did not end it: this process has stopped itself");
	}
	store_release(&region->until_done, end_ns);
}

/* valved has stopped what we had stopped: from here on it is its stop. */
static void drop(bool *stopped)
{
	if (over.stopped && !over.was_stopped) {
		/* channels to come are no business of ours from here on */
		if (load_relaxed(&VALVE_CONTROL->order) != VALVE_ORDER_STOP)
			valve_self_gate_hand_over();
		/* else its order RUN ends the stop; without a link that does not come, and the next valved is asked */
		*stopped = !valve_is_linked() && load_relaxed(&valve_shim.self_stopped);
	}
	valve_until_forget();
}

/* `released`: no service needs our channels off. */
void valve_until_check(bool released, bool *stopped)
{
	bool is_linked = valve_is_linked();
	uint64_t end_ns = over.until_ns ? end_of(over.gpu) : 0;
	uint32_t gpu = 0;

	if (over.until_ns && end_ns != over.until_ns && (is_linked || !end_ns))
		drop(stopped);
	if (over.until_ns || released)
		return;
	end_ns = first_end(&gpu);
	/* stopped or not: valved enables what is in its plan, whichever side had stopped it */
	if (end_ns && now_ns() >= end_ns + VALVE_RUN_UNTIL_GRACE_NS)
		stop(end_ns, gpu, stopped);
}
