/*
 * late.c - channels that leave the gate while they are off are run at once (valve_arm's run_now), and are in no plan from then
 * on. Where the driver refuses that, the issuer keeps the mail that named them, and asks again until it holds: nobody else would.
 *
 * A channel that has come back into the plan meanwhile is the plan's: enabled here, it could run under a closed gate. On a
 * passed file nothing can be done later: the file goes with its client, and the driver then says that nothing is there.
 */
#include "internal.h"

/* False: the mail is done with. */
bool late_keep(struct gpu *gpu, struct mail *mail, int status)
{
	if (!status)
		return false;
	mail->next = gpu->late;
	gpu->late = mail;
	gpu->late_ns = now_ns() + issuer_backoff_ns(0);
	gpu->late_failures = 1;
	return true;
}

static void leave_to_plan(const struct gpu *gpu, struct plan *plan)
{
	for (uint32_t i = 0; i < plan->steps; i++) {
		struct plan_step *step = &plan->step[i];

		for (uint32_t at = step->off.numChannels; at-- > 0;)
			if (plan_has(gpu->plan, step->off.hClientList[at], step->off.hChannelList[at]))
				plan_drop(step, at);
	}
}

/* Returns after how long to come again, 0: nothing is late. */
uint64_t late_turn(struct gpu *gpu)
{
	struct mail *mails = gpu->late;
	uint64_t now = now_ns(), rest_ns;

	if (!mails)
		return 0;
	if (now < gpu->late_ns)
		return gpu->late_ns - now;
	gpu->late = NULL;
	while (mails) {
		struct mail *next = mails->next;

		leave_to_plan(gpu, mails->run_now);
		if (issuer_enable(gpu, mails->run_now)) {
			mails->next = gpu->late;
			gpu->late = mails;
		} else {
			issuer_spend(gpu, mails);
		}
		mails = next;
	}
	rest_ns = issuer_backoff_ns(gpu->late_failures++);
	gpu->late_ns = now_ns() + rest_ns;
	return gpu->late ? rest_ns : 0;
}
