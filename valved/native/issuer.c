/*
 * issuer.c - one thread per GPU, the only one that switches that GPU's channels. It compares what should be (holders,
 * brakes) with what is (state), walks the plan when they differ, reads its mail, and sleeps on its kick word.
 *
 * It follows levels, not messages: a hold that came and went while it was busy needs no walk, and none is lost.
 */
#include "internal.h"

#define RETRY_NS 100000000u /* an enable that failed is tried again: a channel left off is the worse error */

void issuer_kick(struct gpu *gpu)
{
	add_fetch(&gpu->kick,
	          1); /* pairs with the load of kick in issuer_main, before it looks at anything else */
	futex_wake(&gpu->kick);
}

/* Walk all steps of a plan; the first bad status, 0 if none. Stopping holds the clients of a step that failed. */
static int walk(struct gpu *gpu, struct plan *plan, bool stop)
{
	int status = 0;

	for (uint32_t i = 0; plan && i < plan->steps; i++) {
		int rc = plan->step[i].ops->begin(gpu, &plan->step[i], stop);

		status = status ? status : rc;
		if (rc && stop)
			order_hold_all(gpu, &plan->step[i]);
	}
	for (uint32_t i = 0; plan && i < plan->steps; i++) {
		int rc = plan->step[i].ops->finish(gpu, &plan->step[i], stop);

		status = status ? status : rc;
		if (rc && stop)
			order_hold_all(gpu, &plan->step[i]);
	}
	if (!stop)
		order_release(gpu, plan);
	return status;
}

/* Let the watchdog see the walk. The stamp is what it will report if the walk does not come back in time. */
static uint32_t take_off(struct gpu *gpu, const struct valve_stamp *stamp)
{
	uint32_t number = (load_relaxed(&gpu->flight) >> 2) + 1; /* the keeper never changes the number */

	gpu->flight_stamp = *stamp;
	gpu->flight_plan = gpu->plan;
	store_relaxed(&gpu->flight_ns, stamp->ioctl_ns);
	store_release(&gpu->flight,
	              number << 2 | FLIGHT_OUT); /* pairs with the keeper's acquire: fields above */
	return number;
}

static void land(struct gpu *gpu, uint32_t number)
{
	uint32_t out = number << 2 | FLIGHT_OUT;

	if (!compare_swap(&gpu->flight, &out, number << 2 | FLIGHT_NONE)) {
		/* The keeper gave this flight up and is putting holds on the clients of our plan: not ours to change
		 * before it is through. */
		while (load_acquire(&gpu->flight) != (number << 2 | FLIGHT_HELD))
			sleep_ns(10000);
		store_release(&gpu->flight, number << 2 | FLIGHT_NONE);
	}
}

static struct valve_stamp stamp_of(struct gpu *gpu, uint64_t holders)
{
	struct service *closer = &gpu->gate->service[holders_closer(holders)];
	struct valve_stamp stamp = {
	        .kind = VALVE_STAMP_GATE,
	        .gpu = gpu->index,
	        .service = load_relaxed(&closer->id),
	        .epoch = load_acquire(&closer->epoch) &
	                 ~1u, /* odd: woken again since; the hold was the one before */
	        .client = load_relaxed(&closer->cause_client),
	        .launch_ns = load_relaxed(&closer->launch_ns),
	        .seen_ns = load_relaxed(&closer->seen_ns),
	};

	store_relaxed(&closer->stamped, stamp.epoch);
	return stamp;
}

static void stop(struct gpu *gpu, uint64_t holders)
{
	struct valve_stamp stamp = stamp_of(gpu, holders);

	stamp.channels = plan_channels(gpu->plan);
	stamp.done_ns = now_ns();
	if (stamp.channels) {
		uint32_t number;

		stamp.ioctl_ns = stamp.done_ns;
		number = take_off(gpu, &stamp);
		stamp.status = walk(gpu, gpu->plan, true);
		stamp.done_ns = now_ns();
		land(gpu, number);
	}
	stamp.kind = stamp.status ? VALVE_STAMP_GATE_FAILED : VALVE_STAMP_GATE;
	store_release(&gpu->state, VALVE_GPU_STOPPED);
	stamp_push(&gpu->gate->stamps, &stamp);
}

/* Make state the target. False when an enable failed and must be tried again. */
static bool turn(struct gpu *gpu, enum valve_gpu_state target, uint64_t holders)
{
	enum valve_gpu_state state = gpu->state;

	if (target == VALVE_GPU_STOPPED) {
		stop(gpu, holders);
		return true;
	}
	if (state == VALVE_GPU_STOPPED && walk(gpu, gpu->plan, false) != 0)
		return false;
	if (state == VALVE_GPU_RUNNING) { /* held, but a brake keeps the channels on: say so all the same */
		struct valve_stamp stamp = stamp_of(gpu, holders);

		stamp.done_ns = now_ns();
		stamp_push(&gpu->gate->stamps, &stamp);
	}
	store_release(&gpu->state, target);
	return true;
}

static void answer(struct gpu *gpu, struct mail *mail)
{
	mail->old = gpu->plan;
	gpu->plan = mail->plan;
	if (gpu->state == VALVE_GPU_STOPPED) {
		mail->status = walk(gpu, mail->stop_now, true);
		walk(gpu, mail->run_now, false);
	}
	mail->next = load_relaxed(&gpu->spent); /* the swap below decides */
	while (!compare_swap(&gpu->spent, &mail->next, mail))
		;
	store_release(&mail->done, 1); /* pairs with the caller's acquire: status and old are final */
	futex_wake(&mail->done);
}

static void read_mail(struct gpu *gpu)
{
	struct mail *newest = swap(&gpu->mail, NULL), *oldest = NULL;

	while (newest) {
		struct mail *next = newest->next;

		newest->next = oldest;
		oldest = newest;
		newest = next;
	}
	while (oldest) {
		struct mail *next = oldest->next;

		answer(gpu, oldest);
		oldest = next;
	}
}

static void wait_for_kick(struct gpu *gpu, uint32_t seen, uint64_t timeout_ns)
{
	uint64_t until = gpu->gate->config.spin_ns ? now_ns() + gpu->gate->config.spin_ns : 0;

	while (until && load_acquire(&gpu->kick) == seen && now_ns() < until)
		__builtin_ia32_pause();
	futex_wait(&gpu->kick, seen, timeout_ns);
}

static void *issuer_main(void *argument)
{
	struct gpu *gpu = argument;
	uint32_t closings = 0;

	for (;;) {
		uint32_t seen =
		        load_acquire(&gpu->kick); /* first: whoever changes something kicks afterwards */
		enum valve_gpu_state target;
		uint64_t holders, timeout_ns = 0;

		read_mail(gpu);
		holders = load_full(&gpu->holders);
		target = gpu_target(gpu, holders);
		if (target != gpu->state && !turn(gpu, target, holders))
			timeout_ns = RETRY_NS;
		if ((uint32_t)(holders >> 32) != closings) {
			closings = (uint32_t)(holders >> 32);
			service_owe(gpu);
		}
		if (load_acquire(&gpu->gate->quit))
			return NULL;
		wait_for_kick(gpu, seen, timeout_ns);
	}
}

int issuer_start(struct gpu *gpu)
{
	int rc = thread_start(gpu->gate, &gpu->thread, issuer_main, gpu, true);

	gpu->started = rc == 0;
	return rc;
}
