/*
 * late.c - channels that leave the gate while they are off are run at once (valve_arm's run_now). A channel is always in one of
 * three places, and its place says what it is owed:
 *
 *   the plan             whatever its GPU is owed (issuer.c)
 *   a list of run_now    an enable; where the driver refuses it, the issuer keeps the mail and asks again: no other
 * thread would
 *   neither              nothing
 *
 * So a channel that comes (back) into the plan is taken off all lists at that moment, and one that has run at once. A list is no
 * plan: running it takes back no order, but those of processes that are in no plan any more.
 */
#include "internal.h"

static void forget(struct plan_step *step)
{
	step->off.numChannels = step->on.numChannels = 0;
}

void late_forget(struct plan *owed)
{
	for (uint32_t i = 0; owed && i < owed->steps; i++)
		forget(&owed->step[i]);
}

/* True if the list has named a channel of the plan. */
static bool leave_to_plan(const struct gpu *gpu, struct plan *owed)
{
	uint32_t before = plan_channels(owed);

	for (uint32_t i = 0; owed && i < owed->steps; i++) {
		struct plan_step *step = &owed->step[i];

		for (uint32_t at = step->off.numChannels; at-- > 0;)
			if (plan_has(gpu->plan, step->off.hClientList[at], step->off.hChannelList[at]))
				plan_drop(step, at);
	}
	return plan_channels(owed) != before;
}

/* There is a new plan. True if something in it is off that was to run. */
bool late_join(struct gpu *gpu)
{
	bool joined = false;

	for (struct mail *mail = gpu->late; mail; mail = mail->next)
		joined |= leave_to_plan(gpu, mail->run_now);
	return joined;
}

/* A passed file goes with its client, and nothing is reached by it after that. */
static bool is_lost(const struct plan_step *step)
{
	return step->ops == &reach_fd && load_acquire(&step->owner[0]->dropped);
}

/* What an order was for is over with the order (order_leave). */
static bool is_call(const struct plan_step *step)
{
	return step->ops == &reach_own || step->ops == &reach_fd;
}

/* It was done, or what a GPU ran is gone with the GPU. */
static bool is_over(int status)
{
	return !status || status == NV_ERR_GPU_IS_LOST;
}

/* Try once. What stays in the list is owed. In its own turn (`seen`) the list waits for the next kick, elsewhere for a stop:
 * none waits for more than the call that is under way. */
void late_run(struct gpu *gpu, struct plan *owed, const uint32_t *seen)
{
	bool tried = false;

	leave_to_plan(gpu, owed);
	for (uint32_t i = 0; owed && i < owed->steps; i++, owed->next = (owed->next + 1) % owed->steps) {
		struct plan_step *step = &owed->step[owed->next];

		if (!step->off.numChannels)
			continue;
		if (tried && (seen ? load_acquire(&gpu->kick) != *seen : gpu_is_awaited(gpu)))
			break;
		tried = true;
		if (!is_call(step) || is_lost(step) || is_over(step->ops->begin(gpu, step, false)))
			forget(step);
	}
}

/* False: the mail is done with. */
bool late_keep(struct gpu *gpu, struct mail *mail)
{
	leave_to_plan(gpu, mail->run_now);
	if (!plan_channels(mail->run_now))
		return false;
	mail->next = gpu->late;
	gpu->late = mail;
	gpu->late_ns = now_ns() + issuer_backoff_ns(0);
	gpu->late_failures = 1;
	return true;
}

/* Returns after how long to come again, 0: nothing is late. A kick since `seen` ends the turn, and is no failure of it. */
uint64_t late_turn(struct gpu *gpu, uint32_t seen)
{
	struct mail *tried = NULL, **end = &gpu->late;
	uint64_t now = now_ns(), rest_ns;

	if (!gpu->late)
		return 0;
	if (now < gpu->late_ns)
		return gpu->late_ns - now;
	do {
		struct mail *mail = gpu->late;

		gpu->late = mail->next;
		issuer_run(gpu, mail->run_now, &seen);
		if (plan_channels(mail->run_now)) {
			mail->next = tried;
			tried = mail;
		} else {
			mail_spend(gpu, mail);
		}
	} while (gpu->late && load_acquire(&gpu->kick) == seen);
	while (*end)
		end = &(*end)->next;
	*end = tried; /* behind those whose turn it still is */
	rest_ns = issuer_backoff_ns(load_acquire(&gpu->kick) == seen ? gpu->late_failures++ : 0);
	gpu->late_ns = now_ns() + rest_ns;
	return gpu->late ? rest_ns : 0;
}
