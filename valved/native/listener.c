/*
 * listener.c - two threads sleep on the doorbells of all online clients: one epoll, edge-triggered, never read (one
 * eventfd in many epolls costs 30 us a ring, and a read is a system call without a use). The kernel wakes one of them
 * for an event, the one that ran last; the other is there while that one is in the driver. They handle events one at a
 * time.
 *
 * The same threads sleep on the timer of the next look (waking.c): whatever opens or closes the words of a service that
 * wakes by itself is one thread at a time, and needs no other lock.
 *
 * Events carry slot and generation, not a pointer: an event of a client that has just been removed finds an empty
 * slot, or a stranger of another generation.
 */
#include "internal.h"

#include <sys/epoll.h>

#define BATCH 64
#define SELF  UINT64_MAX
#define TIMER (UINT64_MAX - 1)
#define WINDOW_NS \
	10000000u     /* a doorbell that rings MAX_IDLE times in this long without changing anything ... */
#define MAX_IDLE  64u /* ... is not listened to until the watchdog's next round */
#define PLAUSIBLE 1000000000u
#define TRIES     1000u /* some 20 us: a batch takes less, and a thread that sleeps comes back after 50 */

/* Odd while events are being handled. Full order: either the caller, having unpublished something, sees odd here and
 * waits, or what follows sees that it is unpublished. */
static void turn_page(struct valve_gate *gate)
{
	store_full(&gate->listener_turn,
	           load_relaxed(&gate->listener_turn) + 1); /* no other thread writes it */
}

static void ring(struct valve_gate *gate, uint64_t name, uint64_t seen_ns, struct gpu **taken)
{
	struct valve_client *client = load_full(&gate->client[name & 0xFFFFFFFFu]);
	uint64_t launch_ns;
	bool heard;

	if (!client || client->generation != (uint32_t)(name >> 32))
		return;
	launch_ns = load_relaxed(&client->region->launch_ns); /* a claim: used for a statistic only */
	if (launch_ns > seen_ns || seen_ns - launch_ns > PLAUSIBLE)
		launch_ns = 0;
	heard = client->role == VALVE_ROLE_HOOK && grant_heard(gate, client, seen_ns, taken);
	if (!heard && service_hold(gate, (uint32_t)client->service, client, launch_ns, seen_ns, taken))
		return;
	if (seen_ns - client->window_ns > WINDOW_NS) {
		client->window_ns = seen_ns;
		client->idle_rings = 0;
	}
	if (++client->idle_rings > MAX_IDLE)
		listener_mute(gate, client, true);
}

static struct gpu *handle(struct valve_gate *gate, const struct epoll_event *events, int count,
                          uint64_t seen_ns)
{
	struct gpu *taken = NULL;

	turn_page(gate);
	for (int i = 0; i < count; i++) {
		if (events[i].data.u64 < TIMER)
			ring(gate, events[i].data.u64, seen_ns, &taken);
	}
	turn_page(gate);
	return taken;
}

/* Looks that are due, and the timer for the next. The GPU that is to be enabled here, if one is. */
static struct gpu *look(struct valve_gate *gate)
{
	struct gpu *freed = NULL;
	uint64_t now = now_ns();

	if (load_full(&gate->kicked) || now >= gate->look_ns) {
		turn_page(gate);
		waking_turn(gate, now, &freed);
		turn_page(gate);
	}
	waking_arm(gate);
	if (!freed || issuer_borrow(freed))
		return freed;
	issuer_kick(freed);
	return NULL;
}

/* Handle events, then look. *undone: what came with the ring that closes a GPU is left to another listener, a stop being in
 * more of a hurry than a wake. The ring alone leaves nothing but the next look at its own service, which the borrower of the
 * seat takes when it is back. If it hangs there, the watchdog's kick wakes the owner of the seat, which takes it. */
