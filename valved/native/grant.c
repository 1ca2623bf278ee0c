/*
 * grant.c - gives granted time: a wake with an end. If the owner of an engine consents, the engine's hook asks for a
 * pause between two of its steps. The hook writes the end of the pause, and rings. Only the listener opens services that
 * have a permission (waking.c). It wakes the service with the same proof as for any wake, and closes it again at the end
 * by its timer.
 *
 * A grant needs the same proof as a wake: every client of the service is idle. The service must also be the one holder of
 * each of its GPUs, so that it gives its own time. The issuer tells the offline clients the end before it enables them
 * (until.c).
 */
#include "internal.h"

#define NEVER    UINT64_MAX
#define LEAST_NS 1000000u /* shorter than a stop and a wake */
#define LOOK_NS  100000u  /* between two looks for the proof */
#define PROOF_NS \
	5000000u /* how long it looks for the proof: the watcher needs its quiet time and one probe */

static void count(struct service *service, enum valve_grant_answer answer)
{
	store_relaxed(&service->answers[answer], load_relaxed(&service->answers[answer]) + 1);
}

static void answer_hook(const struct valve_client *client, uint32_t seq, enum valve_grant_answer answer)
{
	struct valve_grant *grant = client_grant(client);

	store_relaxed(&grant->answer, answer);
	store_release(&grant->answer_seq, seq); /* last: it says what the answer is to */
}

static enum valve_grant_answer gpu_refuses(struct valve_gate *gate, uint32_t gpu)
{
	if (holders_count(load_full(&gate->gpu[gpu].holders)) != 1 || load_full(&gate->gpu[gpu].until_ns))
		return VALVE_GRANT_OTHERS;
	if (valve_gpu_state(gate, gpu) != VALVE_GPU_STOPPED)
		return VALVE_GRANT_NOT_STOPPED;
	if (!(load_full(&gate->grantable) & 1u << gpu))
		return VALVE_GRANT_SHIM;
	return load_full(&gate->by_slices) ? slice_refuses(gate, gpu) : VALVE_GRANT_NONE;
}

/* NONE: nothing stands in the way. */
static enum valve_grant_answer refusal(struct valve_gate *gate, const struct service *service, uint64_t now)
{
	uint32_t mask = load_acquire(&service->mask);
	enum valve_grant_answer answer = VALVE_GRANT_NONE;

	if (!load_full(&service->permitted) || !load_full(&service->grant_most_ns))
		return VALVE_GRANT_NO_CONSENT;
	if (!mask || load_full(&service->epoch) % 2)
		return VALVE_GRANT_NOT_HELD;
	if (service->wish_ns < now + LEAST_NS)
		return VALVE_GRANT_LENGTH;
	if (now < load_relaxed(&service->grant_next_ns))
		return VALVE_GRANT_RATE;
	for (uint32_t i = 0; i < gate->gpu_count && !answer; i++) {
		if (mask & 1u << i)
			answer = gpu_refuses(gate, i);
	}
	if (answer)
		return answer;
	if (load_full(&gate->by_slices)) /* beside its steps: there is nothing to prove */
		return slice_is_sole(service) ? VALVE_GRANT_NONE : VALVE_GRANT_OTHERS;
	return service_is_idle(service) ? VALVE_GRANT_NONE : VALVE_GRANT_BUSY;
}

static void ask_for_proof(const struct service *service)
{
	const struct client_list *list = load_full(&service->clients); /* see listener_quiesce */

	for (uint32_t i = 0; list && i < list->count; i++)
		waking_rouse(list->client[i]);
}

static void set_until(struct valve_gate *gate, uint32_t mask, uint64_t until_ns)
{
	for (uint32_t i = 0; i < gate->gpu_count; i++) {
		if (mask & 1u << i)
			store_full(&gate->gpu[i].until_ns, until_ns);
	}
}

static enum valve_grant_answer open_for(struct valve_gate *gate, uint32_t index, uint64_t now)
{
	struct service *service = &gate->service[index];
	uint64_t most_ns = load_relaxed(&service->grant_most_ns), until_ns = service->wish_ns;
	uint32_t mask = load_acquire(&service->mask);

