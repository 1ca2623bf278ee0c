/*
 * waking.c - the listener opens, too: while a service has a permission, the listener looks at its clients when a
 * look falls due, decides (decide.c) and wakes it, without Python.
 *
 * The permission is the caller's word that nothing it knows stands in the way (no brake, no client on its way back, no rest
 * of the breaker, offline work to gain by it), with the numbers that the decision needs. The caller takes it back before it
 * touches the service itself (waking_withdraw): afterwards no look is under way and none will begin.
 *
 * What only Python can judge ends here with a question: a gap inside the hold that may lengthen the cooldown stops the
 * decision until the caller, which learns from gaps, has given a new permission.
 */
#include "internal.h"

#include <string.h>
#include <sys/timerfd.h>

#define FLOOR_NS    100000u /* between two looks at one service, whatever a client claims */
#define NEVER       UINT64_MAX
#define STOPPING_NS 1000000u /* a stop takes half of that */

bool service_is_idle(const struct service *service)
{
	const struct client_list *list = load_full(&service->clients); /* see listener_quiesce */

	for (uint32_t i = 0; list && i < list->count; i++) {
		if (!client_is_idle(list->client[i]))
			return false;
	}
	return true;
}

/* The client's totals of requests, for the stamps: what Python counts from them must be of this moment. */
static bool hints(const struct valve_client *client)
{
	if (client->role == VALVE_ROLE_ONLINE)
		return load_relaxed(&client->region->hint_ns) != 0;
	return load_relaxed(&client->hints);
}

void waking_note_requests(struct service *service)
{
	const struct client_list *list = load_full(&service->clients); /* see listener_quiesce */
	uint64_t teller = 0, started = 0, ended = 0;
	uint32_t tellers = 0;

	for (uint32_t i = 0; list && i < list->count; i++) {
		const struct valve_client *client = list->client[i];

		if (!hints(client))
			continue;
		tellers++;
		teller = client->id;
		ended = load_acquire(&client->region->requests_ended);
		started = load_acquire(&client->region->requests_started);
	}
	store_relaxed(&service->tellers, tellers);
	store_relaxed(&service->teller, teller);
	store_relaxed(&service->started, started);
	store_relaxed(&service->ended, ended);
}

void waking_fill_requests(const struct service *service, struct valve_stamp *stamp)
{
	bool one = load_relaxed(&service->tellers) == 1;

	stamp->teller = one ? load_relaxed(&service->teller) : 0;
	stamp->requests_started = load_relaxed(&service->started);
	stamp->requests_ended = load_relaxed(&service->ended);
}

/* May the caller hear of this later? It must hear now of what it has to act upon. */
bool waking_is_ordinary(const struct service *service)
{
	return load_relaxed(&service->permitted) && load_relaxed(&service->tellers) < 2;
}

/* A watcher that has proven idleness sleeps until a launch rings. Where another hand closed the word, launches ring no more:
 * its proof is old, and it does not know. One that is awake hears nothing. */
void waking_rouse(const struct valve_client *client)
{
	struct valve_region *region = client->region;

	if (client->role == VALVE_ROLE_ONLINE && load_relaxed(&region->watcher_state) == VALVE_WATCHER_IDLE &&
	    !client_is_idle(client))
		futex_wake_shared(&region->busy);
}

static void see_hint(const struct valve_client *client, const struct valve_wake_rule *rule, uint64_t now,
                     struct valve_wake_seen *seen)
{
	const struct valve_region *region = client->region;

	if (hints(client))
		valve_wake_hint(seen, rule, now, load_full(&region->open_requests),
		                load_full(&region->hint_ns));
}

static void see_launcher(const struct valve_client *client, const struct valve_wake_rule *rule, uint64_t now,
                         struct valve_wake_seen *seen)
{
	struct valve_view view;
	uint64_t heard_ns;
	bool is_idle;

	valve_client_view((struct valve_client *)client, &view, false); /* without gaps it changes nothing */
	heard_ns = view.watcher_ns > rule->watch_since_ns ? view.watcher_ns : rule->watch_since_ns;
	/* A watcher renews the hint, too: where that is too old, it is away, however lately it was asked to watch. */
	if (view.watcher_ns && view.hint_ns && now > view.hint_ns + rule->hint_lease_ns)
		heard_ns = 0;
	if (!view.submitted && !view.watcher_ns)
		heard_ns = now; /* a client without a launch has no watcher yet, and nothing to prove */
	is_idle = view.filled && view.submitted == view.idle_submitted;
	if (!is_idle) /* each adding up of a client's counters costs */
		waking_rouse(client);
	valve_wake_launcher(seen, rule, now, is_idle, view.idle_ns < now ? view.idle_ns : now, heard_ns);
}

