/*
 * watchdog.c - one thread at normal priority: writes the heartbeat of all control pages every fifth of the lease,
 * gives muted doorbells another chance, and watches the issuers. A disable that does not come back in time is
 * reported, and the next rung (HOLD) is ordered for the clients it concerns while the ioctl still hangs.
 *
 * No thread wakes it: an issuer in a hurry makes no system call for it. It looks once per hang_ns, so it sees every
 * flight before that one's time is over, and sleeps to the very end of that time. Only what is late is looked at more
 * often.
 *
 * It watches the caller, too. While Python's loop is stuck no client is welcomed, so an online process that starts now
 * would launch beside offline work: every GPU is held until the loop turns again. A loop that stays away is as good as
 * dead: then the heartbeat ends, and shims do what they do when valved is gone.
 */
#include "internal.h"

#define GIVEN_UP 30u /* times loop_ns */

static uint64_t sooner(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* A real-time thread that the driver keeps computing keeps all other work from its core: it is real-time for hang_ns at most,
 * and again once it has landed. It may land meanwhile. Then we see that, and take it back. */
static void calm(struct gpu *gpu, uint32_t word)
{
	const struct valve_config *config = &gpu->gate->config;
	uint32_t flier = load_relaxed(&gpu->flier);

	if (!config->fifo_priority)
		return;
	hurry(config, flier, false);
	if (load_full(&gpu->flight) != word)
		hurry(config, flier, true);
}

/* Returns when to look at it again, UINT64_MAX: no sooner than at others. A flight that takes long while its GPU runs
 * harms no service yet; it is looked at again in the next round. */
static uint64_t watch_flight(struct gpu *gpu, uint64_t now, uint64_t round_ns)
{
	uint32_t word = load_acquire(&gpu->flight), number = word >> 2;
	uint64_t start_ns = load_relaxed(&gpu->flight_ns), holders = load_full(&gpu->holders);
	struct valve_stamp stamp;

	if (word % 4 != FLIGHT_OUT)
		return UINT64_MAX;
	if (now < start_ns + gpu->gate->config.hang_ns)
		return start_ns + gpu->gate->config.hang_ns;
	calm(gpu, word);
	if (gpu_target(gpu, holders) != VALVE_GPU_STOPPED)
		return now + round_ns;
	/* The number makes this the very flight whose time was read. From here until HELD the issuer would wait in
	 * land(), so the plan and its clients stay. */
	if (!compare_swap(&gpu->flight, &word, number << 2 | FLIGHT_LOST))
		return UINT64_MAX;
	order_hold_plan(gpu, gpu->plan);
	stamp = service_stamp(gpu, holders);
	stamp.kind = VALVE_STAMP_GATE_FAILED;
	stamp.status = -ETIMEDOUT;
	stamp.channels = plan_channels(gpu->plan);
	stamp.ioctl_ns = start_ns;
	stamp.done_ns = now;
	stamp_push(&gpu->gate->stamps, &stamp, true);
	valve_gpu_run_again(gpu->gate, gpu->index); /* its seat may be lent: the sleeper listens then */
	store_release(&gpu->flight, number << 2 | FLIGHT_HELD); /* pairs with the acquire in land() */
	return UINT64_MAX;
}

static uint64_t silent_ns(struct valve_gate *gate, uint64_t now)
{
	uint64_t alive_ns = load_acquire(&gate->alive_ns);

	return gate->config.loop_ns && alive_ns && now > alive_ns ? now - alive_ns : 0;
}

/* Returns when to look at it again: when its patience would be over, or whether it turns again by now. */
static uint64_t watch_caller(struct valve_gate *gate, uint64_t now, uint64_t round_ns)
{
	uint64_t silent = silent_ns(gate, now), loop_ns = gate->config.loop_ns;
	bool is_silent = silent > loop_ns;

	if (is_silent != (gate->guarding != 0)) {
		guard_hold(gate, is_silent);
		store_release(&gate->guarding, is_silent);
	}
	if (is_silent)
		return now + round_ns;
	return load_relaxed(&gate->alive_ns) && loop_ns ? now + loop_ns - silent + 1 : UINT64_MAX;
}

static void tend_clients(struct valve_gate *gate, bool beat, uint64_t now)
{
	pthread_mutex_lock(&gate->roster_lock);
	for (uint32_t i = 0; i < gate->places; i++) {
		struct valve_client *client = load_relaxed(&gate->client[i]); /* the lock orders it */

		if (!client)
			continue;
		if (beat)
			store_release(&client->control->heartbeat_ns, now);
		if (load_relaxed(&client->muted))
			listener_mute(gate, client, false);
	}
	pthread_mutex_unlock(&gate->roster_lock);
}

static void *watchdog_main(void *argument)
{
	struct valve_gate *gate = argument;
	uint64_t beat_ns = gate->config.lease_ns / 5, last_beat_ns = 0;
	uint64_t rest_ns = sooner(gate->config.hang_ns, beat_ns);
	uint64_t round_ns = sooner(gate->config.hang_ns / 4, beat_ns);

	while (!load_acquire(&gate->quit)) {
		uint64_t now = now_ns(), next = now + rest_ns;
		bool beat = now >= last_beat_ns + beat_ns, muted = swap(&gate->mutes, 0);

		for (uint32_t i = 0; i < gate->gpu_count; i++)
			next = sooner(next, watch_flight(&gate->gpu[i], now, round_ns));
		next = sooner(next, watch_caller(gate, now, round_ns));
		if (muted || beat) /* pages without need stay out of our cache */
			tend_clients(gate, beat && silent_ns(gate, now) <= GIVEN_UP * gate->config.loop_ns,
			             now);
		if (muted) /* a client that rings for nothing goes on, as a rule */
			next = sooner(next, now + round_ns);
		if (beat)
			last_beat_ns = now;
		next = sooner(next, last_beat_ns + beat_ns);
		now = now_ns();
		if (next > now)
			futex_wait(&gate->quit, 0, next - now);
	}
	return NULL;
}

int watchdog_start(struct valve_gate *gate)
{
	return thread_start(&gate->watchdog, watchdog_main, gate);
}