	if (load_full(&gate->by_slices))
		return slice_open(gate, service, now);
	until_ns = until_ns > now + most_ns ? now + most_ns : until_ns;
	store_relaxed(&service->granted_since_ns, now);
	store_relaxed(&service->granted_until_ns,
	              until_ns); /* before the epoch opens: the thread that closes it finds it */
	set_until(gate, mask, until_ns);
	if (service_wake(gate, index, NULL) == VALVE_WOKEN) {
		store_relaxed(&service->grants, load_relaxed(&service->grants) + 1);
		return VALVE_GRANT_GIVEN;
	}
	store_relaxed(&service->granted_until_ns, 0); /* it went on holding: no issuer has looked */
	set_until(gate, mask, 0);
	return VALVE_GRANT_BUSY;
}

/* Give it, refuse it, or look again for the proof a little later. */
static void consider(struct valve_gate *gate, uint32_t index, uint64_t now)
{
	struct service *service = &gate->service[index];
	enum valve_grant_answer answer = refusal(gate, service, now);
	const struct valve_client *asker = load_full(&gate->client[service->wish_asker & 0xFFFFFFFFu]);

	if (!answer)
		answer = open_for(gate, index, now);
	if (answer == VALVE_GRANT_BUSY && now < service->wish_end_ns) {
		ask_for_proof(service);
		service->wish_look_ns = now + LOOK_NS;
		return;
	}
	service->wish_ns = 0;
	count(service, answer);
	if (asker && asker->generation == (uint32_t)(service->wish_asker >> 32))
		answer_hook(asker, service->wish_seq, answer);
}

static void end(struct valve_gate *gate, uint32_t index, uint64_t now, struct gpu **taken)
{
	if (load_relaxed(&gate->service[index].slicing))
		slice_turn(gate, &gate->service[index], now, false);
	else if (service_hold(gate, index, NULL, 0, now, taken))
		waking_held(gate, &gate->service[index], now);
}

/* Listener: a hook rang. False: not for this. While a grant is open a word may bring its end nearer, and nothing else. */
bool grant_heard(struct valve_gate *gate, struct valve_client *client, uint64_t seen_ns, struct gpu **taken)
{
	struct service *service = &gate->service[client->service];
	uint32_t seq = load_acquire(&client->region->grant_seq);
	uint64_t wish_ns = load_relaxed(&client->region->grant_until_ns), until_ns;

	if (seq == client->grant_seen)
		return false;
	client->grant_seen = seq;
	until_ns = load_relaxed(&service->granted_until_ns);
	service->wish_ns = 0;
	if (until_ns && wish_ns > seen_ns) {
		if (wish_ns < until_ns && !load_relaxed(&service->slicing))
			store_relaxed(&service->granted_until_ns, wish_ns);
		answer_hook(client, seq, VALVE_GRANT_GIVEN);
	} else if (wish_ns <= seen_ns) { /* taken back, or heard too late */
		if (until_ns)
			end(gate, (uint32_t)client->service, seen_ns, taken);
		answer_hook(client, seq, wish_ns && !until_ns ? VALVE_GRANT_LENGTH : VALVE_GRANT_NONE);
	} else {
		service->wish_ns = wish_ns;
		service->wish_seq = seq;
		service->wish_asker = (uint64_t)client->generation << 32 | client->slot;
		service->wish_end_ns = seen_ns + PROOF_NS;
		service->wish_look_ns = 0;
		consider(gate, (uint32_t)client->service, seen_ns);
	}
	store_full(&gate->kicked, 1); /* the timer is set anew */
	return true;
}

static bool may_go_on(struct valve_gate *gate, const struct service *service)
{
	uint32_t where = load_full(&gate->grantable);

	if (load_relaxed(&service->slicing))
		where &= load_full(&gate->by_slices) ? load_full(&gate->sliceable) : 0;
	return load_full(&service->grant_most_ns) && !(load_acquire(&service->mask) & ~where);
}

