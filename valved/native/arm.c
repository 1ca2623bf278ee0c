/*
 * arm.c - what the caller asks of an issuer: is this channel known, can it be switched, here is your new plan. All of
 * it by mail, and every wait has an end, because the driver may hang. Caller thread only.
 */
#include "internal.h"

#include <stdlib.h>

#define PATIENCE 5u

/* A mail may be read long after its sender has given it up: whatever it names it keeps. */
static struct mail *mail_new(const struct mail *words)
{
	struct mail *mail = calloc(1, sizeof *mail);

	if (!mail)
		return NULL;
	*mail = *words;
	if (mail->client)
		mail->client->refs++;
	return mail;
}

/* Once, as its sender may keep no place for more. Precondition: it was carried out. */
static void tell_was(struct mail *mail)
{
	if (mail->was)
		*mail->was = mail->was_off ? VALVE_WAS_OFF : VALVE_WAS_ON;
	mail->was = NULL;
}

static void mail_free(struct mail *mail, bool with_plan)
{
	if (mail->client) {
		mail->client->refs--;
		client_reap(mail->client);
	}
	plan_free(mail->old);
	plan_free(mail->stop_now);
	plan_free(mail->run_now);
	if (with_plan)
		plan_free(mail->plan);
	free(mail);
}

/* Hand it back: the caller frees it. */
void mail_spend(struct gpu *gpu, struct mail *mail)
{
	mail->next = load_relaxed(&gpu->spent); /* the swap below decides */
	while (!compare_swap(&gpu->spent, &mail->next, mail))
		;
}

/* Free the mails that the issuer has handed back. One that is not marked done yet is put back for the next time. */
void mail_reap(struct gpu *gpu)
{
	struct mail *mail = swap(&gpu->spent, NULL);

	while (mail) {
		struct mail *next = mail->next;

		if (load_acquire(&mail->done) == 1) {
			tell_was(mail);
			mail_free(mail, false); /* its plan is the issuer's now, or some later mail's `old` */
		} else {
			mail_spend(gpu, mail);
		}
		mail = next;
	}
}

/* Given up by the watchdog, or long gone though nobody waits for a stop: others may keep the driver's locks for a while. */
bool is_stuck(const struct gpu *gpu)
{
	uint64_t limit_ns = load_relaxed(&gpu->flight_ns) + PATIENCE * gpu->gate->config.hang_ns;
	uint32_t state = load_acquire(&gpu->flight) % 4;

	return state > FLIGHT_OUT || (state == FLIGHT_OUT && now_ns() > limit_ns);
}

/* Send, and wait until it is carried out. False: the issuer is stuck in the driver, and the mail is now its own. */
static bool send(struct gpu *gpu, struct mail *mail)
{
	mail->next = load_relaxed(&gpu->mail);
	while (!compare_swap(&gpu->mail, &mail->next, mail)) /* pairs with the swap in read_mail */
		;
	issuer_kick(gpu);
	while (!load_acquire(&mail->done)) {
		uint32_t sent = 0;

		if (is_stuck(gpu) && compare_swap(&mail->done, &sent, ABANDONED))
			return false;
		futex_wait(&mail->done, 0, gpu->gate->config.hang_ns / 4 + 1);
	}
	return true;
}

/* The callers of these ask again. To an issuer that hangs they are not sent: as many would lie there as processes think of. */
static bool can_be_lost(enum mail_kind kind)
{
	return kind == MAIL_OFF || kind == MAIL_CID || kind == MAIL_ENABLE_UNLESS_HELD || kind == MAIL_SLICE;
}

/* Its status, -ETIMEDOUT, or -EBUSY: it was not sent. */
static int ask(struct gpu *gpu, const struct mail *question, uint32_t *cid)
{
	struct mail *mail = mail_new(question);
	int status;

	if (!mail) {
		plan_free(question->stop_now);
		plan_free(question->run_now);
		return -ENOMEM;
	}
	if (can_be_lost(mail->kind) && is_stuck(gpu)) {
		mail_free(mail, false);
		return -EBUSY;
	}
	if (!send(gpu, mail))
		return -ETIMEDOUT;
	status = mail->status;
	if (cid)
		*cid = mail->cid;
	mail_reap(gpu);
	return status;
}

int valve_gpu_cid(struct valve_gate *gate, uint32_t gpu, uint32_t h_client, uint32_t h_channel, uint32_t *cid)
{
	struct mail mail = {.kind = MAIL_CID, .h_client = h_client, .h_channel = h_channel};

	if (gate->gpu[gpu].info.status)
		return gate->gpu[gpu].info.status;
	return gate->branch->has_unique_id ? ask(&gate->gpu[gpu], &mail, cid) : -EOPNOTSUPP;
}

int valve_gpu_enable(struct valve_gate *gate, uint32_t gpu, const struct valve_entry *entry,
                     uint32_t unless_held)
{
	struct mail mail = {.kind = unless_held ? MAIL_ENABLE_UNLESS_HELD : MAIL_ENABLE};

	if (entry->reach == VALVE_REACH_OWN && gate->gpu[gpu].info.status)
		return gate->gpu[gpu].info.status;
	mail.run_now = plan_new(&gate->gpu[gpu], entry, 1);
	return mail.run_now ? ask(&gate->gpu[gpu], &mail, NULL) : -ENOMEM;
}

