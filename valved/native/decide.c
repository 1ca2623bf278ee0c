/*
 * decide.c - may offline work run again on the GPUs of a service? The ordinary decision, from one look at its clients. Pure:
 * no clock, no state but what it is handed. valved/policy/wake.py says the same in Python and is the oracle: tests run
 * both over the same looks and compare every field.
 */
#include "gate.h"

#include <stdbool.h>
#include <string.h>

static uint64_t since(uint64_t then, uint64_t now)
{
	return now > then ? now - then : 0; /* a client may claim a time to come */
}

void valve_wake_begin(struct valve_wake_seen *seen, uint64_t held_since_ns)
{
	memset(seen, 0, sizeof *seen);
	seen->held_since_ns = seen->quiet_since_ns = held_since_ns;
}

/* A client that launches GPU work. heard_ns: its watcher's heartbeat. */
void valve_wake_launcher(struct valve_wake_seen *seen, const struct valve_wake_rule *rule, uint64_t now,
                         uint32_t is_idle, uint64_t idle_ns, uint64_t heard_ns)
{
	if (!is_idle)
		seen->busy++;
	else if (idle_ns > seen->quiet_since_ns)
		seen->quiet_since_ns = idle_ns;
	if (since(heard_ns, now) > rule->watcher_lease_ns)
		seen->silent++;
}

/* A client that reports its open requests. */
void valve_wake_hint(struct valve_wake_seen *seen, const struct valve_wake_rule *rule, uint64_t now,
                     uint64_t open, uint64_t hint_ns)
{
	if (since(hint_ns, now) > rule->hint_lease_ns) {
		seen->stale++;
		return;
	}
	seen->fresh++;
	seen->open += open;
}

/* How many of the open requests are none. A request that is served keeps the GPU busy, now and then. */
static uint64_t leaked(const struct valve_wake_state *state, const struct valve_wake_seen *seen,
                       const struct valve_wake_rule *rule, uint64_t quiet_ns)
{
	uint64_t leak_ns = rule->leak_cooldowns * rule->cooldown_ns;

	if (leak_ns < rule->leak_ns)
		leak_ns = rule->leak_ns;
	if (!seen->busy && quiet_ns >= leak_ns)
		return seen->open;
	return state->leaked < seen->open ? state->leaked : seen->open;
}

/* The first thing other than time that stands in the way, and when to look again. */
static bool obstacle(const struct valve_wake_state *state, const struct valve_wake_seen *seen,
                     const struct valve_wake_rule *rule, uint64_t now, struct valve_wake_decision *out)
{
	uint64_t soon_ns = since(seen->held_since_ns, now) / rule->look_share;

	if (soon_ns < rule->look_least_ns)
		soon_ns = rule->look_least_ns;
	if (soon_ns > rule->look_most_ns)
		soon_ns = rule->look_most_ns;
	if (seen->silent) {
		out->reason = VALVE_WAKE_WATCHER_DEAD;
		soon_ns = rule->dead_look_ns;
	} else if (seen->open > state->leaked) {
		out->reason = VALVE_WAKE_OPEN_REQUESTS;
	} else if (seen->busy) {
		out->reason = VALVE_WAKE_BUSY;
		if (!seen->fresh && soon_ns < rule->cooldown_ns)
			soon_ns = rule->cooldown_ns;
	} else {
		return false;
	}
	out->look_again_ns = now + soon_ns;
	return true;
}

/* *state is what is remembered between looks. */
void valve_wake_decide(struct valve_wake_state *state, const struct valve_wake_seen *seen,
                       const struct valve_wake_rule *rule, uint64_t now, struct valve_wake_decision *out)
{
	memset(out, 0, sizeof *out);
	out->quiet_ns = since(seen->quiet_since_ns, now);
	out->stale_hints = seen->stale;
	state->leaked = leaked(state, seen, rule, out->quiet_ns);
	out->leaked = state->leaked;
	out->hinted = seen->fresh && !seen->stale && !state->leaked;
	if (obstacle(state, seen, rule, now, out)) {
		out->action = VALVE_WAKE_HOLD;
		state->refusals = 0;
		state->blocked_until_ns = 0;
		return;
	}
	if (!out->hinted && out->quiet_ns < rule->cooldown_ns) {
		out->action = VALVE_WAKE_WAIT;
		out->reason = VALVE_WAKE_COOLING;
		out->look_again_ns = seen->quiet_since_ns + rule->cooldown_ns;
	} else if (now < state->blocked_until_ns) {
		out->action = VALVE_WAKE_WAIT;
		out->reason = VALVE_WAKE_REFUSED_LATELY;
		out->look_again_ns = state->blocked_until_ns;
	} else {
		out->action = VALVE_WAKE_NOW;
		out->reason = out->hinted ? VALVE_WAKE_NO_OPEN_REQUESTS : VALVE_WAKE_COOLDOWN_OVER;
	}
}

/* A launch slipped in: pause, each time twice as long, so that wakes cannot chase launches. */
void valve_wake_refused(struct valve_wake_state *state, const struct valve_wake_rule *rule, uint64_t now)
{
	uint64_t pause_ns = rule->refused_backoff_ns << (state->refusals < 20 ? state->refusals : 20);

	if (pause_ns > rule->cooldown_ns)
		pause_ns = rule->cooldown_ns;
	state->refusals++;
	state->blocked_until_ns = now + pause_ns;
}
