/*
 * issuer.c - the issuer of a GPU: the one thread that switches this GPU's channels. It compares what
 * should be (holders, let) with what is (state), walks the plan when they differ, reads its mail, and sleeps.
 *
 * It follows levels, not messages: a hold that came and went while it was busy needs no walk, and none is lost. A walk
 * that failed is walked again for as long as it is wanted: disable and enable are idempotent, and neither a channel that
 * is left on nor one that is left off may stay so because a driver refused once.
 */
#include "internal.h"

#define RETRY_FIRST_NS 2000000u /* doubled at each failure in a row ... */
#define RETRY_TIMES    7u       /* ... so many times: 256 ms */

void issuer_kick(struct gpu *gpu)
{
	add_fetch(&gpu->kick,
	          1); /* pairs with the load of kick in issuer_main, before it looks at anything else */
	futex_wake(&gpu->kick);
}

/* Let the watchdog see that we are in the driver. */
static void take_off(struct gpu *gpu, uint64_t start_ns)
{
	static _Thread_local uint32_t own;                       /* asked for once */
	uint32_t number = (load_relaxed(&gpu->flight) >> 2) + 1; /* the watchdog never changes the number */

	if (!own)
		own = (uint32_t)syscall(SYS_gettid);
	store_relaxed(&gpu->flier, own);
	store_relaxed(&gpu->flight_ns, start_ns);
	store_release(&gpu->flight,
	              number << 2 | FLIGHT_OUT); /* pairs with the watchdog's acquire: time and plan */
}

/* True if the watchdog had given this flight up (and has stamped GATE_FAILED). */
static bool land(struct gpu *gpu)
{
	uint32_t number = load_relaxed(&gpu->flight) >> 2, out = number << 2 | FLIGHT_OUT;
	bool is_lost = !compare_swap(&gpu->flight, &out, number << 2 | FLIGHT_NONE);

	/* It is putting holds on the clients of our plan: not ours to change before it is through. */
	while (is_lost && load_acquire(&gpu->flight) != (number << 2 | FLIGHT_HELD))
		sleep_ns(10000);
	if (is_lost)
		store_release(&gpu->flight, number << 2 | FLIGHT_NONE);
	if (gpu->gate->config.fifo_priority &&
	    now_ns() - load_relaxed(&gpu->flight_ns) >= gpu->gate->config.hang_ns)
		hurry(&gpu->gate->config, 0, true); /* calm in watchdog.c has taken it away */
	return is_lost;
}

/* One stamp tells of a failure, not one for each time that it is met again; a new hold is told anew. */
static void tell_stop(struct gpu *gpu, uint64_t holders, struct valve_stamp *stamp, bool again)
{
	uint32_t closing = (uint32_t)(holders >> 32);

	stamp->kind = stamp->status ? VALVE_STAMP_GATE_FAILED : VALVE_STAMP_GATE;
	if (stamp->status && again && gpu->told_status == stamp->status && gpu->told_closing == closing)
		return;
	gpu->told_status = stamp->status;
	gpu->told_closing = closing;
	service_tell(gpu, holders, stamp);
}

/* False: something may still run. */
static bool stop(struct gpu *gpu, uint64_t holders)
{
	struct valve_stamp stamp = service_stamp(gpu, holders);
	bool again = gpu->state == VALVE_GPU_FAILED, is_new = (uint32_t)(holders >> 32) != gpu->closings;

	if (is_new || !again)
		gpu->delays = is_new && (gpu->state != VALVE_GPU_WATCHED ||
		                         (gpu->was_sliced && stamp.cause == VALVE_CAUSE_RING));
	if (!gpu->delays) /* held for a while already: no launch has waited for this */
		stamp.client = stamp.launch_ns = stamp.seen_ns = 0;
	stamp.channels = plan_channels(gpu->plan);
	stamp.done_ns = now_ns();
	if (stamp.channels) {
		stamp.ioctl_ns = stamp.done_ns;
		store_release(&gpu->state,
		              VALVE_GPU_STOPPING); /* before the first call: not running any more */
		take_off(gpu, stamp.ioctl_ns);
		stamp.status = walk_stop(gpu, gpu->plan);
		stamp.done_ns = now_ns();
		land(gpu);
	}
	if (!stamp.status)
		until_tell(gpu, gpu->plan, 0);
	gpu->delays &= stamp.status != 0;
	tell_stop(gpu, holders, &stamp, again);
	store_release(&gpu->state, /* last: a reader of it finds the stamp */
	              stamp.status ? VALVE_GPU_FAILED : VALVE_GPU_STOPPED);
	return stamp.status == 0;
}

