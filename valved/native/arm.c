/*
 * arm.c - channels: verified, tried and armed while their GPU is quiet. Caller thread only. Tests at registration use
 * the cold RM client, so that the issuer's own is never waited for.
 */
#include "internal.h"

#include <stdlib.h>

int valve_gpu_cid(struct valve_gate *gate, uint32_t gpu, uint32_t h_client, uint32_t h_channel, uint32_t *cid)
{
	if (gate->gpu[gpu].info.status)
		return gate->gpu[gpu].info.status;
	if (!gate->branch->has_unique_id)
		return -EOPNOTSUPP;
	return rm_unique_id(&gate->os, &gate->gpu[gpu].cold, h_client, h_channel, cid);
}

static int switch_one(struct valve_gate *gate, const struct rm_client *as, uint32_t h_client,
                      uint32_t h_channel, bool off)
{
	struct nv2080_fifo_disable_channels one = {.bDisable = off, .numChannels = 1};

	one.hClientList[0] = h_client;
	one.hChannelList[0] = h_channel;
	return rm_control(&gate->os, as, as->h_subdevice, NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS, &one,
	                  sizeof one);
}

int valve_gpu_enable(struct valve_gate *gate, uint32_t gpu, uint32_t h_client, uint32_t h_channel)
{
	if (gate->gpu[gpu].info.status)
		return gate->gpu[gpu].info.status;
	return switch_one(gate, &gate->gpu[gpu].cold, h_client, h_channel, false);
}

static int try_order(struct valve_gate *gate, uint32_t gpu, struct valve_client *client)
{
	uint32_t seq = order_set(client, gpu, VALVE_ORDER_STOP, true, true);
	int stopped = order_wait(client, seq, gate->config.order_ns), run;

	seq = order_set(client, gpu, VALVE_ORDER_STOP, false, false);
	run = order_wait(client, seq, gate->config.order_ns);
	return stopped ? stopped : run;
}

/* Self-test: off and on again, while the channel is not yet scheduled and its GPU not held. What it cannot find is a
 * driver that says yes and does nothing: only a later look at the GPU's progress can. */
int valve_gpu_try(struct valve_gate *gate, uint32_t gpu, const struct valve_entry *entry)
{
	struct rm_client as = {
	        .ctl = entry->fd, .h_client = entry->h_target, .h_subdevice = entry->h_subdevice};
	int off, on;

	if (entry->reach == VALVE_REACH_HOLD)
		return 0;
	if (entry->reach == VALVE_REACH_SELF)
		return try_order(gate, gpu, entry->client);
	if (entry->reach == VALVE_REACH_OWN) {
		if (gate->gpu[gpu].info.status)
			return gate->gpu[gpu].info.status;
		as = gate->gpu[gpu].cold;
	}
	off = switch_one(gate, &as, entry->h_client, entry->h_channel, true);
	on = switch_one(gate, &as, entry->h_client, entry->h_channel, false);
	return off ? off : on;
}

static void mail_free(struct mail *mail, bool keep_plan)
{
	plan_free(mail->old);
	plan_free(mail->stop_now);
	plan_free(mail->run_now);
	if (!keep_plan)
		plan_free(mail->plan);
	free(mail);
}

/* Free the mails that the issuer has handed back. One that is not marked done yet is put back for the next time. */
static void reap(struct gpu *gpu)
{
	struct mail *mail = swap(&gpu->spent, NULL);

	while (mail) {
		struct mail *next = mail->next;

		if (load_acquire(&mail->done)) {
			mail_free(mail, true); /* its plan is the issuer's now, or some later mail's `old` */
		} else {
			mail->next = load_relaxed(&gpu->spent);
			while (!compare_swap(&gpu->spent, &mail->next, mail))
				;
		}
		mail = next;
	}
}

static bool is_lost(const struct gpu *gpu)
{
	return load_acquire(&gpu->flight) % 4 == FLIGHT_HELD;
}

static void hold_entries(struct gpu *gpu, const struct valve_entry *entries, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		order_set(entries[i].client, gpu->index, VALVE_ORDER_HOLD, true, false);
}

/* Give the issuer a new plan. While the GPU is stopped it also stops `stop_now` and runs `run_now` before this
 * returns: 0, or what stopping them met. -ETIMEDOUT: the issuer hangs in the driver; it will read its mail when it
 * comes back, and the clients of stop_now hold their launches until then. */
int valve_arm(struct valve_gate *gate, uint32_t index, const struct valve_entry *all, uint32_t count,
              const struct valve_entry *stop_now, uint32_t stop_count, const struct valve_entry *run_now,
              uint32_t run_count)
{
	struct gpu *gpu = &gate->gpu[index];
	struct mail *mail = calloc(1, sizeof *mail);
	uint64_t until = now_ns() + 2 * gate->config.hang_ns;
	int status;

	if (!mail)
		return -ENOMEM;
	mail->plan = plan_new(gpu, all, count);
	mail->stop_now = plan_new(gpu, stop_now, stop_count);
	mail->run_now = plan_new(gpu, run_now, run_count);
	if ((count && !mail->plan) || (stop_count && !mail->stop_now) || (run_count && !mail->run_now)) {
		mail_free(mail, false);
		return -ENOMEM;
	}
	mail->next = load_relaxed(&gpu->mail);
	while (!compare_swap(&gpu->mail, &mail->next, mail)) /* pairs with the swap in read_mail */
		;
	issuer_kick(gpu);
	while (!load_acquire(&mail->done)) {
		if (is_lost(gpu) || now_ns() > until) {
			hold_entries(gpu, stop_now, stop_count);
			return -ETIMEDOUT;
		}
		futex_wait(&mail->done, 0, gate->config.hang_ns / 4 + 1);
	}
	status = mail->status;
	reap(gpu);
	return status;
}

/* Precondition: the issuer has ended. */
void mail_discard(struct gpu *gpu)
{
	struct mail *mail = gpu->mail;

	reap(gpu);
	while (mail) { /* never read */
		struct mail *next = mail->next;

		mail_free(mail, false);
		mail = next;
	}
}
