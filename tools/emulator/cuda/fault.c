/*
 * fault.c - SIGSEGV and SIGBUS on an executor thread while it runs work mean what an MMU fault means on the card
 * (Xid 31): the kernel is cancelled, the context is dead, the process lives. On any other thread, or outside work,
 * the handler that was there before gets the signal. Writes to sparse ranges never come here: libfakenv's handler, installed
 * later, lets them go on.
 */
#include "fault.h"
#include "memory.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#define SIGNAL_STACK 65536u

static _Thread_local sigjmp_buf *landing;
static _Thread_local struct {
	uint64_t address;
	bool is_write;
} met;
static struct sigaction before_segv, before_bus;

static bool is_write(const void *where)
{
#ifdef __x86_64__
	return ((const ucontext_t *)where)->uc_mcontext.gregs[REG_ERR] & 2;
#else
	(void)where;
	return false;
#endif
}

/* The kernel log of the node gets its line; nothing is opened. */
static void report(uint32_t cid)
{
	char path[96];

	snprintf(path, sizeof(path), "/dev/nvidia-emu-fault/%u/%u/%llx", cid, met.is_write,
	         (unsigned long long)met.address);
	if (open(path, O_RDONLY | O_CLOEXEC) >= 0)
		abort();
}

static void on_fault(int number, siginfo_t *info, void *where)
{
	struct sigaction *before = number == SIGBUS ? &before_bus : &before_segv;

	met.address = (uintptr_t)info->si_addr;
	met.is_write = is_write(where);
	if (landing)
		siglongjmp(*landing, 1);
	if (emu.contexts && met.address - ARENA_BASE < ARENA_BYTES)
		report(emu.contexts->compute[0]
		               .cid); /* a native step, which cannot be unwound: the process dies */
	if (before->sa_flags & SA_SIGINFO) {
		before->sa_sigaction(number, info, where);
	} else if (before->sa_handler != SIG_DFL && before->sa_handler != SIG_IGN) {
		before->sa_handler(number);
	} else {
		sigaction(number, before,
		          NULL); /* returns to the faulting instruction, which now kills as ever */
	}
}

void fault_install(void)
{
	struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};

	sigemptyset(&action.sa_mask);
	sigaction(SIGSEGV, &action, &before_segv);
	sigaction(SIGBUS, &action, &before_bus);
}

void fault_thread_begin(void)
{
	stack_t stack = {.ss_sp = malloc(SIGNAL_STACK), .ss_size = SIGNAL_STACK};

	if (stack.ss_sp)
		sigaltstack(&stack, NULL);
}

void fault_thread_end(void)
{
	stack_t off = {.ss_flags = SS_DISABLE}, old = {0};

	sigaltstack(&off, &old);
	if (!(old.ss_flags & SS_DISABLE))
		free(old.ss_sp);
}

CUresult fault_guard(struct work *work, struct channel *channel)
{
	sigjmp_buf here;
	CUresult result = CUDA_ERROR_ILLEGAL_ADDRESS;

	if (sigsetjmp(here, 1) == 0) {
		landing = &here;
		result = work->run(work, channel);
		landing = NULL;
		return result;
	}
	landing = NULL;
	report(channel->cid);
	return result;
}
