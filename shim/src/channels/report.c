/*
 * report.c - keeps the object map up to date, and tells valved of its changes. The order: ioctl hook, map, CHANNEL_ADD,
 * then valved prepares its disable list.
 *
 * An online process sends the message and goes on. An offline process waits for the ACK before its channels may run,
 * at most ANSWER_MS each. Without a valved it goes on unharvested.
 */
#include "report.h"
#include "ownfd.h"

#include <errno.h>
#include <string.h>

#define ANSWER_MS     2000
#define HOLD_SLICE_MS 10000 /* then asked again; a dead link ends the wait at once */
#define HOLD_RETRY_NS 50000000u
#define AGAIN_NS      5000000u
#define HOLD_DEAD_NS \
	10000000000u /* how long a schedule call waits for a valved that died while it was held */

/* An offline process's map counts only while its layouts are known. */
static bool captures(void)
{
	return rm_is_known_branch(&valve_rm);
}

/* ---- what valved does not know yet: one message per call, chosen under the lock, sent outside ---- */

enum report_kind { REPORT_NONE, REPORT_CLIENT, REPORT_CHANNEL, REPORT_NOTE };

struct report {
	enum report_kind kind;
	uint32_t h_client, handle;
	int fd;
	union {
		struct valve_link_note note;
		struct valve_link_rm_client client;
		struct valve_link_channel channel;
	} body;
};

static void describe_client(struct rm_object *device, struct report *out)
{
	const struct rm_object *subdevice = rm_subdevice_of(&valve_rm, device);
	const struct rm_object *client = rm_find(&valve_rm, device->h_client, device->h_client);

	out->kind = REPORT_CLIENT;
	out->fd = client ? client->fd : -1; /* shows that it is ours: no number counts without its file */
	out->body.client = (struct valve_link_rm_client){.device_instance = device->instance,
	                                                 .h_client = device->h_client,
	                                                 .h_device = device->handle,
	                                                 .h_subdevice = subdevice ? subdevice->handle : 0,
	                                                 .has_fd = out->fd >= 0};
	memcpy(out->body.client.gpu_uuid, device->uuid, sizeof(device->uuid));
}

static void describe_channel(const struct rm_object *channel, struct report *out)
{
	const struct rm_object *device = rm_device_of(&valve_rm, channel);

	out->kind = REPORT_CHANNEL;
	out->body.channel = (struct valve_link_channel){.device_instance = device ? device->instance : 0,
	                                                .h_client = channel->h_client,
	                                                .h_channel = channel->handle,
	                                                .cid = channel->cid,
	                                                .h_tsg = rm_group_of(&valve_rm, channel),
	                                                .engine = rm_engine_of(&valve_rm, channel),
	                                                .compute = rm_is_compute(&valve_rm, channel)};
	if (device)
		memcpy(out->body.channel.gpu_uuid, device->uuid, sizeof(device->uuid));
}

/* Marks it as reported when it is chosen, so two threads never send the same. A later change makes it due again. */
static bool choose(struct rm_object *object, struct report *out)
{
	struct rm_object *device;

	if (object->kind == RM_DEVICE && object->wants_fd && !object->reported) {
		object->reported = 1;
		describe_client(object, out);
	} else if (object->kind != RM_CHANNEL) {
		return false;
	} else if (object->due && !object->reported && !object->unregistered) {
		device = rm_device_of(&valve_rm, object);
		if (device && !device->reported) {
			device->reported = 1;
			describe_client(device, out);
			object = device;
		} else {
			object->reported = 1;
			describe_channel(object, out);
		}
	} else if (object->note_due) {
		object->note_due = 0;
		out->kind = REPORT_NOTE;
		out->body.note = (struct valve_link_note){
		        .code = object->app_disabled ? VALVE_NOTE_APP_DISABLED : VALVE_NOTE_APP_ENABLED,
		        .h_client = object->h_client,
		        .h_channel = object->handle};
	} else {
		return false;
	}
	out->h_client = object->h_client;
	out->handle = object->handle;
	return true;
}

static bool next_report(struct report *out)
{
	bool found = false;

	*out = (struct report){.kind = REPORT_NONE, .fd = -1};
	valve_lock(&valve_shim.capture_lock);
	for (uint32_t i = 0; !found && i < valve_rm.used; i++)
		found = !valve_rm.objects[i].dying && choose(&valve_rm.objects[i], out);
	valve_unlock(&valve_shim.capture_lock);
	return found;
}

/* Only what was not sent. If an answer is late or refuses, the same is not sent again. */
static bool was_not_sent(int err)
{
	return err == -EAGAIN || err == -ENOTCONN || err == -EPIPE || err == -EBUSY;
}

static void take_back(const struct report *report)
{
	struct rm_object *object;

	valve_lock(&valve_shim.capture_lock);
	object = rm_find(&valve_rm, report->h_client, report->handle);
	if (object && report->kind == REPORT_NOTE)
		object->note_due = 1;
	else if (object)
		object->reported = 0;
	valve_unlock(&valve_shim.capture_lock);
}