static struct gpu *listen(struct valve_gate *gate, const struct epoll_event *events, int count,
                          uint64_t seen_ns, bool *undone)
{
	struct gpu *taken;

	for (uint32_t tries = 0; swap(&gate->listening, 1); tries++) { /* the other is in its batch */
		if (tries < TRIES)
			__builtin_ia32_pause();
		else
			sleep_ns(2000);
	}
	taken = handle(gate, events, count, seen_ns);
	*undone = taken && count > 1;
	if (!taken)
		taken = look(gate);
	store_release(&gate->listening, 0);
	return taken;
}

/* Be a listener until a GPU is to be closed or enabled whose issuer sleeps: its seat is borrowed then. NULL: the gate
 * closes. */
struct gpu *listener_serve(struct valve_gate *gate)
{
	struct epoll_event events[BATCH];
	uint64_t spin_until = 0, one = 1;
	struct gpu *taken;
	bool undone;

	add_fetch(&gate->listeners, 1);
	taken = listen(gate, events, 0, 0, &undone);
	while (!taken && !load_acquire(&gate->quit)) {
		int count = epoll_wait(gate->epoll, events, BATCH, spin_until ? 0 : -1);
		uint64_t seen_ns = now_ns();

		taken = listen(gate, events, count, seen_ns, &undone);
		if (count > 0)
			spin_until = gate->config.spin_ns ? seen_ns + gate->config.spin_ns : 0;
		else if (seen_ns > spin_until)
			spin_until = 0;
	}
	if (add_fetch(&gate->listeners, UINT32_MAX) == 0 && taken)
		undone = true;
	if (taken && undone)
		issuer_keep(taken);
	if (!taken && write(gate->wake, &one, sizeof one) < 0) /* the next one: an edge wakes one */
		return NULL;
	return taken;
}

/* Wait until the listener has left the batch it is in now: it holds no pointer that was unpublished before. */
void listener_quiesce(struct valve_gate *gate)
{
	uint64_t turn = load_full(&gate->listener_turn);

	while (turn % 2 && load_full(&gate->listener_turn) == turn)
		sleep_ns(5000);
}

static int control(struct valve_gate *gate, struct valve_client *client, int op, uint32_t events)
{
	struct epoll_event event = {
	        .events = events,
	        .data.u64 = (uint64_t)client->generation << 32 | client->slot,
	};

	return epoll_ctl(gate->epoll, op, client->doorbell, &event) < 0 ? -errno : 0;
}

int listener_add(struct valve_gate *gate, struct valve_client *client)
{
	return control(gate, client, EPOLL_CTL_ADD, EPOLLIN | EPOLLET);
}

/* A doorbell that is not listened to is marked as muted, always, so that the watchdog finds it: the mark is set after the
 * listening ends, and cleared before it begins again. Listener and watchdog may both be here for one client. EPOLLET: a client
 * can bring the counter to its end, and that error is always reported; without an edge, again and again. Unlike the end of
 * the listening for good (client_end) it takes no lock of the eventfd. */
void listener_mute(struct valve_gate *gate, struct valve_client *client, bool mute)
{
	if (!mute)
		store_full(&client->muted, 0);
	control(gate, client, EPOLL_CTL_MOD, mute ? EPOLLET : EPOLLIN | EPOLLET);
	if (mute) {
		store_full(&client->muted, 1);
		store_release(&gate->mutes,
		              1); /* pairs with the swap in watchdog_main, which finds the client */
	}
}

int listener_open(struct valve_gate *gate)
{
	struct epoll_event self = {.events = EPOLLIN | EPOLLET, .data.u64 = SELF};
	struct epoll_event timer = {.events = EPOLLIN | EPOLLET, .data.u64 = TIMER};

	if (epoll_ctl(gate->epoll, EPOLL_CTL_ADD, gate->wake, &self) < 0 ||
	    epoll_ctl(gate->epoll, EPOLL_CTL_ADD, gate->timer, &timer) < 0)
		return -errno;
	return 0;
}