/* Say before the first call that the GPU is stopped no longer. False if it is held again by now: either we see that
 * hold, or its thread sees that nothing is proven any more (both sides store, then load, in full order). */
static bool leave_stopped(struct gpu *gpu)
{
	store_full(&gpu->state, VALVE_GPU_ENABLING);
	at_point(gpu->gate, VALVE_POINT_ENABLING);
	if (gpu_target(gpu, load_full(&gpu->holders)) != VALVE_GPU_STOPPED)
		return true;
	store_full(&gpu->state, VALVE_GPU_STOPPED);
	return false;
}

/* Tells the end of a grant first: if valved dies from here on, it leaves channels that stop themselves. If that end has
 * changed meanwhile it is told anew, but not to a GPU that is held by now: its channels keep the end that they were
 * enabled with until they are stopped. */
static int run(struct gpu *gpu, uint64_t until_ns)
{
	int status;

	for (;;) {
		until_tell(gpu, gpu->plan, until_ns);
		if (!until_wait(gpu, gpu->plan))
			return -ECANCELED;
		take_off(gpu, now_ns());
		status = walk_run(gpu, gpu->plan);
		land(gpu);
		if (status || load_full(&gpu->until_ns) == until_ns ||
		    gpu_target(gpu, load_full(&gpu->holders)) == VALVE_GPU_STOPPED)
			return status;
		until_ns = load_full(&gpu->until_ns);
	}
}

/* Make state the target. False when that failed and must be tried again. */
static bool turn(struct gpu *gpu, enum valve_gpu_state target, uint64_t holders)
{
	enum valve_gpu_state state = gpu->state;
	uint64_t until_ns =
	        load_full(&gpu->until_ns); /* before the holders are looked at: hold.c clears it after */

	if (target == VALVE_GPU_STOPPED)
		return stop(gpu, holders);
	if (state == VALVE_GPU_STOPPED && !leave_stopped(gpu))
		return true;
	if (state == VALVE_GPU_FAILED) /* proves nothing, so there is nothing to take back */
		store_release(&gpu->state, VALVE_GPU_ENABLING);
	if (state >= VALVE_GPU_STOPPED && run(gpu, until_ns) != 0)
		return false;
	if (state == VALVE_GPU_RUNNING) { /* held, but let: say so all the same */
		struct valve_stamp stamp = service_stamp(gpu, holders);

		stamp.done_ns = now_ns();
		service_tell(gpu, holders, &stamp);
	}
	gpu->was_sliced = target == VALVE_GPU_WATCHED && until_ns;
	store_release(&gpu->state, target);
	return true;
}

/* While channels run their end may move, or be taken away. A client that had claimed the old one may have stopped
 * itself for it. Returns after how long to look again, 0: when kicked. */
static uint64_t follow_end(struct gpu *gpu)
{
	uint64_t until_ns = load_full(&gpu->until_ns); /* first: see turn */

	if (gpu->state > VALVE_GPU_WATCHED || gpu->told_until_ns == until_ns ||
	    gpu_target(gpu, load_full(&gpu->holders)) != (enum valve_gpu_state)gpu->state)
		return 0;
	until_tell(gpu, gpu->plan, until_ns);
	if (!until_is_claimed(gpu->plan, until_ns) || !run(gpu, until_ns))
		return 0;
	store_release(&gpu->state, VALVE_GPU_ENABLING); /* refused or cut: some may be off */
	return issuer_backoff_ns(0);
}

uint64_t issuer_backoff_ns(uint32_t failures)
{
	return (uint64_t)RETRY_FIRST_NS << (failures < RETRY_TIMES ? failures : RETRY_TIMES);
}

