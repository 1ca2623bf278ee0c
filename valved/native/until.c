/*
 * until.c - an issuer tells the offline clients of its GPU until when they may run (valve_grant.run_until_ns), so that a grant
 * ends even if valved is gone.
 *
 * A client that finds its time over, and valved late, claims that time, looks again, and stops its own channels. The word is
 * cleared only after our own stop came back, so a client that stopped itself knows from the cleared word that everything is off
 * by our hand, too, and drops its own stop. Were its calls still under way when we enable, they would come out last: so before
 * we enable we wait for claims of the two ends told last that are not done yet, each once and only so long.
 */
#include "internal.h"

#define POLL_NS 20000u

static void remember(struct valve_client *client, uint64_t until_ns)
{
	uint64_t told = load_relaxed(&client->until_told);

	if (told == until_ns)
		return;
	store_relaxed(&client->until_before, told == load_relaxed(&client->late_claim) ? 0 : told);
	store_relaxed(&client->until_told, until_ns);
}

static void tell(struct valve_client *client, uint32_t gpu, uint64_t until_ns)
{
	uint64_t *word = &client_grant(client)->run_until_ns[gpu];

	if (gpu >= VALVE_GRANT_GPUS || load_relaxed(word) == until_ns)
		return;
	if (until_ns) /* it runs on one GPU where it is granted anything */
		remember(client, until_ns);
	store_full(word, until_ns); /* pairs with the claim: region.h */
	if (until_ns)
		errand_do(client, ERRAND_RING); /* its session sleeps for longer than a grant */
}

void until_tell(struct gpu *gpu, const struct plan *plan, uint64_t until_ns)
{
	for (uint32_t i = 0; plan && i < plan->clients; i++)
		tell(plan->client[i], gpu->index, until_ns);
	gpu->told_until_ns = until_ns;
}

/* A new plan while channels run for a grant: its clients hear the end, and those that have left it no longer need one. A
 * process that goes on without us has channels in no plan: it must stop them itself. */
void until_move(struct gpu *gpu, const struct plan *old, const struct plan *fresh)
{
	uint64_t until_ns = gpu->state <= VALVE_GPU_WATCHED ? load_full(&gpu->until_ns) : 0;
	uint32_t at = 0;

	if (until_ns)
		until_tell(gpu, fresh, until_ns);
	for (uint32_t i = 0; old && i < old->clients; i++) {
		struct valve_client *client = old->client[i];

		if (gpu->index < VALVE_GRANT_GPUS && !load_relaxed(&client->leaves) &&
		    load_relaxed(&client_grant(client)->run_until_ns[gpu->index]) &&
		    !plan_names(fresh, client, &at))
			tell(client, gpu->index, 0);
	}
}

static bool is_awaited(const struct valve_client *client, uint64_t claim)
{
	if (!claim || claim == load_relaxed(&client->late_claim))
		return false;
	return claim == load_relaxed(&client->until_told) || claim == load_relaxed(&client->until_before);
}

static void give_up(struct valve_client *client, uint64_t claim)
{
	if (claim == load_relaxed(&client->until_before))
		store_relaxed(&client->until_before, 0);
	else
		store_relaxed(&client->late_claim, claim);
}

/* A stop of a client's own, for an end that it was told before, may have switched off what is to run. */
bool until_is_claimed(const struct plan *plan, uint64_t until_ns)
{
	for (uint32_t i = 0; plan && i < plan->clients; i++) {
		uint64_t claim = load_full(&plan->client[i]->region->until_claim);

		if (claim != until_ns && is_awaited(plan->client[i], claim))
			return true;
	}
	return false;
}

/* When the patience with this claim ends. It began when the claim was met first, so no number of stops and wakes in between
 * makes it longer. */
static uint64_t patience_ns(const struct gpu *gpu, struct valve_client *client, uint64_t claim)
{
	if (load_relaxed(&client->met_claim) != claim) {
		store_relaxed(&client->met_claim, claim);
		store_relaxed(&client->met_ns, now_ns());
	}
	return load_relaxed(&client->met_ns) + gpu->gate->config.order_ns;
}

/* False: a stop is due. */
static bool wait_for(const struct gpu *gpu, struct valve_client *client, uint64_t claim, uint64_t end_ns)
{
	while (is_awaited(client, claim) && load_acquire(&client->region->until_done) != claim) {
		if (gpu_is_awaited(gpu))
			return false;
		if (now_ns() > end_ns || now_ns() > patience_ns(gpu, client, claim))
			give_up(client, claim);
		else
			sleep_ns(POLL_NS);
	}
	return true;
}

/* Before channels are enabled: no stop of a client's own is still under way. A claim of an end that it was not told is none.
 * What they are enabled for may be a grant, whose end is told by now: a stop under way is for the one before. False: a stop
 * of ours is due, which waits for no client. */
bool until_wait(const struct gpu *gpu, const struct plan *plan)
{
	uint64_t end_ns = now_ns() + gpu->gate->config.order_ns;

	for (uint32_t i = 0; plan && i < plan->clients; i++) {
		struct valve_client *client = plan->client[i];

		if (!wait_for(gpu, client, load_full(&client->region->until_claim), end_ns))
			return false;
	}
	return true;
}
