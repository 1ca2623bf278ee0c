/*
 * slice.c - granted time by time slices: the other rung beside grant.c. While it goes on, offline work stays enabled beside a
 * service that holds, with a shorter slice than the service's own; the card runs the side that has work, so the pause between two
 * steps is the grant, and no call is made for it.
 *
 * The service goes on holding and its words stay closed, so its launches do not ring. What ends it is therefore said
 * otherwise: its hook rings when something comes that is not a step (grant_until_ns in the past); its time is over, for the
 * hook moves that on as long as it steps, and no further than the stated gap from the last step that it told of, so that a
 * hook that hangs or errs shares no reader's wait beyond what the owner consented to; a second process of the service
 * launches; another service holds one of the GPUs (gpu_target: slices are for one holder alone, and slice_break tells
 * of it); the caller takes permission or consent back. A service that lets go ends it too, before its hold is dropped:
 * a process that launches after that finds no slices.
 *
 * The thread that opens and closes its service opens and closes it too (hold.c). The end is told to the offline clients as
 * that of a grant, and each time that it moves.
 */
#include "internal.h"

#define NEVER    UINT64_MAX
#define RENEW_NS 10000000u /* so long before its end it is looked whether the hook has moved it on */

enum valve_grant_answer slice_refuses(struct valve_gate *gate, uint32_t gpu)
{
	return load_full(&gate->sliceable) & 1u << gpu ? VALVE_GRANT_NONE : VALVE_GRANT_SLICE;
}

static uint64_t least(uint64_t one, uint64_t other)
{
	return one < other ? one : other;
}

static bool is_mine(const struct service *service, uint32_t gpu)
{
	return load_acquire(&service->mask) & 1u << gpu;
}

/* At most one process of the service launches. The hook that moves the end on tells of the steps of one engine alone: what
 * a second one does is unknown to it, and does not ring. */
bool slice_is_sole(const struct service *service)
{
	const struct client_list *list = load_full(&service->clients); /* see listener_quiesce */
	uint32_t count = 0;

	for (uint32_t i = 0; list && i < list->count; i++)
		count += client_may_launch(list->client[i]);
	return count <= 1;
}

static void tell_hooks(const struct service *service, uint64_t until_ns)
{
	const struct client_list *list = load_full(&service->clients); /* see listener_quiesce */

	for (uint32_t i = 0; list && i < list->count; i++) {
		if (list->client[i]->role == VALVE_ROLE_HOOK)
			store_release(&client_grant(list->client[i])->shared_until_ns, until_ns);
	}
}

static void set_until(struct valve_gate *gate, struct service *service, uint64_t until_ns)
{
	store_relaxed(&service->granted_until_ns, until_ns);
	tell_hooks(service, until_ns);
	for (uint32_t i = 0; i < gate->gpu_count; i++) {
		if (!is_mine(service, i))
			continue;
		store_full(&gate->gpu[i].until_ns, until_ns);
		issuer_kick(&gate->gpu[i]);
	}
}

/* What ended it is the cause of the stop that follows: no launch waits for it. */
void slice_close(struct valve_gate *gate, struct service *service, uint64_t now, bool is_broken)
{
	uint64_t since_ns = load_relaxed(&service->granted_since_ns);

	if (!load_relaxed(&service->slicing))
		return;
	store_relaxed(&service->cause, is_broken ? VALVE_CAUSE_GRANT_BROKEN : VALVE_CAUSE_GRANT_END);
	for (uint32_t i = 0; i < gate->gpu_count; i++)
		if (is_mine(service, i))
			store_full(&gate->gpu[i].sliced, 0);
	set_until(gate, service, 0); /* an issuer that finds it cleared finds that it is to stop, too */
	store_relaxed(&service->slicing, 0);
	store_relaxed(&service->grant_next_ns, since_ns + load_relaxed(&service->grant_rest_ns));
	store_relaxed(&service->broken, load_relaxed(&service->broken) + is_broken);
	if (now > since_ns)
		store_relaxed(&service->granted_ns, load_relaxed(&service->granted_ns) + now - since_ns);
}