/* Turn, unless that failed a moment ago. Returns after how long to look again, 0: when kicked. */
static uint64_t pursue(struct gpu *gpu, enum valve_gpu_state target, uint64_t holders)
{
	uint64_t rest_ns, now = now_ns();
	bool is_new = target != gpu->tried || (uint32_t)(holders >> 32) != gpu->closings;

	if (is_new || target == gpu->state)
		gpu->failures = 0; /* a new hold does not wait for what an old one met */
	gpu->tried = target;
	if (target == gpu->state)
		return 0;
	if (gpu->failures && now < gpu->retry_ns)
		return gpu->retry_ns - now;
	if (turn(gpu, target, holders))
		return 0;
	rest_ns = issuer_backoff_ns(gpu->failures++);
	store_relaxed(&gpu->retry_ns, now_ns() + rest_ns); /* is_turning looks at it */
	return rest_ns;
}

/* Make what is what should be. Returns after how long to look again, 0: when kicked. */
static uint64_t follow(struct gpu *gpu)
{
	uint64_t holders = load_full(&gpu->holders);
	uint64_t rest_ns = pursue(gpu, gpu_target(gpu, holders), holders);

	if ((uint32_t)(holders >> 32) != gpu->closings) {
		gpu->closings = (uint32_t)(holders >> 32);
		service_owe(gpu);
	}
	return rest_ns;
}

/* A mail that had been given up came back while the GPU is stopped: no thread waits for its answer any more. What it
 * was to stop is in the plan, so a bad answer is mended there; a good one takes back what the watchdog said. */
static void recover(struct gpu *gpu, int status)
{
	struct valve_stamp stamp = {.kind = VALVE_STAMP_GATE, .gpu = gpu->index};

	gpu->owes_word = false;
	if (gpu->state != VALVE_GPU_STOPPED)
		return;
	if (status) {
		store_release(&gpu->state, VALVE_GPU_FAILED);
		return;
	}
	gpu->owes_word = load_full(&gpu->unproven);
	if (gpu->owes_word)
		return;
	stamp.channels = plan_channels(gpu->plan);
	stamp.done_ns = now_ns();
	stamp_push(&gpu->gate->stamps, &stamp, true);
}

/* Run channels that are in no plan, whatever the state of the GPU. */
void issuer_run(struct gpu *gpu, struct plan *owed, const uint32_t *seen)
{
	take_off(gpu, now_ns());
	late_run(gpu, owed, seen);
	if (land(gpu))
		recover(gpu, 0);
}

static void take_plan(struct gpu *gpu, struct mail *mail)
{
	mail->was_off = gpu->state >= VALVE_GPU_STOPPED; /* a stop from here on walks the new plan */
	mail->old = gpu->plan;
	gpu->plan = mail->plan;
	if (mail->old && mail->plan)
		mail->plan->next = mail->old->next % mail->plan->steps;
	until_move(gpu, mail->old, mail->plan);
	order_move(gpu, mail->old, mail->plan);
}

static void answer(struct gpu *gpu, struct mail *mail)
{
	int failure;

	at_point(gpu->gate, VALVE_POINT_MAIL);
	mail->was_off |= gpu->owed;
	take_off(gpu, now_ns());
	mail->status = mail_carry_out(gpu, mail);
	failure = mail->kind == MAIL_PLAN ? mail->status : 0;
	if (mail->kind == MAIL_PLAN && mail->stop_now)
		add_fetch(&gpu->unproven, UINT32_MAX);
	at_point(gpu->gate, VALVE_POINT_MAIL);
	if (land(gpu) || gpu->owes_word)
		recover(gpu, failure);
	while (plan_channels(mail->run_now) && gpu_is_awaited(gpu)) {
		follow(gpu); /* which cut it; and its client, which the rest may need, goes with the answer */
		issuer_run(gpu, mail->run_now, NULL);
	}
	if (!late_keep(gpu, mail))
		mail_spend(gpu, mail);
	/* Pairs with the caller's acquire: all of the above is final. */
	if (swap(&mail->done, 1) == ABANDONED && failure)
		recover(gpu, failure);
	futex_wake(&mail->done);
}

/* A stop waits for no mail, but for the driver's answer to one. It is of the newest plan, whose taking is no call. */
static void read_mail(struct gpu *gpu)
{
	struct mail *newest = swap(&gpu->mail, NULL), *oldest = NULL;

	while (newest) {
		struct mail *next = newest->next;

		newest->next = oldest;
		oldest = newest;
		newest = next;
	}
	for (struct mail *mail = oldest; mail; mail = mail->next)
		if (mail->kind == MAIL_PLAN)
			take_plan(gpu, mail);
	for (bool was_stopped = false; oldest;) {
		struct mail *next = oldest->next;
		bool stops = oldest->stop_now;

		if (gpu_is_awaited(gpu))
			follow(gpu);
		oldest->was_off |= was_stopped;
		answer(gpu, oldest);
		was_stopped |= stops && gpu->state >= VALVE_GPU_STOPPED; /* what leaves with the next, say */
		oldest = next;
	}
}

