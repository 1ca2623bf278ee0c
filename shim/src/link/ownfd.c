/*
 * ownfd.c - link, doorbell and order bell are descriptors in a table that is the application's: servers close every number
 * they do not know, and open their own files under it. So ours lie high, the hooks of closing.c spare them, and no code
 * uses a number without asking whether it still is our file. One that is not is forgotten, never closed.
 *
 * All eventfds share one inode. What tells ours from others is a mark on the open file: the signal that it would send
 * if it were asked to send one. No program asks. Each has another mark than those before it: a thread that left our table
 * (unshare) keeps the file of a valved that is gone under that number.
 */
#include "ownfd.h"

#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/kcmp.h>
#include <sys/socket.h>
#include <sys/stat.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif
#define PIDFD_THREAD O_EXCL

#define HIGH      900 /* below 1024: within the usual limit, and within an fd_set */
#define MARK      35  /* real-time signals, from here on */
#define MARKS     29
#define PUT_TRIES 100 /* as many yields as another thread has to end its open() under that number */

static int number_of(const struct valve_own_fd *own)
{
	return (int)load_acquire(&own->number) - 1;
}

/* libc asks by the one or by the other, so a sandbox that lets programs ask at all allows one of them. */
int valve_file_of(int fd, struct valve_file *file)
{
	int saved_errno = errno, err = 0;
	struct stat found;

	if (syscall(SYS_fstat, fd, &found) &&
	    (errno == EBADF || syscall(SYS_newfstatat, fd, "", &found, AT_EMPTY_PATH)))
		err = -errno;
	if (!err)
		*file = (struct valve_file){.dev = found.st_dev, .ino = found.st_ino};
	errno = saved_errno;
	return err;
}

enum valve_sameness valve_file_is(int fd, uint64_t dev, uint64_t ino)
{
	struct valve_file now = {0};
	int err = fd < 0 ? -EBADF : valve_file_of(fd, &now);

	if (err == -EBADF)
		return VALVE_OTHER_FILE;
	if (err || !(dev || ino))
		return VALVE_UNKNOWN_FILE;
	return now.dev == dev && now.ino == ino ? VALVE_SAME_FILE : VALVE_OTHER_FILE;
}

bool valve_own_table(void)
{
	uint32_t session = load_relaxed(&valve_shim.session);
	int saved_errno = errno;
	bool is_other = session && syscall(SYS_kcmp, session, syscall(SYS_gettid), KCMP_FILES, 0, 0) > 0;

	errno = saved_errno;
	return !is_other;
}

enum answer { NO, YES, UNKNOWN };

static enum answer has_mark(const struct valve_own_fd *own, int fd)
{
	int saved_errno = errno;

	for (int looks = 0; looks < 2; looks++) { /* another file may take the number between file and mark */
		long found = syscall(SYS_fcntl, fd, F_GETSIG);
		bool is_told = found >= 0 || errno == EBADF;
		uint32_t next = load_acquire(&own->next_mark), mark = load_acquire(&own->mark);

		errno = saved_errno;
		if (!mark || !is_told)
			return UNKNOWN;
		if (found == mark || (next && found == next))
			return YES;
	}
	return NO;
}

/* Where a sandbox keeps us from asking the one, the other must do. */
static bool is_its_file(const struct valve_own_fd *own, int fd)
{
	enum valve_sameness sameness = valve_file_is(fd, load_relaxed(&own->dev), load_relaxed(&own->ino));

	if (sameness == VALVE_OTHER_FILE)
		return false;
	return sameness == VALVE_SAME_FILE ? has_mark(own, fd) != NO : has_mark(own, fd) == YES;
}

/* Of a file just made. Whoever can ask neither would take each of ours for lost, and make new ones without end. */
bool valve_own_can_tell(int fd)
{
	struct valve_file file;

	return !valve_file_of(fd, &file) || syscall(SYS_fcntl, fd, F_GETSIG) >= 0;
}

static bool is_ours(const struct valve_own_fd *own)
{
	return is_its_file(own, number_of(own));
}

int valve_own(enum valve_own which)
{
	return is_ours(&valve_shim.own[which]) ? number_of(&valve_shim.own[which]) : -1;
}

