/*
 * errands.c - see errands.h. Whoever has an errand marks the client and puts it into a list, at a cost that no client changes.
 *
 * What goes on for long keeps a thread. So one thread at a time does the slow errands: goodbyes, and rings of a client of
 * which one has cost much lately. Any ring may once, because interrupts count as its thread's own time: that is forgotten after
 * FORGIVEN others, else every client that stays for long would wait behind all goodbyes. So a client can keep each of the other
 * threads for one ring in so many.
 *
 * The wake of such a thread comes before the wake of the client. A client that could end valved anyway (register.py) is spared it.
 */
#include "internal.h"

#define DEAR_NS  200000u /* of a thread's own time; a ring takes some 5 us */
#define FORGIVEN 64u

static void append(struct errand_queue *queue, struct valve_client *client)
{
	client->errand.next = NULL;
	if (queue->last)
		queue->last->errand.next = client;
	else
		queue->first = client;
	queue->last = client;
}

static struct valve_client *take_first(struct errand_queue *queue)
{
	struct valve_client *client = queue->first;

	if (client)
		queue->first = client->errand.next;
	if (!queue->first)
		queue->last = NULL;
	return client;
}

/* Precondition: no other thread is at it. */
static bool is_prompt(const struct valve_client *client)
{
	return !client->errand.dear_rings &&
	       !(load_acquire(&client->errand.due) & (ERRAND_GIVE_UP | ERRAND_END));
}

static void sort_in(struct errands *errands)
{
	struct valve_client *client = swap(&errands->fresh, NULL), *oldest = NULL, *next;

	for (; client; client = next) {
		next = client->errand.next;
		client->errand.next = oldest;
		oldest = client;
	}
	for (; oldest; oldest = next) {
		next = oldest->errand.next;
		append(is_prompt(oldest) ? &errands->prompt : &errands->slow, oldest);
	}
}

/* NULL: nothing is left for this thread. */
static struct valve_client *take(struct errands *errands, bool *is_slow)
{
	struct valve_client *client;

	pthread_mutex_lock(&errands->lock);
	sort_in(errands);
	client = take_first(&errands->prompt);
	*is_slow = !client && !errands->has_slow && errands->slow.first;
	if (*is_slow) {
		client = take_first(&errands->slow);
		errands->has_slow = true;
	}
	pthread_mutex_unlock(&errands->lock);
	return client;
}

static void kick(struct errands *errands)
{
	add_fetch(&errands->kick,
	          1); /* pairs with the load of kick in errand_main, before it looks for work */
	syscall(SYS_futex, &errands->kick, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void list(struct errands *errands, struct valve_client *client)
{
	client->errand.next = load_relaxed(&errands->fresh); /* the swap decides */
	while (!compare_swap(&errands->fresh, &client->errand.next, client))
		;
	kick(errands);
}

static uint64_t own_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void ring(struct valve_client *client)
{
	uint64_t began_ns = own_ns();

	bell_ring(&client->errand.runners->ringer, client->order);
	if (own_ns() - began_ns > DEAR_NS)
		client->errand.dear_rings = FORGIVEN;
	else if (client->errand.dear_rings)
		client->errand.dear_rings--;
}

/* All that there is to do for it by now, or by a thread that is not for slow ones until it comes to a slow one. */
static void carry_out(struct valve_gate *gate, struct valve_client *client, bool is_slow)
{
	uint32_t taken;

	do {
		uint32_t due;

		if (!is_slow && !is_prompt(client)) {
			list(&gate->errands, client);
			return;
		}
		due = __atomic_fetch_and(&client->errand.due, is_slow ? ERRAND_TAKEN : ~(uint32_t)ERRAND_RING,
		                         __ATOMIC_ACQ_REL);
		if (due & ERRAND_RING)
			ring(client);
		if (is_slow && due & ERRAND_GIVE_UP)
			client_give_up_passed(client);
		if (is_slow && due & ERRAND_END) {
			client_end(client);
			return;
		}
		taken = ERRAND_TAKEN;
	} while (!compare_swap(&client->errand.due, &taken, 0));
}

static void *errand_main(void *argument)
{
	struct valve_gate *gate = argument;
	struct errands *errands = &gate->errands;

	hurry(&gate->config, 0, false);
	for (;;) {
		uint32_t seen = load_acquire(&errands->kick);
		bool is_slow;
		struct valve_client *client = take(errands, &is_slow);

		if (client) {
			carry_out(gate, client, is_slow);
		} else if (load_acquire(&errands->quit)) {
			return NULL;
		} else {
			futex_wait(&errands->kick, seen, 0);
		}
		if (is_slow) {
			pthread_mutex_lock(&errands->lock);
			errands->has_slow = false;
			pthread_mutex_unlock(&errands->lock);
		}
	}
}

/* Any thread, for a client that something still keeps. Waits for no client but one that is rung at once. The client may be gone afterwards if that is its end. */
void errand_do(struct valve_client *client, uint32_t what)
{
	struct errands *errands = client->errand.runners;

	if (what == ERRAND_RING && load_relaxed(&client->errand.at_once))
		bell_ring(&errands->ringer, client->order);
	else if (!(__atomic_fetch_or(&client->errand.due, what | ERRAND_TAKEN, __ATOMIC_ACQ_REL) &
	           ERRAND_TAKEN))
		list(errands, client);
}

void valve_client_at_once(struct valve_client *client, uint32_t on)
{
	store_relaxed(&client->errand.at_once, on);
}

int errands_start(struct valve_gate *gate)
{
	int rc = 0;

	pthread_mutex_init(&gate->errands.lock, NULL);
	for (uint32_t i = 0; i < ERRAND_THREADS && rc == 0; i++)
		rc = thread_start(&gate->errands.thread[i], errand_main, gate);
	return rc;
}

/* Once everything is done that was asked. False: a thread is kept. Precondition: nothing more will be asked. */
bool errands_end(struct valve_gate *gate)
{
	struct errands *errands = &gate->errands;
	bool joined = true;

	store_full(&errands->quit, 1);
	add_fetch(&errands->kick, 1);
	futex_wake(&errands->kick);
	for (uint32_t i = 0; i < ERRAND_THREADS; i++)
		joined &= !errands->thread[i] || thread_join(errands->thread[i]);
	return joined;
}
