/*
 * orders.c - the memory thread: valved's orders, in the order they came. In the flow: session reads a packet -> queue ->
 * here, part by part (parts.c) -> vmm.c -> zeroing.c -> KV_DONE. A thread of its own, because a driver call on a gated
 * process may wait for the gate, and the session must go on reading: what opens the gate again comes by it.
 *
 * Zeroing runs on the GPU beside later orders: a memset cannot run while the client is gated, and a quarantine must not
 * wait behind it. What an order of a valved that died in the meantime brought is undone, because no valved would ever
 * hear of it. What valved has done from outside is so, dead or not: such an order is heard in any case, before a
 * successor is told what is mapped here.
 */
#include "memory.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ORDERS       1024u /* waiting at a time; more are refused */
#define HEARD        1024u /* room beyond that for what only changes the books */
#define POLL_MIN_NS  20000u
#define POLL_MAX_NS  2000000u
#define RETRY_NS     1000000u /* valved's socket is full */
#define UNREAD_TRIES 2000     /* as many waits until a valved that does not read has no link any more */
#define EXIT_WAIT    1000     /* times RETRY_NS: a call that is waited for at process exit */

static struct orders {
	struct valve_lock lock; /* starting */
	uint32_t runs;
	uint32_t bell;       /* futex word: look again */
	uint32_t head, tail; /* of the queue: the thread takes at head, the session adds at tail */
	uint32_t step_wanted;
	uint32_t step_granted; /* futex word: a thread waits in valve_kv_step */
	uint32_t at_work, stopping;
	uint32_t is_over; /* the thread has ended: no order and no zeroing does any more */
	uint32_t trials;
	uint32_t settle_due; /* sparse slots of a dead valved: their old handles are to go */
	struct valve_queued *queue;
	/* Where in it each order lies: the first free place, so that few of its pages are used. */
	uint16_t place[ORDERS + HEARD];
} orders;

static struct valve_queued *place_in_queue(uint32_t at)
{
	return &orders.queue[orders.place[at % (ORDERS + HEARD)]];
}

void valve_orders_wake(void)
{
	add_full(&orders.bell, 1);
	futex_wake(&orders.bell, 1);
}

/* ---- the session's side ---- */

/* NULL: too many wait. */
static struct valve_queued *free_place(uint64_t number, uint16_t how, struct valve_fds *fds)
{
	struct valve_link_kv_done full = {.order = number, .status = EAGAIN};
	uint16_t place = 0;

	if (orders.tail - load_acquire(&orders.head) < (how == VALVE_KV_OUTSIDE ? ORDERS + HEARD : ORDERS)) {
		while (load_acquire(&orders.queue[place].is_waiting))
			place++;
		orders.place[orders.tail % (ORDERS + HEARD)] = place;
		return place_in_queue(orders.tail);
	}
	valve_fds_close(fds); /* before the answer, as in carry_out_parts */
	valve_link_send(&full, sizeof(full), VALVE_LINK_KV_DONE, -1);
	return NULL;
}

static void put_in_queue(struct valve_queued *order)
{
	order->generation = valve_shim.link_generation;
	order->is_waiting = true;
	store_release(&orders.tail, orders.tail + 1);
	valve_orders_wake();
}

/* -errno ends the link: those are no words of a valved. Takes the descriptors over. */
int valve_orders_take(const struct valve_link_header *header, int length, struct valve_fds *fds)
{
	const struct valve_link_kv_entries *packet = (const void *)header;
	struct valve_queued *order;

	if (!valve_packet_is_order(packet, length, fds) || valve_orders_start())
		return -EPROTO;
	order = free_place(packet->order, packet->how, fds);
	if (!order)
		return 0;
	valve_queued_order(order, packet, fds);
	put_in_queue(order);
	return 0;
}

int valve_orders_take_runs(const struct valve_link_header *header, int length, struct valve_fds *fds)
{
	const struct valve_link_kv_runs *packet = (const void *)header;
	struct valve_queued *order;

	if (!valve_packet_is_runs(packet, length, fds) || valve_orders_start())
		return -EPROTO;
	order = free_place(packet->order, packet->how, fds);
	if (!order)
		return 0;
	valve_queued_runs(order, packet, fds);
	put_in_queue(order);
	return 0;
}

/* Precondition: there is no link. No order that a valved gave is under way or to come, and every slot has its handle. */
bool valve_orders_left_no_hole(void)
{
	return load_acquire(&orders.head) == load_acquire(&orders.tail) && valve_ranges_are_whole();
}

/* ---- answers ---- */