/* In the table of the session's thread; before Linux 6.9 a table is named by the process's first thread alone. */
int valve_own_borrow(enum valve_own which, bool *is_borrowed)
{
	const struct valve_own_fd *own = &valve_shim.own[which];
	int number = number_of(own), fd = valve_own(which), table;

	*is_borrowed = false;
	if (fd >= 0 || number < 0)
		return fd;
	table = (int)syscall(SYS_pidfd_open, load_relaxed(&valve_shim.session), PIDFD_THREAD);
	if (table < 0)
		table = (int)syscall(SYS_pidfd_open, valve_shim.pid, 0);
	if (table < 0)
		return -1;
	fd = (int)syscall(SYS_pidfd_getfd, table, number, 0);
	syscall(SYS_close, table);
	*is_borrowed = is_its_file(own, fd);
	if (fd >= 0 && !*is_borrowed)
		syscall(SYS_close, fd);
	return *is_borrowed ? fd : -1;
}

/* Where there is no room it stays where it is. */
int valve_own_high(int fd)
{
	int high = (int)syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, HIGH);

	if (high < 0)
		return fd;
	syscall(SYS_close, fd);
	return high;
}

/*
 * In one step, so that the number is never another's. False: it lies above a limit that the application has lowered; or an
 * open() of the application was given it, and waits: for ever, if no process opens the other end of a FIFO.
 */
static bool put_there(int fd, int number)
{
	for (int tries = 0; tries < PUT_TRIES; tries++) {
		if (syscall(SYS_dup3, fd, number, O_CLOEXEC) >= 0)
			return true;
		if (errno != EBUSY && errno != EINTR)
			return false;
		syscall(SYS_sched_yield);
	}
	return false;
}

/* Bells keep their numbers while they are ours: a launching thread may be about to write to one. For the same reason one
 * that had to move leaves its old number open, to no effect, for a program to close. */
void valve_own_take(enum valve_own which, int fd)
{
	static uint32_t taken;
	struct valve_own_fd *own = &valve_shim.own[which];
	int before = valve_own(which);
	uint32_t mark = MARK + taken++ % MARKS;
	struct valve_file file = {0};

	valve_file_of(fd, &file);
	mark = syscall(SYS_fcntl, fd, F_SETSIG, mark) ? 0 : mark;
	store_relaxed(&own->next_mark, mark);
	store_relaxed(&own->dev, file.dev);
	store_relaxed(&own->ino, file.ino);
	if (before >= 0 && put_there(fd, before)) {
		syscall(SYS_close, fd);
	} else {
		store_release(&own->number, (uint32_t)valve_own_high(fd) + 1);
		if (before >= 0 && which == VALVE_OWN_LINK)
			syscall(SYS_close, before);
	}
	store_release(&own->mark, mark);
	store_release(&own->next_mark, 0);
}

void valve_own_close(enum valve_own which)
{
	int fd = valve_own(which);

	store_relaxed(&valve_shim.own[which].number, 0);
	if (fd >= 0)
		syscall(SYS_close, fd);
}

bool valve_own_has(int fd)
{
	for (int i = 0; fd >= 0 && i < VALVE_OWNS; i++)
		if (number_of(&valve_shim.own[i]) == fd)
			return valve_shim.pid == (uint32_t)syscall(SYS_getpid) &&
			       is_ours(&valve_shim.own[i]); /* a vfork child has a table of its own */
	return false;
}

int valve_own_from(int first)
{
	int lowest = -1;

	for (int i = 0; i < VALVE_OWNS; i++) {
		int fd = number_of(&valve_shim.own[i]);

		if (fd >= first && (lowest < 0 || fd < lowest) && valve_own_has(fd))
			lowest = fd;
	}
	return lowest;
}

/* The caller puts another file under the number in one step: it never stands empty. */
void valve_own_make_way(int fd)
{
	valve_lock(&valve_shim.link_lock);
	for (int i = 0; i < VALVE_OWNS; i++)
		if (number_of(&valve_shim.own[i]) == fd && valve_own_has(fd))
			store_release(&valve_shim.own[i].number,
			              (uint32_t)syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, HIGH) + 1);
	valve_unlock(&valve_shim.link_lock);
}

void valve_own_hang_up(void)
{
	int fd = valve_own(VALVE_OWN_LINK);

	if (fd >= 0)
		syscall(SYS_shutdown, fd, SHUT_RDWR);
}
