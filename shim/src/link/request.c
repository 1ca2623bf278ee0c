/*
 * request.c - what a thread says to valved and waits for, and descriptors that valved has to fetch. A reply's slot belongs
 * to the thread that waits; the session fills it.
 */
#include "shim.h"

#include <errno.h>
#include <linux/kcmp.h>
#include <string.h>

#define MARK     35 /* as those of ownfd.c: none that a file has by itself */
#define MARKS    29
#define FETCH_MS 2000

/* valved looks up a number in the table of the process's first thread. Where nothing tells whether it is ours, the marks do. */
static bool may_lend(void)
{
	return (load_relaxed(&valve_shim.daemon_features) & VALVE_FEATURE_FETCH) &&
	       syscall(SYS_kcmp, valve_shim.pid, syscall(SYS_gettid), KCMP_FILES, 0, 0) <= 0;
}

/* Of files that we made ourselves. Those of the application (its nvidiactl, its UVM) are left as they are. */
static uint32_t mark_for(const struct valve_link_header *header)
{
	bool is_ours = header->type == VALVE_LINK_KV_DONE || header->type == VALVE_LINK_KV_HELD;

	return is_ours ? MARK + header->seq % MARKS : 0;
}

/* Precondition: link_lock is held, so an answer never meets a slot that changes hands. */
static struct valve_reply *take_reply(uint32_t seq)
{
	for (size_t i = 0; i < VALVE_REPLIES; i++)
		if (!valve_shim.reply[i].seq) {
			valve_shim.reply[i] = (struct valve_reply){.seq = seq};
			return &valve_shim.reply[i];
		}
	return NULL;
}

/* By a sandbox that began after the link was made. A descriptor that cannot be passed is none of that. */
static bool is_forbidden(int err)
{
	return err == -EPERM || err == -EACCES || err == -ENOSYS;
}

/*
 * What cannot be said is said later (-EAGAIN), or there is no link: valved would take a process that is linked and tells of no
 * channel for one that has none. Descriptors under way are limited, too, and so is the kernel's memory for a packet.
 */
static int unsaid(int err, uint32_t count)
{
	if (err == -ETOOMANYREFS || err == -ENOBUFS || err == -ENOMEM)
		return -EAGAIN;
	if (is_forbidden(err))
		valve_own_hang_up();
	return is_forbidden(err) || (err == -EBADF && !count) ? -ENOTCONN : err;
}

/*
 * Precondition: link_lock is held. Where the kernel passes no descriptor, valved is told its number (link.h). `is_kept`: the
 * caller keeps it open until it has an answer; or it is a file of the application, and valved sees whether it is the right one.
 */
int valve_link_post(int link, void *message, uint32_t bytes, const int *fds, uint32_t count, bool is_kept)
{
	int err = valve_packet_send(link, message, bytes, fds, count);

	if (err == -ETOOMANYREFS && is_kept && may_lend())
		err = valve_packet_lend(link, message, bytes, fds, count, mark_for(message));
	return unsaid(err, count);
}

/* To that valved alone. */
static int send_expecting(void *message, uint32_t bytes, const int *fds, uint32_t count, uint32_t generation,
                          struct valve_reply **reply)
{
	const struct valve_link_header *header = message;
	int link, err;

	valve_lock(&valve_shim.link_lock);
	*reply = take_reply(header->seq);
	link = generation == valve_shim.link_generation ? valve_own(VALVE_OWN_LINK) : -1;
	if (!*reply)
		err = -EAGAIN; /* as many threads wait as can: the same as a full socket */
	else
		err = link < 0 ? -ENOTCONN : valve_link_post(link, message, bytes, fds, count, true);
	if (err && *reply)
		(*reply)->seq = 0;
	valve_unlock(&valve_shim.link_lock);
	return err;
}