static void see_all(const struct service *service, uint64_t now, struct valve_wake_seen *seen)
{
	const struct client_list *list = load_full(&service->clients);

	valve_wake_begin(seen, load_relaxed(&service->held_since_ns));
	for (uint32_t i = 0; list && i < list->count; i++) {
		const struct valve_client *client = list->client[i];

		if (client->role == VALVE_ROLE_ONLINE) /* its heartbeat first: its hint is no older */
			see_launcher(client, &service->rule, now, seen);
		see_hint(client, &service->rule, now, seen);
	}
}

/* The word is open. Requests that came since the look found it closed, and rang nobody. */
bool waking_has_requests(const struct service *service)
{
	const struct client_list *list = load_full(&service->clients);
	struct valve_wake_seen seen = {0};

	for (uint32_t i = 0; list && i < list->count; i++)
		see_hint(list->client[i], &service->rule, now_ns(), &seen);
	return seen.open > service->wake.leaked;
}

/* A gap that began and ended inside this hold, and is longer than what the cooldown rests on. */
static bool teaches(const struct service *service, struct valve_client *client, uint64_t now)
{
	const struct valve_region *region = client->region;
	uint64_t held_ns = load_relaxed(&service->held_since_ns);
	uint64_t since_ns =
	        held_ns > service->rule.looking_since_ns ? held_ns : service->rule.looking_since_ns;
	uint64_t total = load_acquire(&region->gaps); /* pairs with the watcher's release after the entry */
	uint64_t from = client->gaps_judged;

	if (load_relaxed(&region->gap_offset) != VALVE_GAP_OFFSET ||
	    load_relaxed(&region->gap_count) != VALVE_GAPS)
		return from != total &&
		       (client->gaps_judged = total, true); /* another layout: Python reads it */
	if (from > total || total - from > VALVE_GAPS)
		from = total > VALVE_GAPS ? total - VALVE_GAPS : 0;
	client->gaps_judged = total;
	for (; from < total; from++) {
		const char *at = (const char *)region + VALVE_GAP_OFFSET +
		                 (from % VALVE_GAPS) * sizeof(struct valve_gap);
		const struct valve_gap *gap = (const struct valve_gap *)(const void *)at;
		uint64_t end_ns = load_relaxed(&gap->end_ns), gap_ns = load_relaxed(&gap->gap_ns);

		if (gap_ns > service->rule.learn_ns && gap_ns <= end_ns && end_ns <= now &&
		    end_ns - gap_ns >= since_ns)
			return true;
	}
	return false;
}

/* True: the caller was asked, and the decision waits for its answer. */
static bool must_ask(struct valve_gate *gate, struct service *service, uint64_t now)
{
	const struct client_list *list = load_full(&service->clients);
	struct valve_stamp stamp = {.kind = VALVE_STAMP_LEARN, .done_ns = now};
	bool asks = false;

	for (uint32_t i = 0; list && i < list->count; i++)
		asks |= list->client[i]->role == VALVE_ROLE_ONLINE && teaches(service, list->client[i], now);
	if (!asks)
		return false;
	stamp.service = load_relaxed(&service->id);
	stamp_push(&gate->stamps, &stamp, true);
	return true;
}

static void publish(struct service *service, const struct valve_wake_decision *decision)
{
	store_relaxed(&service->said_reason,
	              decision->reason | decision->action << 8 | decision->hinted << 16);
	store_relaxed(&service->said_quiet_ns, decision->quiet_ns);
	store_relaxed(&service->said_leaked, decision->leaked);
}

/* A stop of one of its GPUs is under way: its hold stays until the stop came back or the watchdog gave it up, or a stop that
 * hangs would end unnoticed. */
static bool is_stopping(const struct valve_gate *gate, const struct service *service)
{
	uint32_t mask = load_acquire(&service->mask);

	for (uint32_t i = 0; i < gate->gpu_count; i++)
		if ((mask & 1u << i) && load_acquire(&gate->gpu[i].flight) % 4 == FLIGHT_OUT)
			return true;
	return false;
}

static void look(struct valve_gate *gate, uint32_t index, uint64_t now, struct gpu **freed)
{
	struct service *service = &gate->service[index];
	struct valve_wake_decision decision;
	struct valve_wake_seen seen;

	see_all(service, now, &seen);
	valve_wake_decide(&service->wake, &seen, &service->rule, now, &decision);
	publish(service, &decision);
	service->due_ns = decision.look_again_ns;
	if (decision.action == VALVE_WAKE_NOW && is_stopping(gate, service)) {
		service->due_ns = now + STOPPING_NS;
	} else if (decision.action == VALVE_WAKE_NOW) {
		service->due_ns = NEVER; /* until the next hold, or the caller's answer */
		if (!decision.hinted && must_ask(gate, service, now))
			return;
		if (service_wake(gate, index, freed) == VALVE_WAKE_REFUSED) {
			now = now_ns();
			valve_wake_refused(&service->wake, &service->rule, now);
			service->due_ns = service->wake.blocked_until_ns;
		}
	}
	if (service->due_ns < now + FLOOR_NS)
		service->due_ns = now + FLOOR_NS;
}

/* A service was just held by a ring. Unhinted, nothing can come of a look before the work is proven done and one cooldown
 * has passed; a hinted request may be over in a moment. */