/* What valved answered, if the caller waited for it. Otherwise the answer is read when it comes. */
static void remember_told(const struct report *report, bool is_taken)
{
	struct rm_object *object;

	valve_lock(&valve_shim.capture_lock);
	object = rm_find(&valve_rm, report->h_client, report->handle);
	if (object && object->kind == RM_CHANNEL) {
		object->told = report->body.channel.header.seq;
		object->taken = is_taken;
	}
	valve_unlock(&valve_shim.capture_lock);
}

static void hear_told(uint32_t seq, uint32_t status)
{
	valve_lock(&valve_shim.capture_lock);
	for (uint32_t i = 0; i < valve_rm.used; i++)
		if (valve_rm.objects[i].kind == RM_CHANNEL && valve_rm.objects[i].told == seq)
			valve_rm.objects[i].taken = status == 0;
	valve_unlock(&valve_shim.capture_lock);
}

static int send_report(struct report *report, bool wait)
{
	if (report->kind == REPORT_NOTE)
		return valve_link_send(&report->body.note, sizeof(report->body.note), VALVE_LINK_NOTE, -1);
	if (report->kind == REPORT_CLIENT) /* never waited for */
		return valve_link_send(&report->body.client, sizeof(report->body.client),
		                       VALVE_LINK_RM_CLIENT, report->fd);
	if (!wait)
		return valve_link_send(&report->body.channel, sizeof(report->body.channel),
		                       VALVE_LINK_CHANNEL_ADD, -1);
	return valve_link_request(&report->body.channel, sizeof(report->body.channel), VALVE_LINK_CHANNEL_ADD,
	                          -1, ANSWER_MS);
}

/* The socket is full, or is none of this thread's (unshare). The session goes on when there is room. Its own bell wakes it; where
 * that is none of this thread's either, it looks by itself. Where there was room for it, what lacks is a descriptor under way:
 * other processes of this user have too many of them (ETOOMANYREFS), and nothing says when there are fewer. */
static void leave_to_session(void)
{
	const uint64_t one = 1;

	if ((uint32_t)syscall(SYS_gettid) == load_relaxed(&valve_shim.session))
		sleep_ns(AGAIN_NS);
	if (!exchange_full(&valve_shim.untold, 1))
		(void)!syscall(SYS_write, valve_own(VALVE_OWN_ORDER), &one, sizeof(one));
}

/* False: the session is to tell the rest. */
static bool tell_all(bool wait)
{
	struct report report;

	while (valve_is_linked() && captures() && next_report(&report)) {
		int err = send_report(&report, wait);

		if (was_not_sent(err)) {
			take_back(&report);
			return false;
		}
		if (report.kind == REPORT_CHANNEL)
			remember_told(&report, wait && !err);
	}
	return true;
}

bool valve_capture_is_told(void)
{
	return !load_full(&valve_shim.telling) && !load_relaxed(&valve_shim.untold);
}

void valve_capture_report(bool wait)
{
	add_full(&valve_shim.telling, 1);
	store_relaxed(&valve_shim.untold, 0);
	if (valve_rm.is_mps) /* before its channels: they are never gated */
		valve_note(VALVE_NOTE_MPS, 0, 0, "an MPS object was allocated");
	if (!valve_ends_are_told() || !tell_all(wait))
		leave_to_session();
	add_full(&valve_shim.telling, -1u);
	if (valve_rm.incomplete)
		valve_note(VALVE_NOTE_INCOMPLETE_MAP, 0, 0, "a driver call could not be decoded");
	if (load_relaxed(&valve_shim.self_stopped))
		valve_self_gate_join();
}

void valve_capture_forget_reports(void)
{
	valve_lock(&valve_shim.capture_lock);
	for (uint32_t i = 0; i < valve_rm.used; i++) {
		struct rm_object *object = &valve_rm.objects[i];

		object->reported = object->taken = object->wants_fd = 0;
		object->note_due = object->app_disabled;
	}
	valve_ends_forget(); /* this valved has never heard of them */
	valve_unlock(&valve_shim.capture_lock);
}

/*
 * valved found that it cannot switch a channel of ours from its own RM client. What refused it (firmware policy) holds for
 * every client of this process, so all get their nvidiactl fd passed, whichever message was being answered. Again, where
 * it could not fetch one of them.
 */
static void want_fd(bool again)
{
	bool wanted = false;

	valve_lock(&valve_shim.capture_lock);
	for (uint32_t i = 0; i < valve_rm.used; i++) {
		struct rm_object *device = &valve_rm.objects[i];

		if (device->kind != RM_DEVICE || (device->wants_fd && !again))
			continue;
		device->wants_fd = 1;
		device->reported = 0;
		wanted = true;
	}
	valve_unlock(&valve_shim.capture_lock);
	if (wanted)
		valve_capture_report(false);
}

