/*
 * sparse.c - ranges that UVM made sparse: reads give zeros, writes are dropped. They are mapped read-only, which reads as
 * zeros; the first write traps here, makes the range private memory so that the instruction goes on, and
 * emu_sparse_refresh puts the read-only zeros back. So a kernel may read back what it wrote itself, no other kernel
 * ever does, and at the end of the work or of the slice it is gone.
 *
 * The lock is only taken with all signals blocked: a thread that is parked in a handler never holds it.
 */
#include "fakenv.h"
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>

#define EXPORT __attribute__((visibility("default")))

enum { RANGES = 16384 };
struct sparse {
	uint64_t base, end;
	bool written;
};
static struct sparse ranges[RANGES];
static uint32_t count, written; /* under the lock; `written` is also read without */
static int locked;
static struct sigaction before;

static void lock(sigset_t *mask)
{
	sigset_t all;

	sigfillset(&all);
	fake_sigmask(SIG_BLOCK, &all, mask);
	while (__atomic_exchange_n(&locked, 1, __ATOMIC_ACQUIRE))
		sched_yield();
}

static void unlock(const sigset_t *mask)
{
	__atomic_store_n(&locked, 0, __ATOMIC_RELEASE);
	fake_sigmask(SIG_SETMASK, mask, NULL);
}

static void set_written(struct sparse *s, bool value)
{
	if (s->written == value)
		return;
	s->written = value;
	__atomic_add_fetch(&written, value ? 1u : ~0u, __ATOMIC_SEQ_CST);
}

static void zeros(const struct sparse *s)
{
	fake_real()->mmap((void *)(uintptr_t)s->base, s->end - s->base, PROT_READ,
	                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

/* With no room left the range keeps what is written to it, for this process alone. */
static void add(uint64_t base, uint64_t end, bool is_written)
{
	if (count == RANGES) {
		mprotect((void *)(uintptr_t)base, end - base, PROT_READ | PROT_WRITE);
		return;
	}
	ranges[count] = (struct sparse){base, end, false};
	set_written(&ranges[count++], is_written);
}

static void cut(uint64_t base, uint64_t end)
{
	for (uint32_t i = 0; i < count; i++) {
		struct sparse old = ranges[i];

		if (old.end <= base || old.base >= end)
			continue;
		set_written(&ranges[i], false);
		ranges[i--] = ranges[--count];
		if (old.base < base)
			add(old.base, base, old.written);
		if (old.end > end)
			add(end, old.end, old.written);
	}
}

/* Lets a write to a sparse range go on; false: the address is none. */
static bool write_to(uint64_t address)
{
	bool found = false;
	sigset_t mask;

	lock(&mask);
	for (uint32_t i = 0; i < count && !found; i++) {
		struct sparse *s = &ranges[i];

		if (address < s->base || address >= s->end)
			continue;
		found = true; /* another thread may have been first */
		set_written(s, true);
		mprotect((void *)(uintptr_t)s->base, s->end - s->base, PROT_READ | PROT_WRITE);
	}
	unlock(&mask);
	return found;
}

static void on_fault(int number, siginfo_t *info, void *where)
{
	if (info->si_code == SEGV_ACCERR && write_to((uintptr_t)info->si_addr))
		return;
	if (before.sa_flags & SA_SIGINFO)
		before.sa_sigaction(number, info, where);
	else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
		before.sa_handler(number);
	else
		sigaction(number, &before, NULL); /* the instruction faults again, and that kills */
}

/* In front of whatever handler the program has by now. */
static void watch_writes(void)
{
	struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK}, now;

	sigfillset(&action.sa_mask);
	if (sigaction(SIGSEGV, NULL, &now) || now.sa_sigaction == on_fault)
		return;
	before = now;
	sigaction(SIGSEGV, &action, NULL);
}

void fake_sparse_make(uint64_t base, uint64_t end)
{
	struct sparse s = {base, end, false};
	sigset_t mask;

	watch_writes();
	lock(&mask);
	cut(base, end);
	zeros(&s);
	add(base, end, false);
	unlock(&mask);
}

void fake_sparse_end(uint64_t base, uint64_t end, void (*change)(const struct emu_page_op *, int),
                     const struct emu_page_op *op, int memfd)
{
	sigset_t mask;

	lock(&mask);
	cut(base, end);
	change(op, memfd);
	unlock(&mask);
}

EXPORT void emu_sparse_refresh(void)
{
	sigset_t mask;

	if (!__atomic_load_n(&written, __ATOMIC_SEQ_CST))
		return;
	lock(&mask);
	for (uint32_t i = 0; i < count; i++) {
		if (!ranges[i].written)
			continue;
		zeros(&ranges[i]);
		set_written(&ranges[i], false);
	}
	unlock(&mask);
}
