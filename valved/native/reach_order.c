/*
 * reach_order.c - the two rungs that the offline process carries out itself: STOP (its session thread switches its own
 * channels) and HOLD (its launches wait). An order is a word in the control page, a sequence number, and a ring of
 * the order eventfd; the client answers with order_done in its region, and is believed for no longer than a bound.
 *
 * Launches read the gate word and nothing else, so it is odd while they are to be held: an even one never leads them to the
 * order.
 *
 * A process may use several GPUs, each with an issuer of its own, and the watchdog may add a hold: so each side only
 * sets or clears its GPU's bit, and the word is derived from all bits.
 */
#include "internal.h"

#define POLL_NS 20000u /* order_done is not a futex: the client would need write access to a word of ours */

/* STOP stands beside a hold: the hold is the odd word, and what is queued on the card runs until the channels are off. */
static enum valve_order order_of(uint64_t bits)
{
	if ((uint32_t)bits)
		return VALVE_ORDER_STOP;
	return bits ? VALVE_ORDER_HOLD : VALVE_ORDER_RUN;
}

/* Whatever another thread has written meanwhile. That of an online client is its service's (hold.c). */
static void set_word(struct valve_client *client, bool held)
{
	uint32_t *word = &client->control->gate_epoch, old = load_relaxed(word);

	while (client->role == VALVE_ROLE_OFFLINE && old % 2 != held && !compare_swap(word, &old, old + 1))
		;
}

/* Say the order that the bits mean, until they did not change meanwhile. Two threads may say it side by side: the
 * last one to look sees the final bits, and says those. */
static uint32_t publish(struct valve_client *client, bool again)
{
	struct valve_control *control = client->control;
	uint32_t seq = load_relaxed(&control->order_seq);
	uint64_t bits;

	do {
		uint32_t order;

		bits = load_full(&client->orders);
		order = order_of(bits);
		set_word(client, bits >> 32);
		if (!again && load_relaxed(&control->order) == order)
			continue;
		store_release(&control->order, order); /* the client reads order_seq, then order */
		seq = add_fetch(&control->order_seq, 1);
		errand_do(client, ERRAND_RING);
		again = false;
	} while (load_full(&client->orders) != bits);
	return seq;
}

/* Set or clear this GPU's wish. `again`: say it even if it stands already (channels were added since). */
uint32_t order_set(struct valve_client *client, uint32_t gpu, enum valve_order order, bool on, bool again)
{
	uint64_t bit = 1ull << (order == VALVE_ORDER_HOLD ? gpu + 32 : gpu);

	if (on)
		__atomic_fetch_or(&client->orders, bit, __ATOMIC_SEQ_CST);
	else
		__atomic_fetch_and(&client->orders, ~bit, __ATOMIC_SEQ_CST);
	return publish(client, again);
}

/* Wait until the client has carried out order `seq`: its own RM status, or -ETIMEDOUT. */
int order_wait(const struct valve_client *client, uint32_t seq, uint64_t until_ns)
{
	/* Pairs with the client's release of order_done, after order_status. */
	while (is_later(seq, load_acquire(&client->region->order_done))) {
		if (now_ns() > until_ns)
			return -ETIMEDOUT;
		sleep_ns(POLL_NS);
	}
	return (int)(load_relaxed(&client->region->order_status) &
	             0xFFFFu); /* a claim: never taken for an errno */
}

static int begin_self(struct gpu *gpu, struct plan_step *step, bool stop)
{
	step->order_ns = now_ns();
	step->order_seq = order_set(step->owner[0], gpu->index, VALVE_ORDER_STOP, stop, stop);
	return 0;
}

static int begin_hold(struct gpu *gpu, struct plan_step *step, bool stop)
{
	step->order_ns = now_ns();
	step->order_seq = order_set(step->owner[0], gpu->index, VALVE_ORDER_HOLD, stop, false);
	return 0;
}

/* All have their orders by now, and their time runs side by side: those that are silent take no longer than one. No thread waits
 * for RUN: a client that is late to resume harms only itself. */
static int finish_order(struct gpu *gpu, struct plan_step *step)
{
	return order_wait(step->owner[0], step->order_seq, step->order_ns + gpu->gate->config.order_ns);
}

const struct reach_ops reach_self = {"channel-self", begin_self, NULL, finish_order};
const struct reach_ops reach_hold = {"launch-gate", begin_hold, NULL, finish_order};

/* The next rung for everyone in a step whose stop failed. */
void order_hold_all(struct gpu *gpu, struct plan_step *step)
{
	for (uint32_t i = 0; i < step->off.numChannels; i++)
		order_set(step->owner[i], gpu->index, VALVE_ORDER_HOLD, true, false);
}

/* The same for a whole plan, by a thread that is not its issuer, which may drop channels meanwhile. */
void order_hold_plan(struct gpu *gpu, const struct plan *plan)
{
	for (uint32_t i = 0; plan && i < plan->clients; i++)
		order_set(plan->client[i], gpu->index, VALVE_ORDER_HOLD, true, false);
}

static void release(struct gpu *gpu, struct valve_client *client)
{
	uint64_t bits = 1ull << gpu->index | 1ull << (gpu->index + 32);

	if (!(load_full(&client->orders) & bits))
		return;
	__atomic_fetch_and(&client->orders, ~bits, __ATOMIC_SEQ_CST);
	publish(client, false);
}

/* After an enable of the GPU: take back the holds that failures or the watchdog added for it. */
void order_release(struct gpu *gpu, struct plan *plan)
{
	for (uint32_t i = 0; plan && i < plan->clients; i++)
		release(gpu, plan->client[i]);
}

/* Channels have left that may run: so may their processes, unless the plan has others of theirs. */
void order_leave(struct gpu *gpu, const struct plan *leaving)
{
	uint32_t at = 0;

	for (uint32_t i = 0; leaving && i < leaving->clients; i++)
		if (!plan_names(gpu->plan, leaving->client[i], &at))
			release(gpu, leaving->client[i]);
}

/* A new plan: a process that has left it has nothing on this GPU that an order could be for, and no enable to come would
 * find it. A process that goes on without us still has channels, and keeps the order that it was given. */
void order_move(struct gpu *gpu, const struct plan *old, const struct plan *fresh)
{
	uint32_t at = 0;

	for (uint32_t i = 0; old && i < old->clients; i++)
		if (!load_relaxed(&old->client[i]->leaves) && !plan_names(fresh, old->client[i], &at))
			release(gpu, old->client[i]);
}