/*
 * Waits for room in the socket, but not for ever: a free of the application waits for this thread. A valved that does not read
 * for so long loses the link, and with it what it would have heard; a new one is told what is mapped.
 */
int valve_orders_send(void *message, uint32_t bytes, uint16_t type, const struct valve_fds *fds,
                      uint32_t generation)
{
	int err;

	for (int tries = 0;; tries++) {
		err = valve_link_send_fds(message, bytes, type, fds ? fds->at : NULL, fds ? fds->count : 0,
		                          generation);
		if (err == -EAGAIN && fds && fds->count)
			err = valve_link_lend(message, bytes, type, fds->at, fds->count, generation);
		if (err != -EAGAIN)
			return err;
		if (tries == UNREAD_TRIES)
			valve_own_hang_up();
		sleep_ns(RETRY_NS);
	}
}

void valve_orders_report(uint64_t number, uint32_t generation, struct valve_outcome *out)
{
	struct valve_link_kv_done done = {.order = number,
	                                  .done = out->done,
	                                  .status = out->status,
	                                  .cu_result = (uint32_t)out->cu_result};

	valve_orders_send(&done, sizeof(done), VALVE_LINK_KV_DONE, &out->made, generation);
	valve_fds_close(&out->made);
}

static bool is_stale(const struct valve_queued *order)
{
	return order->generation != load_acquire(&valve_shim.link_generation);
}

/* ---- orders ---- */

/* false: not now. */
static bool carry_out(struct valve_queued *order, struct valve_kv_order *part)
{
	struct valve_outcome out = {.status = part->refused};
	struct valve_range *range = part->refused ? NULL : valve_range_hold(part->range);

	if (range && valve_vmm_must_wait(range, part)) {
		valve_unlock(&range->lock);
		return false;
	}
	if (range && part->how != VALVE_KV_OUTSIDE && valve_place_enter(range->place, NULL))
		out.status = EIO;
	else if (range)
		valve_vmm_carry_out(range, part, &out);
	else if (!part->refused)
		out.status = ESTALE;
	valve_answering_add(order->answering, range, part, &out, !order->is_single);
	if (range) {
		add_full(&range->progress, 1);
		valve_unlock(&range->lock);
	}
	if (out.status && part->how != VALVE_KV_OUTSIDE) /* that has happened in any case */
		order->next.run = order->runs;
	return true;
}

static struct valve_queued *head(void)
{
	return orders.head == load_acquire(&orders.tail) ? NULL : place_in_queue(orders.head);
}

static bool waits_for_step(const struct valve_queued *order)
{
	return order && order->how == VALVE_KV_AT_STEP && !is_stale(order);
}

static bool is_due(const struct valve_queued *order)
{
	return !is_stale(order) || (order->how == VALVE_KV_OUTSIDE && order->op == VALVE_KV_QUARANTINE);
}

/* As much of it as can be done now. */
static bool carry_out_parts(struct valve_queued *order, bool *moved)
{
	static struct valve_kv_order part;

	if (!order->answering)
		order->answering = valve_answering_begin(order);
	while (is_due(order)) {
		struct valve_cursor before = order->next;

		if (order->op == VALVE_KV_BACK && order->runs && valve_zeroings() == VALVE_ZEROINGS)
			return false;
		if (!valve_queued_next(order, &part))
			break;
		if (!carry_out(order, &part)) {
			order->next = before;
			return false;
		}
		*moved = true;
	}
	valve_fds_close(&order->fds); /* before the answer: valved may send as many again at once */
	valve_answering_end(order->answering);
	return true;
}

static bool next_order(void)
{
	struct valve_queued *order = head();
	bool moved = false;

	if (!order || (waits_for_step(order) && !load_acquire(&orders.step_granted)))
		return false;
	if (order->op == VALVE_KV_TRY && is_due(order))
		valve_scratch_try(order);
	else if ((is_due(order) || order->answering) && !carry_out_parts(order, &moved))
		return moved;
	valve_fds_close(&order->fds);
	store_release(&order->is_waiting, false); /* before the head: then a place is always free */
	store_release(&orders.head, orders.head + 1);
	return true;
}

/* A granted step ends when nothing waits for one any more and what it began is done. */
static void look_at_steps(void)
{
	bool wanted = waits_for_step(head()) || load_acquire(&orders.settle_due);

	store_release(&orders.step_wanted, wanted);
	if (wanted || valve_zeroings() || !load_acquire(&orders.step_granted))
		return;
	store_release(&orders.step_granted, 0);
	futex_wake(&orders.step_granted, INT32_MAX);
}

