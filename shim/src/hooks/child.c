/*
 * child.c - a process that was forked from ours. It keeps bound entries (same addresses) and descriptors that the application
 * opened. It gives up the parent's pages, link, map and threads. A CUDA context does not survive fork, so until the child
 * opens nvidiactl itself (and becomes a client of its own) every hook passes through.
 *
 * fork() calls us in the child. _Fork(), a bare clone() and musl do not: there the word below, which the kernel makes zero in
 * a process of its own memory, tells the first hook that matters. A vfork child shares our memory, and reads what we read.
 */
#include "shim.h"

#include <linux/kcmp.h>
#include <string.h>
#include <sys/mman.h>

enum { CHILD, BECOMING, SELF };

static uint32_t *what_we_are; /* NULL: no driver was opened, or a kernel before 4.14 */

/* A bare clone() may leave the table of files the parent's, too: what is closed in it is closed there (CLONE_FILES). */
static bool has_parents_files(void)
{
	return valve_shim.pid && !syscall(SYS_kcmp, valve_shim.pid, syscall(SYS_getpid), KCMP_FILES, 0, 0);
}

static void reset(void)
{
	bool is_shared = has_parents_files();

	if (valve_shim.state != VALVE_STATE_NEW)
		valve_map_fresh();
	for (int which = 0; which < VALVE_OWNS && !is_shared; which++)
		valve_own_close(which); /* else the parent's end of file would wait for the child's */
	memset(&valve_shim, 0, sizeof(valve_shim));
	valve_tls.slot = valve_tls.fenced = NULL;
	valve_tls.inside = valve_tls.kv_depth = valve_tls.pool_depth = 0;
	valve_capture_reset();
	valve_contexts_reset();
	valve_hint_reset_child();
	valve_memory_reset();
	valve_note_reset();
	valve_ending_reset();
	valve_say_reset_child();
	if (what_we_are)
		store_release(what_we_are, SELF);
}

/* A handler that stands before ours may have opened the driver: then the child is a process of its own already. */
void valve_after_fork(void)
{
	if (what_we_are)
		valve_heed_child();
	else
		reset();
}

void valve_heed_child(void)
{
	uint32_t is_child = CHILD;

	if (!what_we_are || load_acquire(what_we_are) == SELF)
		return;
	if (swap_if(what_we_are, &is_child, BECOMING))
		reset();
	while (load_acquire(what_we_are) != SELF)
		syscall(SYS_sched_yield); /* another thread of the child is at it */
}

bool valve_is_child(void)
{
	return (what_we_are && load_acquire(what_we_are) != SELF) ||
	       valve_shim.pid != (uint32_t)syscall(SYS_getpid);
}

/* A vfork child, whether its parent is a client already or not: what it registered would count for the parent. */
static bool is_in_parents_memory(uint32_t pid)
{
	uint32_t parent = (uint32_t)syscall(SYS_getppid);

	return (what_we_are && valve_shim.pid == parent) || !syscall(SYS_kcmp, parent, pid, KCMP_VM, 0, 0);
}

bool valve_begin_process(void)
{
	uint32_t pid = (uint32_t)syscall(SYS_getpid);
	void *page;

	valve_heed_child();
	if (valve_shim.pid != pid && is_in_parents_memory(pid))
		return false;
	valve_shim.pid = pid;
	if (what_we_are)
		return true;
	page = mmap(NULL, VALVE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (page != MAP_FAILED && !madvise(page, VALVE_PAGE, MADV_WIPEONFORK)) {
		store_relaxed((uint32_t *)page, SELF);
		store_release(&what_we_are, page);
	} else if (page != MAP_FAILED) {
		munmap(page, VALVE_PAGE);
	}
	return true;
}
