/*
 * alone.c - hooks on unshare and setns. Some namespaces take only a process of one thread. One that has asked NVML something and
 * has no channel would have one thread but for our session's: that ends for the call, and begins again after it. The link stays.
 */
#include "ownfd.h"
#include "shim.h"

#include <errno.h>

#define LOOK_NS 1000000u
#define LOOKS   2000 /* so long for what the session has in hand */

enum { STAYS, ASKED, LEAVES };

VALVE_EXPORT int unshare(int flags);
VALVE_EXPORT int setns(int fd, int kind);

bool valve_session_leaves(void)
{
	uint32_t asked = ASKED;

	return load_acquire(&valve_shim.leaving) && swap_if(&valve_shim.leaving, &asked, LEAVES);
}

/* The kernel knows no such thread any more. */
static bool has_left(void)
{
	uint32_t session = load_acquire(&valve_shim.session);

	return session && syscall(SYS_tgkill, valve_shim.pid, session, 0) && errno == ESRCH;
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
		if (has_left())
			return true;
		asked = ASKED;
		sleep_ns(LOOK_NS);
	}
	return false;
}

/* In a new namespace of processes there are no threads any more: the next open of the driver tries again. */
static void call_back(void)
{
	store_relaxed(&valve_shim.session, 0);
	store_release(&valve_shim.leaving, STAYS);
	if (!valve_spawn(valve_keep))
		return;
	valve_link_drop();
	valve_map_private(0, VALVE_ORDER_RUN);
	store_relaxed(&valve_shim.role, VALVE_ROLE_NONE);
	store_release(&valve_shim.state, VALVE_STATE_NEW);
}

static int call(const char *name, long number, int first, int second)
{
	int (*next)(int, int) = (int (*)(int, int))valve_next(name);

	return next ? next(first, second) : (int)syscall(number, first, second);
}

static int alone(const char *name, long number, int first, int second)
{
	int result = call(name, number, first, second);
	int err = errno;

	if (result && (err == EINVAL || err == EUSERS) && send_away()) {
		result = call(name, number, first, second);
		err = errno;
		call_back();
	}
	errno = err;
	return result;
}

int unshare(int flags)
{
	return alone("unshare", SYS_unshare, flags, 0);
}

int setns(int fd, int kind)
{
	return alone("setns", SYS_setns, fd, kind);
}
