/*
 * mail.c - what an issuer does for a mail. A mail may have waited for long. So the issuer checks, when it reads the
 * mail, what may still run: a stop or a newer plan may have come meanwhile. Only the issuer's thread runs this.
 */
#include "internal.h"

static int try_switch(struct gpu *gpu, const struct plan_step *step,
                      struct nv2080_fifo_disable_channels *lists)
{
	int rc = step_issue(gpu, step, lists);

	if (step->ops == &reach_own && rm_is_stale(rc) && own_revived(gpu))
		rc = step_issue(gpu, step, lists);
	return rm_is_stale(rc) && !own_confirms(gpu, step, 1) ? NV_ERR_INVALID_STATE : rc;
}

static bool is_open(const struct gpu *gpu)
{
	return gpu->state < VALVE_GPU_STOPPED &&
	       gpu_target(gpu, load_full(&gpu->holders)) != VALVE_GPU_STOPPED;
}

/* Enables one channel. A channel of the plan runs now if the plan runs, else later with it. With `unless_held` the
 * sender remembers a refusal, except for a channel of the plan. */
static int enable_one(struct gpu *gpu, const struct mail *mail, bool unless_held)
{
	struct plan_step *step = mail->run_now->step;
	bool in_plan = plan_has(gpu->plan, step->on.hClientList[0], step->on.hChannelList[0]);
	int status = -EBUSY;

	if (is_open(gpu) || !(unless_held || in_plan)) {
		status = step->ops->begin(gpu, step, false);
		if (!status && !step->on.numChannels)
			status = NV_ERR_OBJECT_NOT_FOUND;
	}
	/* The hold that keeps it off may end before the issuer follows that hold. */
	if (status && in_plan && gpu->state < VALVE_GPU_STOPPED)
		store_release(&gpu->state, VALVE_GPU_ENABLING);
	if (!status || unless_held)
		late_forget(mail->run_now);
	return status;
}

static int change_plan(struct gpu *gpu, const struct mail *mail)
{
	int status = 0;

	gpu->owed |= late_join(gpu);
	if (gpu->state == VALVE_GPU_STOPPED || gpu->state == VALVE_GPU_FAILED) {
		status = walk_stop(gpu, mail->stop_now);
		/* A newer plan that is in use already may not name the channels that this mail held. */
		order_move(gpu, mail->stop_now, gpu->plan);
	}
	if (gpu->owed && gpu->state < VALVE_GPU_STOPPED)
		store_release(&gpu->state,
		              VALVE_GPU_ENABLING); /* channels that are off are in this plan or leave it */
	gpu->owed = false;
	if (gpu->state < VALVE_GPU_STOPPED)
		late_forget(mail->run_now);
	late_run(gpu, mail->run_now, NULL);
	order_leave(gpu, mail->run_now);
	return status;
}

int mail_carry_out(struct gpu *gpu, struct mail *mail)
{
	int status = 0;

	switch (mail->kind) {
	case MAIL_PLAN:
		return change_plan(gpu, mail);
	case MAIL_OFF:
		return try_switch(gpu, mail->stop_now->step, &mail->stop_now->step->off);
	case MAIL_ON:
		status = is_open(gpu) ? try_switch(gpu, mail->stop_now->step, &mail->stop_now->step->on)
		                      : -EBUSY;
		gpu->owed |= status && !rm_is_stale(status);
		return status;
	case MAIL_CID:
		return own_unique_id(gpu, mail->h_client, mail->h_channel, &mail->cid);
	case MAIL_ENABLE_UNLESS_HELD:
	case MAIL_ENABLE:
		return enable_one(gpu, mail, mail->kind == MAIL_ENABLE_UNLESS_HELD);
	case MAIL_SLICE:
		return rm_slice(&gpu->gate->os, mail->fd, mail->h_client, mail->h_channel, mail->slice_us);
	}
	return -EINVAL;
}
