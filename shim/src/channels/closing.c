/*
 * closing.c - hooks on what ends a descriptor: close, close_range, closefrom, dup2, dup3. A driver's file takes its channels
 * along, and valved is told before, because the number may be in use again at once. Our own three stay: programs that
 * close every number they may have inherited must not take our link with them.
 */
#include "ownfd.h"
#include "report.h"
#include "watched.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>

#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#define RANGE_UNSHARE \
	2 /* CLOSE_RANGE_UNSHARE: in a table of this thread's own; the others go on with the files */
#define RANGE_CLOEXEC 4 /* CLOSE_RANGE_CLOEXEC: closes nothing yet */

VALVE_EXPORT int close(int fd);
VALVE_EXPORT int close_range(unsigned first, unsigned last, int flags);
VALVE_EXPORT void closefrom(int first);
VALVE_EXPORT int dup2(int from, int to);
VALVE_EXPORT int dup3(int from, int to, int flags);

static struct {
	int (*close)(int);
	int (*dup2)(int, int);
	int (*dup3)(int, int, int);
	void (*closefrom)(int);
} real;

#define FIND(name) ((void)(real.name = (__typeof__(real.name))valve_next(#name)))

/* As in capture.c: a call out of dlsym itself goes to the kernel. */
bool valve_closing_find(void)
{
	static uint32_t found;

	if (load_acquire(&found))
		return true;
	if (valve_tls.inside)
		return false;
	valve_tls.inside++;
	FIND(close);
	FIND(dup2);
	FIND(dup3);
	FIND(closefrom);
	valve_tls.inside--;
	store_release(&found, real.close && real.dup2 && real.dup3);
	return load_relaxed(&found);
}

/* The number is about to mean nothing, or another file. Not in the table of a thread that has one of its own (unshare): the
 * others go on with the files. */
static void end_watched(int fd)
{
	enum valve_watched kind = valve_watched(fd);

	if (!kind || !valve_own_table())
		return;
	valve_tls.inside++;
	if (kind == WATCHED_CTL)
		valve_report_closing(fd);
	valve_unwatch(fd);
	valve_tls.inside--;
}

int close(int fd)
{
	if (!valve_closing_find())
		return (int)syscall(SYS_close, fd);
	if (valve_own_has(fd)) {
		errno = EBADF;
		return -1;
	}
	end_watched(fd);
	return real.close(fd);
}

/* ---- many at once ---- */

static void end_watched_range(int first, int last)
{
	for (int fd = first; (fd = valve_watched_from(fd)) >= 0 && fd <= last; fd++)
		end_watched(fd);
}

/* All but ours, in the pieces that lie between them. */
static int close_around(unsigned first, unsigned last, int flags)
{
	while (first <= last) {
		int own = first <= INT_MAX ? valve_own_from((int)first) : -1;

		if (own < 0 || (unsigned)own > last)
			return (int)syscall(SYS_close_range, first, last, flags);
		if ((unsigned)own > first && syscall(SYS_close_range, first, (unsigned)own - 1, flags))
			return -1;
		first = (unsigned)own + 1;
	}
	return 0;
}

int close_range(unsigned first, unsigned last, int flags)
{
	if (first > last || valve_tls.inside)
		return (int)syscall(SYS_close_range, first, last, flags);
	if (!(flags & (RANGE_UNSHARE | RANGE_CLOEXEC)) && first <= INT_MAX)
		end_watched_range((int)first, last < INT_MAX ? (int)last : INT_MAX);
	return close_around(first, last, flags);
}

/* Where the kernel has no close_range, libc walks the numbers and ours go; the session finds that out. */
void closefrom(int first)
{
	first = first < 0 ? 0 : first;
	end_watched_range(first, INT_MAX);
	if (close_around((unsigned)first, UINT_MAX, 0) && valve_closing_find() && real.closefrom)
		real.closefrom(first);
}

/* ---- another file under the number ---- */

/* false: the caller names a descriptor of ours, which it cannot know. */
static bool make_way(int from, int to)
{
	if (!valve_watches() || from == to || syscall(SYS_fcntl, from, F_GETFD) < 0)
		return true; /* no driver, so nothing of ours either; or nothing will change */
	if (valve_own_has(from)) {
		errno = EBADF;
		return false;
	}
	if (valve_own_has(to) && valve_own_table())
		valve_own_make_way(to);
	end_watched(to);
	return true;
}

static int heed(int fd)
{
	if (fd == STDERR_FILENO)
		valve_say_follow();
	return fd;
}

int dup2(int from, int to)
{
	if (!valve_closing_find())
		return (int)syscall(SYS_dup2, from, to);
	return make_way(from, to) ? heed(real.dup2(from, to)) : -1;
}

int dup3(int from, int to, int flags)
{
	if (!valve_closing_find())
		return (int)syscall(SYS_dup3, from, to, flags);
	return make_way(from, to) ? heed(real.dup3(from, to, flags)) : -1;
}