int valve_gpu_slice(struct valve_gate *gate, uint32_t gpu, struct valve_client *client, int fd,
                    uint32_t h_client, uint32_t h_tsg, uint32_t us)
{
	struct mail mail = {.kind = MAIL_SLICE,
	                    .h_client = h_client,
	                    .h_channel = h_tsg,
	                    .slice_us = us,
	                    .fd = fd,
	                    .client = client};

	if (!client_has_passed(client, fd))
		return -EBADF;
	return gate->gpu[gpu].info.status ? gate->gpu[gpu].info.status : ask(&gate->gpu[gpu], &mail, NULL);
}

/* Taking the order back takes back no stop that its GPU has come to need meanwhile. */
static int try_order(struct valve_gate *gate, struct valve_client *client)
{
	uint32_t seq = order_set(client, ORDER_NO_GPU, VALVE_ORDER_STOP, true, true);
	int stopped = order_wait(client, seq, now_ns() + gate->config.order_ns), run;

	seq = order_set(client, ORDER_NO_GPU, VALVE_ORDER_STOP, false, false);
	run = order_wait(client, seq, now_ns() + gate->config.order_ns);
	return stopped ? stopped : run;
}

static int try_switch(struct gpu *gpu, const struct valve_entry *entry, enum mail_kind kind)
{
	struct mail mail = {.kind = kind, .stop_now = plan_new(gpu, entry, 1)};

	return mail.stop_now ? ask(gpu, &mail, NULL) : -ENOMEM;
}

/* Self-test: off and on again, while the channel is not yet scheduled and its GPU not held. What it cannot find is a
 * driver that says yes and does nothing: only a later look at the GPU's progress can. */
int valve_gpu_try(struct valve_gate *gate, uint32_t index, const struct valve_entry *entry)
{
	struct gpu *gpu = &gate->gpu[index];
	int off, on;

	if (entry->reach == VALVE_REACH_HOLD)
		return 0;
	if (entry->reach == VALVE_REACH_SELF)
		return try_order(gate, entry->client);
	if (entry->reach == VALVE_REACH_OWN && gpu->info.status)
		return gpu->info.status;
	off = try_switch(gpu, entry, MAIL_OFF);
	if (off == -EBUSY)
		return -ETIMEDOUT; /* nothing was switched */
	on = try_switch(gpu, entry, MAIL_ON);
	/* The rung works if it could switch off. What is off now is switched on with the plan that comes next, again and again:
	 * no channel of an application may stay off because a test met a refusal. */
	return off || rm_is_stale(on) || on == -ETIMEDOUT ? (off ? off : on) : 0;
}

/* Something is off there that may run, or is held: unless the GPU is stopped, all of its plan is run once more. */
void valve_gpu_run_again(struct valve_gate *gate, uint32_t gpu)
{
	store_release(&gate->gpu[gpu].owes_release, 1); /* after the orders; issuer_serve swaps it */
	issuer_kick(&gate->gpu[gpu]);
}

/* What came into its plan while it was stopped may run. If it still is, its plan is stopped again and again until that is well. */
void valve_gpu_stop_again(struct valve_gate *gate, uint32_t gpu)
{
	store_release(&gate->gpu[gpu].owes_stop, 1);
	issuer_kick(&gate->gpu[gpu]);
}

static void hold_entries(struct gpu *gpu, const struct valve_entry *entries, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		order_set(entries[i].client, gpu->index, VALVE_ORDER_HOLD, true, false);
	valve_gpu_run_again(gpu->gate, gpu->index);
}

/* Give the issuer a new plan. While the GPU is stopped it also stops `stop_now` and runs `run_now` before this
 * returns: 0, or what stopping them met. -ETIMEDOUT: the issuer hangs in the driver; it will read its mail when it
 * comes back, and the clients of stop_now hold their launches until the next wake, if the GPU is held. *was_off: valve_was,
 * whether what leaves may be off; not known while the issuer hangs, and written in a later valve_arm or valve_gate_alive. */
int valve_arm(struct valve_gate *gate, uint32_t index, const struct valve_entry *all, uint32_t count,
              const struct valve_entry *stop_now, uint32_t stop_count, const struct valve_entry *run_now,
              uint32_t run_count, uint32_t *was_off)
{
	struct gpu *gpu = &gate->gpu[index];
	struct mail *mail = mail_new(&(struct mail){.kind = MAIL_PLAN});
	int status;

	if (!mail)
		return -ENOMEM;
	mail->was = was_off;
	mail->plan = plan_new(gpu, all, count);
	mail->stop_now = plan_new(gpu, stop_now, stop_count);
	mail->run_now = plan_new(gpu, run_now, run_count);
	if ((count && !mail->plan) || (stop_count && !mail->stop_now) || (run_count && !mail->run_now)) {
		mail_free(mail, true);
		return -ENOMEM;
	}
	if (mail->stop_now) /* a GPU is not called stopped before they are off */
		add_fetch(&gpu->unproven, 1);
	if (!send(gpu, mail)) {
		if (valve_gpu_gated(gate, index))
			hold_entries(gpu, stop_now, stop_count);
		if (was_off)
			*was_off = VALVE_WAS_UNKNOWN;
		return -ETIMEDOUT;
	}
	status = mail->status;
	tell_was(mail);
	mail_reap(gpu);
	return status;
}

/* Precondition: the issuer has ended. */
void mail_discard(struct gpu *gpu)
{
	struct mail *mail = gpu->mail;

	while (gpu->late) { /* refused to the end */
		struct mail *next = gpu->late->next;

		mail_free(gpu->late, false);
		gpu->late = next;
	}
	mail_reap(gpu);
	while (mail) { /* never read */
		struct mail *next = mail->next;

		mail_free(mail, true);
		mail = next;
	}
}