/* Until the answer is there, or timeout_ms have passed in which `progress` stood still. */
static void await(const struct valve_reply *reply, uint64_t deadline_ns, const uint32_t *progress,
                  int timeout_ms)
{
	uint32_t seen = progress ? load_relaxed(progress) : 0;

	while (!load_acquire(&reply->done) && valve_milliseconds_left(deadline_ns)) {
		futex_wait(&reply->done, 0, (uint64_t)valve_milliseconds_left(deadline_ns) * 1000000u);
		if (progress && load_relaxed(progress) != seen) {
			seen = load_relaxed(progress);
			deadline_ns = now_ns() + (uint64_t)timeout_ms * 1000000u;
		}
	}
}

/* What valved said, once it has. The slot is free then. */
static int answer_of(struct valve_reply *reply)
{
	int err;

	valve_lock(&valve_shim.link_lock);
	if (!reply->done)
		err = -ETIMEDOUT;
	else
		err = reply->done == 1 ? -(int)reply->status : -EPIPE;
	reply->seq = 0;
	valve_unlock(&valve_shim.link_lock);
	return err;
}

int valve_link_request(void *message, uint32_t bytes, uint16_t type, int fd, int timeout_ms)
{
	return valve_link_request_fds(message, bytes, type, &fd, fd >= 0, timeout_ms, NULL);
}

/* Sends and waits for the ACK. Returns its status (an errno value, negated), or why there was none. -EBUSY: it was never sent. */
int valve_link_request_fds(void *message, uint32_t bytes, uint16_t type, const int *fds, uint32_t count,
                           int timeout_ms, const uint32_t *progress)
{
	uint64_t deadline_ns = now_ns() + (uint64_t)timeout_ms * 1000000u;
	struct valve_reply *reply;
	int err;

	do {
		valve_link_head(message, bytes, type);
		while ((err = send_expecting(message, bytes, fds, count,
		                             load_acquire(&valve_shim.link_generation), &reply)) == -EAGAIN) {
			if (valve_milliseconds_left(deadline_ns) == 0)
				return -EBUSY; /* -EAGAIN would be valved's own answer (KV_STEP) */
			sleep_ns(1000000);     /* a full socket: valved is slow, and offline may wait */
		}
		if (err)
			return err;
		await(reply, deadline_ns, progress, timeout_ms);
		err = answer_of(reply);
	} while (count && err == -(int)VALVE_LINK_UNFETCHED); /* no number is said again */
	return err;
}

/* Only by number, where nothing else is answered. Once this returns valved has the files, or the link is over. -EAGAIN: it may
 * not be said in this way, or not now. */
int valve_link_lend(void *message, uint32_t bytes, uint16_t type, const int *fds, uint32_t count,
                    uint32_t generation)
{
	struct valve_reply *reply;
	int err = -EAGAIN, link;

	valve_link_head(message, bytes, type);
	valve_lock(&valve_shim.link_lock);
	link = generation == valve_shim.link_generation ? valve_own(VALVE_OWN_LINK) : -1;
	reply = may_lend() ? take_reply(((struct valve_link_header *)message)->seq) : NULL;
	if (link < 0)
		err = -ENOTCONN;
	else if (reply)
		err = unsaid(valve_packet_lend(link, message, bytes, fds, count, mark_for(message)), count);
	if (err && reply)
		reply->seq = 0;
	valve_unlock(&valve_shim.link_lock);
	if (err)
		return err;
	await(reply, now_ns() + FETCH_MS * 1000000ull, NULL, FETCH_MS);
	err = answer_of(reply);
	if (err == -ETIMEDOUT)
		valve_own_hang_up();
	return err == -(int)VALVE_LINK_UNFETCHED ? -EAGAIN : err;
}

/* seq 0: all threads that wait. */
void valve_link_answer(uint32_t seq, uint32_t done, uint32_t status)
{
	valve_lock(&valve_shim.link_lock);
	for (size_t i = 0; i < VALVE_REPLIES; i++) {
		struct valve_reply *reply = &valve_shim.reply[i];

		if (!reply->seq || (seq && reply->seq != seq))
			continue;
		reply->status = status;
		store_release(&reply->done, done);
		futex_wake(&reply->done, 1);
	}
	valve_unlock(&valve_shim.link_lock);
}