/* A dead valved can no longer say whose memory libcuda's stale mappings hold: at the next step they end. */
static bool settle(void)
{
	struct valve_range *range;

	if (!load_acquire(&orders.settle_due) || !load_acquire(&orders.step_granted))
		return false;
	store_release(&orders.settle_due, 0);
	for (uint32_t i = 0; (range = valve_range_at(i)); i++) {
		range = valve_range_hold(load_relaxed(&range->id));
		if (!range)
			continue;
		if (!valve_place_enter(range->place, NULL))
			valve_vmm_settle(range);
		valve_unlock(&range->lock);
	}
	return true;
}

void valve_orders_settle(void)
{
	store_release(&orders.settle_due, 1);
	valve_orders_wake();
}

VALVE_EXPORT void valve_kv_step(void);

void valve_kv_step(void)
{
	valve_announce_step();
	/* Draining would break a capture; the next step does as well. */
	if (!load_acquire(&orders.step_wanted) || load_relaxed(&VALVE_REGION->capture_depth))
		return;
	valve_places_drain();
	exchange_full(&orders.step_granted,
	              1); /* full: it is taken back at the thread's end, or we see that end */
	valve_orders_wake();
	while (load_acquire(&orders.step_granted) && !valve_orders_are_over())
		futex_wait(&orders.step_granted, 1, 0);
}

/* ---- the thread ---- */

static bool work(void)
{
	bool moved = valve_zeroings_end();

	orders.trials = 0;
	moved |= valve_scratch_go_on(&orders.trials);
	if (!head() || !is_stale(head())) { /* else what a dead valved did comes first */
		moved |= valve_scratch_announce();
		if (valve_announce_due()) {
			valve_announce_ranges();
			moved = true;
		}
	}
	moved |= next_order();
	moved |= settle();
	look_at_steps();
	return moved;
}

static void *serve(void *unused)
{
	uint64_t nap_ns = POLL_MIN_NS;
	bool is_relaxed = false;

	(void)unused;
	valve_tls.pool_depth = 1;
	for (;;) {
		uint32_t bell = load_acquire(&orders.bell);
		bool moved, rests;

		exchange_full(&orders.at_work, 1); /* full: stop() waits for us, or we see that it came */
		if (load_acquire(&orders.stopping))
			break;
		/* Else another thread's capture would forbid our calls. */
		if (!is_relaxed)
			is_relaxed = valve_place_capture_mode(CU_STREAM_CAPTURE_MODE_RELAXED) >= 0;
		moved = work();
		rests = !valve_announce_ends() && !valve_announce_rest() && !valve_zeroings() &&
		        !orders.trials;
		store_release(&orders.at_work, 0);
		nap_ns = moved ? POLL_MIN_NS : nap_ns * 2 < POLL_MAX_NS ? nap_ns * 2 : POLL_MAX_NS;
		if (!moved)
			futex_wait(&orders.bell, bell, rests ? 0 : nap_ns);
	}
	/* Destructors that run after stop() free memory and join threads: nobody waits for this one any more. */
	exchange_full(&orders.is_over, 1);
	store_release(&orders.step_granted, 0);
	futex_wake(&orders.step_granted, INT32_MAX);
	store_release(&orders.at_work, 0);
	return NULL;
}

/* At exit the driver is torn down under us: let the call in progress end, unless it waits for a gate. */
static void stop(void)
{
	exchange_full(&orders.stopping, 1);
	valve_orders_wake();
	for (int i = 0; i < EXIT_WAIT && load_acquire(&orders.at_work); i++)
		sleep_ns(RETRY_NS);
}

bool valve_orders_are_over(void)
{
	return load_acquire(&orders.is_over);
}

int valve_orders_start(void)
{
	int err = 0;

	if (load_acquire(&orders.runs))
		return 0;
	valve_lock(&orders.lock);
	if (!orders.queue) {
		void *at = mmap(NULL, (ORDERS + HEARD) * sizeof(struct valve_queued), PROT_READ | PROT_WRITE,
		                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		orders.queue = at == MAP_FAILED ? NULL : at;
	}
	if (!orders.runs) {
		err = orders.queue ? valve_spawn(serve, VALVE_STACK_MOST) : -ENOMEM;
		store_release(&orders.runs, !err);
		if (!err)
			atexit(stop);
	}
	valve_unlock(&orders.lock);
	return err;
}

/* In a forked child: the thread is the parent's, the descriptors in the queue are copies of its. */
void valve_orders_reset(void)
{
	valve_lock_reset(&orders.lock);
	if (!orders.queue)
		return;
	for (uint32_t i = orders.head; i != orders.tail; i++)
		valve_fds_close(&place_in_queue(i)->fds);
	valve_zeroings_reset();
	memset(&orders, 0, sizeof(orders));
}