/* Listener, inside its turn: what is due of this service, and when to look again. */
uint64_t grant_turn(struct valve_gate *gate, uint32_t index, uint64_t now)
{
	struct service *service = &gate->service[index];
	uint64_t until_ns = load_relaxed(&service->granted_until_ns), next = NEVER;

	if (load_relaxed(&service->slicing))
		next = slice_turn(gate, service, now, may_go_on(gate, service));
	else if (until_ns && (now >= until_ns || !may_go_on(gate, service)))
		end(gate, index, now, NULL);
	else if (until_ns)
		next = until_ns;
	if (service->wish_ns && now >= service->wish_look_ns) {
		consider(gate, index, now);
		until_ns = load_relaxed(&service->granted_until_ns);
		next = until_ns ? until_ns : NEVER;
	}
	return service->wish_ns && service->wish_look_ns < next ? service->wish_look_ns : next;
}

/* Called by the thread that has just taken the hold. Says what the hold ended. */
enum valve_cause grant_close(struct service *service, bool by_launch, uint64_t seen_ns)
{
	uint64_t since_ns = load_relaxed(&service->granted_since_ns);

	if (!load_relaxed(&service->granted_until_ns))
		return by_launch ? VALVE_CAUSE_RING : VALVE_CAUSE_ASKED;
	store_relaxed(&service->granted_until_ns, 0);
	store_relaxed(&service->grant_next_ns, since_ns + load_relaxed(&service->grant_rest_ns));
	if (seen_ns > since_ns)
		store_relaxed(&service->granted_ns, load_relaxed(&service->granted_ns) + seen_ns - since_ns);
	if (by_launch)
		store_relaxed(&service->broken, load_relaxed(&service->broken) + 1);
	return by_launch ? VALVE_CAUSE_GRANT_BROKEN : VALVE_CAUSE_GRANT_END;
}

/* The same, after its holds are counted. */
void grant_clear(struct valve_gate *gate, const struct service *service, uint32_t mask)
{
	uint32_t cause = load_relaxed(&service->cause);

	if (cause == VALVE_CAUSE_GRANT_END || cause == VALVE_CAUSE_GRANT_BROKEN)
		set_until(gate, mask, 0);
}

/* A slot's new owner starts with nothing. */
void grant_reset(struct service *service)
{
	store_relaxed(&service->grant_most_ns, 0);
	store_relaxed(&service->grant_next_ns, 0);
	store_relaxed(&service->cause, VALVE_CAUSE_ASKED);
	store_relaxed(&service->grants, 0);
	store_relaxed(&service->broken, 0);
	store_relaxed(&service->granted_ns, 0);
	for (uint32_t i = 0; i < VALVE_GRANT_ANSWERS; i++)
		store_relaxed(&service->answers[i], 0);
}

/* Until no grant is open that may not go on. */
static void recall(struct valve_gate *gate, const struct service *service)
{
	listener_quiesce(gate); /* one that it gave meanwhile is there by now */
	while (load_full(&service->granted_until_ns) && !may_go_on(gate, service)) {
		waking_kick(gate);
		sleep_ns(5000);
	}
}

void grant_recall_all(struct valve_gate *gate)
{
	for (uint32_t i = 0; i < load_acquire(&gate->services); i++)
		recall(gate, &gate->service[i]);
}

/* The caller says that the owner consents. With most_ns 0 it does not, and an open grant ends before this returns. */
void valve_service_consent(struct valve_gate *gate, int32_t index, uint64_t most_ns, uint64_t rest_ns)
{
	struct service *service = &gate->service[index];

	store_relaxed(&service->grant_rest_ns, rest_ns);
	store_full(&service->grant_most_ns, most_ns);
	if (!most_ns)
		recall(gate, service);
}

/* GPUs on which every offline client stops itself in time. Grants on others end before this returns: so a client that does
 * not can be let in afterwards. */
void valve_gate_grantable(struct valve_gate *gate, uint32_t mask)
{
	uint32_t gone = gate->grantable & ~mask;

	store_full(&gate->grantable, mask);
	if (gone)
		grant_recall_all(gate);
}

void valve_service_grants(struct valve_gate *gate, int32_t index, struct valve_grants *out)
{
	const struct service *service = &gate->service[index];

	*out = (struct valve_grants){
	        .grants = load_relaxed(&service->grants),
	        .broken = load_relaxed(&service->broken),
	        .granted_ns = load_relaxed(&service->granted_ns),
	        .until_ns = load_relaxed(&service->granted_until_ns),
	};
	for (uint32_t i = 0; i < VALVE_GRANT_ANSWERS; i++)
		out->answers[i] = load_relaxed(&service->answers[i]);
}