/* False: another service has held a GPU, or this one has lost its slices. */
static bool is_alone(const struct valve_gate *gate, const struct service *service)
{
	for (uint32_t i = 0; i < gate->gpu_count; i++)
		if (is_mine(service, i) && (holders_count(load_full(&gate->gpu[i].holders)) != 1 ||
		                            !load_full(&gate->gpu[i].sliced)))
			return false;
	return true;
}

/* Listener, after grant.c found nothing in the way. */
enum valve_grant_answer slice_open(struct valve_gate *gate, struct service *service, uint64_t now)
{
	uint64_t until_ns = least(service->wish_ns, now + load_relaxed(&service->grant_most_ns));

	store_relaxed(&service->granted_since_ns, now);
	service->granted_asker = service->wish_asker;
	store_full(&service->slicing, 1);
	set_until(gate, service, until_ns); /* before an issuer may enable */
	for (uint32_t i = 0; i < gate->gpu_count; i++)
		if (is_mine(service, i))
			store_full(&gate->gpu[i].sliced, 1);
	if (!is_alone(gate, service)) { /* another service that held meanwhile may not have seen the slices */
		slice_close(gate, service, now, false);
		return VALVE_GRANT_OTHERS;
	}
	set_until(gate, service, until_ns); /* kicks them once more: now they may */
	store_relaxed(&service->grants, load_relaxed(&service->grants) + 1);
	return VALVE_GRANT_GIVEN;
}

/* Until when the hook wants it by now: it moves that on as it steps, without a ring. Without a new step it goes no further. */
static uint64_t wanted_ns(const struct valve_gate *gate, const struct service *service, uint64_t now)
{
	const struct valve_client *asker = load_full(&gate->client[service->granted_asker & 0xFFFFFFFFu]);
	uint64_t since_ns = load_relaxed(&service->granted_since_ns), step_ns;

	if (!asker || asker->generation != (uint32_t)(service->granted_asker >> 32))
		return 0;
	step_ns = least(load_acquire(&asker->region->step_end_ns), now); /* a claim */
	step_ns = step_ns > since_ns ? step_ns : since_ns;
	return least(load_acquire(&asker->region->grant_until_ns),
	             step_ns + load_relaxed(&service->grant_most_ns));
}

/* Listener, inside its turn: end it, or move it on; when to look again. A service without a permission is the caller's. */
uint64_t slice_turn(struct valve_gate *gate, struct service *service, uint64_t now, bool may_go_on)
{
	uint64_t until_ns = load_relaxed(&service->granted_until_ns), wish_ns;

	if (!load_full(&service->permitted))
		return NEVER;
	wish_ns = wanted_ns(gate, service, now);
	if (!may_go_on || least(wish_ns, until_ns) <= now || !slice_is_sole(service) ||
	    !is_alone(gate, service)) {
		slice_close(gate, service, now, may_go_on && least(wish_ns, until_ns) > now);
		return NEVER; /* an end that has passed is never moved on: the hook has seen that it is over */
	}
	if (now + RENEW_NS >= until_ns && wish_ns > until_ns)
		set_until(gate, service, until_ns = wish_ns);
	if (wish_ns < until_ns)
		return wish_ns;
	return until_ns > now + RENEW_NS ? until_ns - RENEW_NS : until_ns;
}

/* By the thread that has just counted a hold of a GPU that was sliced: its issuer stops it, and the listener hears of it. */
void slice_break(struct gpu *gpu)
{
	store_full(&gpu->sliced, 0);
	waking_kick(gpu->gate);
}

/* Caller: GPUs on which every offline group has its short slice, and whether grants go by slices at all. Those that may not
 * go on have ended before this returns. */
void valve_gate_sliceable(struct valve_gate *gate, uint32_t on, uint32_t mask)
{
	store_full(&gate->by_slices, on);
	store_full(&gate->sliceable, mask);
	grant_recall_all(gate);
}