void waking_held(struct valve_gate *gate, struct service *service, uint64_t now)
{
	const struct valve_wake_rule *rule = &service->rule;

	if (!load_full(&service->permitted))
		return;
	service->due_ns = now + rule->look_least_ns;
	if (!(load_relaxed(&service->said_reason) >> 16))
		service->due_ns += rule->cooldown_ns;
	if (service->due_ns < gate->turn_ns[service - gate->service])
		gate->turn_ns[service - gate->service] = service->due_ns;
	if (service->due_ns < gate->look_ns)
		gate->look_ns = service->due_ns;
}

/* What is due of one service, and when to turn to it again. */
static uint64_t turn_to(struct valve_gate *gate, uint32_t index, uint64_t now, struct gpu **freed)
{
	struct service *service = &gate->service[index];
	uint64_t next = grant_turn(gate, index, now);

	/* Full order: either the caller, which takes it back, waits for this turn, or we see it taken. */
	if (!load_full(&service->permitted) || load_relaxed(&service->epoch) % 2)
		return next;
	if (service->due_ns <= now)
		look(gate, index, now, freed);
	if (load_relaxed(&service->epoch) % 2 == 0 && service->due_ns < next)
		next = service->due_ns;
	return next;
}

/* Listener, inside its turn: all looks that are due. A service at which nothing is due is not touched: a hundred of them would
 * cost more than the look. What could bring its turn nearer is a ring, which says so, or kicks. */
void waking_turn(struct valve_gate *gate, uint64_t now, struct gpu **freed)
{
	bool all = swap(&gate->kicked, 0);
	uint64_t next = NEVER;

	for (uint32_t i = 0; i < load_acquire(&gate->services); i++) {
		if (all || gate->turn_ns[i] <= now)
			gate->turn_ns[i] = turn_to(gate, i, now, freed);
	}
	for (uint32_t i = 0; i < load_acquire(&gate->services); i++)
		next = gate->turn_ns[i] < next ? gate->turn_ns[i] : next;
	gate->look_ns = next;
}

/* Listener, before it sleeps: the timer is set to the next look, unless it rings before that anyhow. */
void waking_arm(struct valve_gate *gate)
{
	struct itimerspec at = {.it_value = timespec_of(gate->look_ns)};

	if (gate->armed_ns == gate->look_ns || (gate->look_ns > gate->armed_ns && now_ns() < gate->armed_ns))
		return;
	gate->armed_ns = gate->look_ns;
	if (gate->look_ns != NEVER)
		timerfd_settime(gate->timer, TFD_TIMER_ABSTIME, &at, NULL);
}

void waking_kick(struct valve_gate *gate)
{
	uint64_t one = 1;

	store_full(&gate->kicked, 1);
	if (write(gate->wake, &one, sizeof one) < 0)
		return; /* the counter is full: it has an edge that was not seen yet */
}

static void take_back(struct valve_gate *gate, struct service *service)
{
	if (!load_relaxed(&service->permitted)) /* only the caller writes it */
		return;
	store_full(&service->permitted, 0);
	listener_quiesce(gate);
}

/* No thread would end slices without a permission. */
void waking_withdraw(struct valve_gate *gate, struct service *service)
{
	take_back(gate, service);
	slice_close(gate, service, now_ns(), false);
}

/* From here on the listener alone changes the epoch of this service, until the permission is withdrawn. */
void valve_service_permit(struct valve_gate *gate, int32_t index, const struct valve_wake_rule *rule)
{
	struct service *service = &gate->service[index];

	if (!rule) {
		waking_withdraw(gate, service);
		return;
	}
	take_back(gate, service); /* a new rule ends nothing */
	service->rule = *rule;
	service->due_ns = 0;
	service_settle(service);
	store_full(&service->permitted, 1); /* pairs with the load in waking_turn: the rule is whole */
	if (load_full(&service->epoch) % 2 == 0 || load_full(&service->slicing))
		waking_kick(gate); /* a ring from here on sees the permission, and says when to look */
}

/* What was decided last. */
void valve_service_look(struct valve_gate *gate, int32_t index, struct valve_look *out)
{
	const struct service *service = &gate->service[index];
	uint32_t said = load_relaxed(&service->said_reason);

	*out = (struct valve_look){
	        .holds = load_acquire(&service->told_open) == 0,
	        .reason = said & 0xFFu,
	        .action = said >> 8 & 0xFFu,
	        .hinted = said >> 16,
	        .quiet_ns = load_relaxed(&service->said_quiet_ns),
	        .leaked = load_relaxed(&service->said_leaked),
	};
}

/* Stamps of ordinary edges wait until the caller asks for them; prompt: it wants each at once. */
void valve_gate_prompt(struct valve_gate *gate, uint32_t prompt)
{
	store_full(&gate->stamps.prompt, prompt);
}

void valve_client_hints(struct valve_client *client, uint32_t on)
{
	store_release(&client->hints, on);
}
