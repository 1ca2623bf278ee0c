/*
 * bell.c - rings the order eventfd of a client. Whether a write to an eventfd waits is a property of the open file, and
 * the client has that file, too: it can take O_NONBLOCK away, fill the counter, and block the next writer for ever.
 * The kernel itself, when it signals an eventfd, never waits (a full counter stays full). So valved writes nothing here: it
 * submits a read of nothing, whose completion rings.
 */
#include "internal.h"

#include <linux/aio_abi.h>
#include <stdlib.h>
#include <sys/mman.h>

#define IN_FLIGHT 128 /* more than threads that could ring at the same time */
#define TRIES     4

static char nowhere;

/* Without `nothing` there is no gate; without a context no process is rung. */
int bell_open(struct ringer *ringer)
{
	*ringer = (struct ringer){.nothing = memfd_create("valve-nothing", MFD_CLOEXEC)};
	if (ringer->nothing < 0)
		return -errno;
	if (syscall(SYS_io_setup, IN_FLIGHT, &ringer->context) < 0) {
		ringer->context = 0;
		return -errno;
	}
	return 0;
}

void bell_close(struct ringer *ringer)
{
	if (ringer->context)
		syscall(SYS_io_destroy, ringer->context);
	close_fd(ringer->nothing);
}

/* Takes back what completed, so that there is room for the next. */
static void reap(const struct ringer *ringer)
{
	struct io_event done[8];
	struct timespec now = {0};

	while (syscall(SYS_io_getevents, ringer->context, 0L, 8L, done, &now) == 8)
		;
}

/* Without a context, or if all fails, the word in the control page stands and the process is not rung: the order runs
 * into its deadline. */
void bell_ring(const struct ringer *ringer, int eventfd)
{
	struct iocb look = {
	        .aio_lio_opcode = IOCB_CMD_PREAD,
	        .aio_fildes = (uint32_t)ringer->nothing,
	        .aio_buf = (uint64_t)(uintptr_t)&nowhere,
	        .aio_nbytes = 1,
	        .aio_flags = IOCB_FLAG_RESFD,
	        .aio_resfd = (uint32_t)eventfd,
	};
	struct iocb *all[] = {&look};

	for (int tries = 0; ringer->context && tries < TRIES; tries++) {
		long taken = syscall(SYS_io_submit, ringer->context, 1L, all);

		reap(ringer);
		if (taken == 1)
			return;
	}
}
