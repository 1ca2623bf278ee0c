/*
 * pages.c - the page tables of this process's GPU address space, kept by the CPU's: device memory
 * is a memfd that is mapped at its device address. UVM's mapping ioctls end here, in the owner of
 * the uvm file. The owner's own calls change pages before ioctl() returns; another process's (a
 * daemon that was passed the fd) reach us through a thread. Only mmap, recvmsg and send run on that
 * thread: executors may be parked with any libc lock held.
 */
#include "fakenv.h"
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

static void change(const struct emu_page_op *op, int memfd)
{
	void *at = (void *)(uintptr_t)op->base;
	int fixed = MAP_FIXED | MAP_NORESERVE;

	if (op->kind == EMU_PAGE_MAP)
		fake_real()->mmap(at, op->length, PROT_READ | PROT_WRITE, MAP_SHARED | fixed, memfd,
		                  (off_t)op->offset);
	else
		fake_real()->mmap(at, op->length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0);
}

void fake_pages_apply(const struct emu_page_op *op, int memfd)
{
	uint64_t end = op->base + op->length;

	if (op->kind == EMU_PAGE_SPARSE)
		fake_sparse_make(op->base, end);
	else if (op->kind == EMU_PAGE_MAP || op->kind == EMU_PAGE_HOLE)
		fake_sparse_end(op->base, end, change, op, memfd);
}

static int next_op(int fd, struct emu_page_op *op, int *memfd)
{
	*memfd = -1;
	return fake_receive(fd, op, sizeof *op, memfd) == (ssize_t)sizeof *op ? 0 : -1;
}

static void *serve(void *argument)
{
	int fd = (int)(intptr_t)argument, memfd;
	struct emu_page_op op;

	prctl(PR_SET_NAME, "fakenv-pages");
	while (next_op(fd, &op, &memfd) == 0) {
		fake_pages_apply(&op, memfd);
		if (memfd >= 0)
			close(memfd);
		if (send(fd, &op.seq, sizeof op.seq, MSG_NOSIGNAL) != sizeof op.seq)
			break;
	}
	close(fd);
	return NULL;
}

void fake_pages_serve(uint64_t file)
{
	struct emu_welcome welcome;
	sigset_t all, before;
	pthread_attr_t attributes;
	pthread_t thread;
	int fd = fake_connect(EMU_PAGES, 0, file, &welcome);

	if (fd < 0)
		return;
	sigfillset(&all);
	sigdelset(&all, SIGSEGV);
	sigdelset(&all, SIGBUS);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	if (pthread_create(&thread, &attributes, serve, (void *)(intptr_t)fd))
		close(fd);
	pthread_attr_destroy(&attributes);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
}
