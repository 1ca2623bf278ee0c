/*
 * say.c - writes all messages of the shim to people: one line on stderr, each text once.
 *
 * Number 2 is the program's, like all the others. A program that runs without a terminal may have closed it, and the next file
 * or connection that it opens has that number: we write only to what was stderr at the start, and to what the program made
 * stderr by dup2() or dup3(). Whoever reads there may have gone, or rest: then a write kills, stops or holds up the program, or
 * our session. So the line goes where it goes at once, without a signal, or not at all; then it is said the next time. No
 * stdio: that belongs to the program.
 */
#include "shim.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>

#define SAID_MAX   16
#define STDERR     2
#define BIT_OF(s)  (1ull << ((s) - 1))
#define RAISED     (BIT_OF(SIGPIPE) | BIT_OF(SIGXFSZ)) /* by a write that fails, for the thread that writes */
#define MASK_BYTES 8                                   /* of the kernel's signal set */

static const char *said[SAID_MAX]; /* texts are literals, so equal texts have equal pointers */

static struct {
	uint32_t pid; /* a vfork child shares this memory, and arranges its own descriptors */
	struct valve_file file;
} listener;

void valve_say_follow(void)
{
	struct valve_file file;

	if (listener.pid != (uint32_t)syscall(SYS_getpid) || valve_file_of(STDERR, &file))
		return;
	store_relaxed(&listener.file.dev, file.dev);
	store_relaxed(&listener.file.ino, file.ino);
}

void valve_say_reset_child(void)
{
	listener.pid = (uint32_t)syscall(SYS_getpid);
}

/* Before the program runs a line. */
void valve_say_start(void)
{
	valve_say_reset_child();
	valve_say_follow();
}

static bool is_heard_there(void)
{
	struct valve_file file;

	return !valve_file_of(STDERR, &file) && file.dev == load_relaxed(&listener.file.dev) &&
	       file.ino == load_relaxed(&listener.file.ino);
}

static bool write_line(const char *line, size_t length)
{
	const uint64_t raised = RAISED, held = RAISED | BIT_OF(SIGTTOU);
	struct pollfd there = {.fd = STDERR, .events = POLLOUT};
	const struct timespec at_once = {0, 0};
	uint64_t before, pending = RAISED;
	bool is_written = false;

	if (!is_heard_there() || syscall(SYS_rt_sigprocmask, SIG_BLOCK, &held, &before, MASK_BYTES))
		return false;
	syscall(SYS_rt_sigpending, &pending, MASK_BYTES);
	if (syscall(SYS_poll, &there, 1, 0) == 1 && there.revents == POLLOUT)
		is_written = syscall(SYS_write, STDERR, line, length) > 0;
	if (!is_written && !(pending & RAISED))
		syscall(SYS_rt_sigtimedwait, &raised, NULL, &at_once, MASK_BYTES);
	syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, MASK_BYTES);
	return is_written;
}

/* NULL: it was said, or there is no room. */
static const char **take_place(const char *text)
{
	for (size_t i = 0; i < SAID_MAX; i++)
		if (load_relaxed(&said[i]) == text)
			return NULL;
	for (size_t i = 0; i < SAID_MAX; i++) {
		const char *none = NULL;

		if (swap_if(&said[i], &none, text))
			return &said[i];
		if (none == text)
			return NULL;
	}
	return NULL;
}

void valve_say(const char *text)
{
	int saved_errno = errno;
	char line[256] = "valve: ";
	size_t length = strlen(line);
	const char **place = take_place(text);

	if (!place)
		return;
	for (const char *at = text; *at && length < sizeof(line) - 1; at++)
		line[length++] = *at;
	line[length++] = '\n';
	if (!write_line(line, length))
		store_relaxed(place, NULL);
	errno = saved_errno;
}
