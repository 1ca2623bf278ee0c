/*
 * alone.c - hooks on unshare and setns. Some namespaces take only a process of one thread. One that has asked NVML something and
 * has no channel would have one thread but for our session's: that ends for the call, and begins again after it. The link stays.
 *
 * A program may change its root (chroot). The session's thread keeps the one that it began with: the next valved is found there.
 * So whoever makes this thread waits until it has a root of its own.
 */
#include "ownfd.h"
#include "shim.h"

#include <errno.h>
#include <sched.h>

#define LOOK_NS 1000000u
#define LOOKS   2000 /* so long for what the session has in hand */

#define BEGIN_NS 1000000000u /* only a sandbox or a debugger that keeps the thread from running comes near */

enum { STAYS, ASKED, LEAVES };

static uint32_t newcomer; /* the session's thread, from its first step on */

VALVE_EXPORT int unshare(int flags);
VALVE_EXPORT int setns(int fd, int kind);

void valve_alone_begin(void)
{
	uint32_t self = (uint32_t)syscall(SYS_gettid);

	store_release(&newcomer, self);
	(void)!syscall(SYS_unshare, CLONE_FS); /* a sandbox may kill it here */
	store_release(&valve_shim.session, self);
	futex_wake(&valve_shim.session, 1);
}

/* The kernel knows no such thread any more. */
static bool has_ended(uint32_t thread)
{
	return thread && syscall(SYS_tgkill, valve_shim.pid, thread, 0) && errno == ESRCH;
}

/* Precondition: no lock of ours is held. The thread needs none before it has begun, and nothing of the application. One that
 * ended before would never read the link: -ESRCH. */
int valve_alone_spawn(void)
{
	uint64_t now = now_ns(), end_ns = now + BEGIN_NS;
	int err;

	store_relaxed(&newcomer, 0);
	store_relaxed(&valve_shim.session, 0);
	err = valve_spawn(valve_keep, VALVE_STACK_LEAST);
	for (; !err && now < end_ns && !load_acquire(&valve_shim.session); now = now_ns()) {
		futex_wait(&valve_shim.session, 0, LOOK_NS);
		if (has_ended(load_acquire(&newcomer)) && !load_acquire(&valve_shim.session))
			err = -ESRCH;
	}
	return err;
}

bool valve_session_leaves(void)
{
	uint32_t asked = ASKED;

	return load_acquire(&valve_shim.leaving) && swap_if(&valve_shim.leaving, &asked, LEAVES);
}

/* False: it was never here, must not go, is held up, or another thread has asked: then this process has more than one. */
static bool send_away(void)
{
	uint32_t state = load_acquire(&valve_shim.state), stays = STAYS, asked = ASKED;
	const uint64_t one = 1;

	if ((state != VALVE_STATE_UNLINKED && state != VALVE_STATE_LINKED) || valve_tls.inside ||
	    valve_shim.pid != (uint32_t)syscall(SYS_getpid) || load_relaxed(&valve_shim.watcher_runs) ||
	    valve_capture_has_channels() || !swap_if(&valve_shim.leaving, &stays, ASKED))
		return false;
	futex_wake(&valve_shim.leaving, 1);
	(void)!syscall(SYS_write, valve_own(VALVE_OWN_ORDER), &one, sizeof(one));
	for (int looks = 0; looks < LOOKS || !swap_if(&valve_shim.leaving, &asked, STAYS); looks++) {
		if (has_ended(load_acquire(&valve_shim.session)))
			return true;
		asked = ASKED;
		sleep_ns(LOOK_NS);
	}
	return false;
}

/* There is no thread to be had: the next open of the driver tries again. */
void valve_alone_give_up(void)
{
	valve_link_drop();
	valve_capture_forget_reports(); /* what another thread has told meanwhile */
	valve_map_private(0, VALVE_ORDER_RUN);
	if (exchange_full(&valve_shim.self_stopped,
	                  0)) /* for want of room: nobody would ask again, nor end it */
		valve_self_gate(false, VALVE_GATE_HELD);
	store_relaxed(&valve_shim.role, VALVE_ROLE_NONE);
	store_release(&valve_shim.state, VALVE_STATE_NEW);
}

/* In a new namespace of processes there are no threads any more. */
static void call_back(void)
{
	store_release(&valve_shim.leaving, STAYS);
	if (valve_alone_spawn())
		valve_alone_give_up();
}

static struct {
	int (*unshare)(int);
	int (*setns)(int, int);
} real;

void valve_alone_find(void)
{
	real.unshare = (int (*)(int))valve_next("unshare");
	real.setns = (int (*)(int, int))valve_next("setns");
}

static int call(long number, int first, int second)
{
	if (number == SYS_unshare && real.unshare)
		return real.unshare(first);
	if (number == SYS_setns && real.setns)
		return real.setns(first, second);
	return (int)syscall(number, first, second);
}

static int alone(long number, int first, int second)
{
	int result = call(number, first, second);
	int err = errno;

	if (result && (err == EINVAL || err == EUSERS) && send_away()) {
		result = call(number, first, second);
		err = errno;
		call_back();
	}
	errno = err;
	return result;
}

int unshare(int flags)
{
	return alone(SYS_unshare, flags, 0);
}

int setns(int fd, int kind)
{
	return alone(SYS_setns, fd, kind);
}