/* False: a listener borrowed the seat while we slept, and keeps it: we listen instead. */
static bool wait_for_kick(struct gpu *gpu, uint32_t seen, uint64_t timeout_ns)
{
	uint64_t until = gpu->gate->config.spin_ns ? now_ns() + gpu->gate->config.spin_ns : 0;
	uint32_t mine = load_relaxed(&gpu->seat), seat; /* only a sleeper's seat is lent */

	store_release(
	        &gpu->seat,
	        mine | SEAT_ASLEEP); /* pairs with the swap in issuer_borrow: all that a seat goes with */
	while (until && load_acquire(&gpu->kick) == seen && now_ns() < until)
		__builtin_ia32_pause();
	futex_wait(&gpu->kick, seen, timeout_ns);
	for (;;) {
		seat = mine | SEAT_ASLEEP;
		if (compare_swap(&gpu->seat, &seat, mine))
			return true;
		if (seat != (mine | SEAT_LENT) || compare_swap(&gpu->seat, &seat, mine + SEAT_NEXT))
			return false;
	}
}

/* Listener: be the issuer of a GPU whose issuer sleeps, which sleeps on: so the first GPU of a ring is closed by the thread
 * that saw it, and no second thread wakes up. If the issuer wakes meanwhile the seat is the borrower's. */
bool issuer_borrow(struct gpu *gpu)
{
	uint32_t seat = load_relaxed(&gpu->seat); /* the swap decides */

	return (seat & SEAT_ASLEEP) && compare_swap(&gpu->seat, &seat, (seat & ~SEAT_ASLEEP) | SEAT_LENT);
}

/* Borrower: no other thread listens. So the sleeping issuer does, and the seat is ours. */
void issuer_keep(struct gpu *gpu)
{
	uint32_t seat = load_relaxed(&gpu->seat);

	if (seat & SEAT_LENT) /* the issuer may come first, and do the same */
		compare_swap(&gpu->seat, &seat, (seat & ~SEAT_LENT) + SEAT_NEXT);
	issuer_kick(gpu);
}

/* False: the seat is ours by now. A kick from here on wakes its owner. */
static bool give_back(struct gpu *gpu)
{
	uint32_t seat = load_relaxed(&gpu->seat);

	return (seat & SEAT_LENT) && compare_swap(&gpu->seat, &seat, (seat & ~SEAT_LENT) | SEAT_ASLEEP);
}

static uint64_t sooner(uint64_t one, uint64_t other) /* 0: never */
{
	return one && (!other || one < other) ? one : other;
}

/* Be the issuer of this GPU until the seat is another's (or the gate closes). */
void issuer_serve(struct gpu *gpu)
{
	for (;;) {
		/* First of all: a thread that changes something kicks afterwards. */
		uint32_t seen = load_acquire(&gpu->kick);
		uint32_t owes_release = swap(&gpu->owes_release,
		                             0); /* then the mail: its plan may name clients that are held */
		uint64_t timeout_ns;

		read_mail(gpu);
		if (owes_release && gpu->state < VALVE_GPU_STOPPED)
			store_release(&gpu->state, VALVE_GPU_ENABLING);
		if (swap(&gpu->owes_stop, 0) && gpu->state == VALVE_GPU_STOPPED)
			store_release(&gpu->state, VALVE_GPU_FAILED);
		timeout_ns = follow(gpu);
		timeout_ns = sooner(timeout_ns, follow_end(gpu));
		timeout_ns = sooner(timeout_ns, late_turn(gpu, seen));
		if (load_acquire(&gpu->gate->quit))
			return;
		store_release(&gpu->handled, seen); /* pairs with valve_gate_settle */
		if (give_back(gpu)) {
			if (timeout_ns)
				issuer_kick(gpu); /* its owner looks again then */
			return;
		}
		if (!wait_for_kick(gpu, seen, timeout_ns))
			return;
	}
}