/* Precondition: link.c found it sane. */
int valve_capture_ack(const struct valve_link_header *packet, int length, struct valve_fds *fds)
{
	const struct valve_link_ack *ack = (const void *)packet;

	(void)length;
	(void)fds;
	hear_told(packet->seq, ack->status);
	if (ack->want_fd || ack->status == VALVE_LINK_UNFETCHED)
		want_fd(!ack->want_fd);
	return 0;
}

bool valve_capture_has_channels(void)
{
	bool found = false;

	valve_lock(&valve_shim.capture_lock);
	for (uint32_t i = 0; !found && i < valve_rm.used; i++)
		found = valve_rm.objects[i].kind == RM_CHANNEL;
	valve_unlock(&valve_shim.capture_lock);
	return found;
}

/* ---- ends ---- */

void valve_report_closing(int fd)
{
	uint32_t free_number;

	valve_lock(&valve_shim.capture_lock);
	free_number = rm_closing(&valve_rm, fd);
	valve_ends_tell(free_number);
	rm_bury(&valve_rm, free_number);
	valve_unlock(&valve_shim.capture_lock);
	if (!valve_ends_are_told())
		leave_to_session();
}

/* ---- the ioctl hook's two halves ---- */

/* Waits until valved lets it run. If valved dies meanwhile, it waits only while online work shares the GPU. */
static void wait_for_gate(const struct rm_call *call)
{
	uint64_t dead_since = 0;

	for (;;) {
		struct valve_link_schedule message = {.h_client = call->h_client, .h_object = call->h_object};
		int err = valve_is_linked() ? valve_link_request(&message, sizeof(message),
		                                                 VALVE_LINK_SCHEDULE_WAIT, -1, HOLD_SLICE_MS)
		                            : -ENOTCONN;

		if (err == -ETIMEDOUT || err == -EBUSY || err == -EAGAIN)
			continue; /* the gate is closed: ask again, the answer may have been lost */
		if (err != -EPIPE && err != -ENOTCONN)
			return; /* let through, or refused by a valved that does not know us: not ours to hold then */
		if (!load_relaxed(&VALVE_CONTROL->online_registered) ||
		    load_relaxed(&VALVE_CONTROL->draining) ||
		    load_relaxed(&valve_shim.state) == VALVE_STATE_OFF)
			return;
		if (!dead_since)
			dead_since = now_ns();
		if (now_ns() - dead_since > HOLD_DEAD_NS)
			return;
		sleep_ns(HOLD_RETRY_NS);
	}
}

void valve_report_before(uint32_t request, const void *argument, struct rm_call *call)
{
	int saved_errno = errno;

	valve_lock(&valve_shim.capture_lock);
	rm_before(&valve_rm, request, argument, call);
	valve_ends_tell(call->free_number);
	valve_unlock(&valve_shim.capture_lock);
	if (call->is_enable && captures()) {
		valve_capture_report(valve_is_offline());
		if (valve_is_offline() && valve_is_linked())
			wait_for_gate(call);
	}
	errno = saved_errno;
}

static int send_done(uint32_t h_client, uint32_t h_object)
{
	struct valve_link_schedule message = {.h_client = h_client, .h_object = h_object};

	if (!(valve_shim.daemon_features & VALVE_FEATURE_SCHEDULE_DONE))
		return 0;
	return valve_link_send(&message, sizeof(message), VALVE_LINK_SCHEDULE_DONE, -1);
}

void valve_report_after(int fd, const struct rm_call *call, bool ok)
{
	int saved_errno = errno;

	if (!call->nr)
		return;
	valve_lock(&valve_shim.capture_lock);
	rm_after(&valve_rm, fd, call, ok);
	valve_unlock(&valve_shim.capture_lock);
	if (call->is_enable && valve_is_offline() && valve_is_linked())
		send_done(call->h_client, call->h_object);
	if (load_acquire(&valve_shim.state) != VALVE_STATE_NEW)
		valve_capture_report(valve_is_offline());
	errno = saved_errno;
}

int valve_capture_tell_ran(void)
{
	int err = 0;

	valve_lock(&valve_shim.capture_lock);
	for (uint32_t i = 0; !err && i < valve_rm.used; i++)
		if (valve_rm.objects[i].kind == RM_CLIENT)
			err = send_done(valve_rm.objects[i].h_client, valve_rm.objects[i].h_client);
	valve_unlock(&valve_shim.capture_lock);
	return err;
}

void valve_report_uvm(uint32_t request, const void *argument)
{
	int saved_errno = errno;

	if (request != UVM_REGISTER_CHANNEL && request != UVM_UNREGISTER_CHANNEL)
		return;
	valve_lock(&valve_shim.capture_lock);
	rm_after_uvm(&valve_rm, request, argument);
	valve_unlock(&valve_shim.capture_lock);
	valve_capture_report(valve_is_offline());
	errno = saved_errno;
}
