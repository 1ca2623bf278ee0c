/*
 * walk.c - from step to step of a plan: a stop takes all of them, whatever each meets. An enable gives way to the next stop between
 * two calls; where it was cut it goes on, in a circle, so that no step waits for ever behind the others. The issuer alone.
 */
#include "internal.h"

enum round { BEGIN, GO_ON, FINISH, ROUNDS };

static int stop_step(struct gpu *gpu, struct plan_step *step, enum round round)
{
	if (round == GO_ON && step->ops->go_on)
		step->ops->go_on(gpu, step);
	if (round == FINISH)
		return step->ops->finish(gpu, step);
	return round == BEGIN ? step->ops->begin(gpu, step, true) : 0;
}

/* Stop all steps of a plan; the first bad status, 0 if none. The clients of a step that failed hold their launches. Each round
 * goes over all steps: none waits for what another one meets. */
int walk_stop(struct gpu *gpu, struct plan *plan)
{
	int status = 0;

	for (uint32_t i = 0; plan && i < ROUNDS * plan->steps; i++) {
		struct plan_step *step = &plan->step[i % plan->steps];
		int rc = stop_step(gpu, step, (enum round)(i / plan->steps));

		status = status ? status : rc;
		if (rc)
			order_hold_all(gpu, step);
	}
	return status;
}

/* The grant that channels are enabled for is over: its stop is on the way. */
static bool has_ended(const struct gpu *gpu)
{
	uint64_t until_ns = load_full(&gpu->until_ns);

	return until_ns && now_ns() >= until_ns;
}

/* Run all steps of a plan. -ECANCELED: a stop is due, and what is left has its turn first when they are run again. */
int walk_run(struct gpu *gpu, struct plan *plan)
{
	int status = 0;

	for (uint32_t i = 0; plan && i < plan->steps; i++) {
		struct plan_step *step = &plan->step[plan->next];
		int rc;

		if (i && (gpu_is_awaited(gpu) || has_ended(gpu)))
			return -ECANCELED;
		rc = step->ops->begin(gpu, step, false);
		plan->next = (plan->next + 1) % plan->steps;
		if (rc == -ECANCELED) /* cut in its own search: behind the others from now on */
			return rc;
		status = status ? status : rc;
	}
	order_release(gpu, plan);
	return status;
}
