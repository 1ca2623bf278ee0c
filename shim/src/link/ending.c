/*
 * ending.c - a signal ends this offline process. A driver waits seconds for each channel of a dying process that is off, under
 * locks that online work needs. So valved is told first, enables the channels, and ends the link: then we die by that signal.
 *
 * The kernel's own end of a process tells nobody before. So SIGTERM, SIGINT and SIGHUP have a handler of ours where they have
 * none: set when the first channel is there, and again if the program sets SIG_DFL again. A handler or SIG_IGN of the program's
 * is never replaced. The handler does not return: its thread, which would run no line any more, waits with all signals blocked.
 * The others go on meanwhile. It dies soon in any case. Where no valved is linked, or the one that was told has died or does not
 * answer after some looks, the session's thread enables what may be off.
 * One that is set later may call the handler that it found, as signal-hook's (Rust) and c10's do. Without us there is none.
 *
 * All that the handler calls is a system call. It may have interrupted a thread that has our locks, so it waits for none.
 */
#include "ownfd.h"
#include "shim.h"

#include <poll.h>
#include <signal.h>
#include <string.h>

#define AGAIN_NS 200000000u
#define LOOK_MS  10
#define LOOKS    50 /* counted, not timed: on a busy machine valved takes longer, too */
#define TRIES    20 /* so many looks at most for link_lock, which another thread has for a moment as a rule */

/* As the kernel has it: what libc's means to others who hook it is not for a handler to ask. */
struct kernel_action {
	void (*handler)(int);
	unsigned long flags;
	void (*restorer)(void);
	uint64_t mask;
};

static const int numbers[] = {SIGTERM, SIGINT, SIGHUP};
#define NUMBERS (sizeof(numbers) / sizeof(numbers[0]))

static struct {
	uint64_t looked_ns; /* the session's thread alone */
	bool has_channels;  /* likewise */
	uint32_t begun;     /* by the thread that tells valved */
	int number;         /* of that signal */
	uint32_t seq;       /* of that request, 0: not sent */
	uint32_t answered;
	uint32_t alone; /* no valved is to be told: the session's thread switches our channels on */
} ending;

/* What the kernel has where ours is set: that of a sanitizer, or of another who hooks sigaction, calls ours. NULL: not known. */
static void (*in_kernel[NUMBERS])(int);

static void leave(int number);

/* ---- in the handler ---- */

static uint64_t bit(int number)
{
	return 1ull << (number - 1);
}

/* The default for this signal, sent to this very thread: the process dies. Only the first process of a namespace does not.
 * Where a sandbox refuses that, it ends as a shell would tell of it. */
static void die(int number)
{
	struct kernel_action by_default = {0};
	uint64_t mask = bit(number);
	bool is_sent = !syscall(SYS_rt_sigaction, number, &by_default, NULL, sizeof(mask)) &&
	               !syscall(SYS_tgkill, syscall(SYS_getpid), syscall(SYS_gettid), number);

	syscall(SYS_rt_sigprocmask, SIG_UNBLOCK, &mask, NULL, sizeof(mask));
	if (!is_sent)
		_exit(128 + number);
}

static bool may_tell(void)
{
	return valve_is_linked() && valve_is_offline() && (valve_shim.daemon_features & VALVE_FEATURE_ENDING);
}

/* Our channels may be off, by our own hand or by a valved that has just gone. */
static bool stands_alone(void)
{
	return !valve_is_linked() && valve_is_offline();
}

/* It may be connecting just now (RECONNECT_MS of session.c), and the driver takes its time after that. If valved takes us then, it
 * is to be told after all. `is_told`: one has been, and it has not answered. */
static void wait_for_session(int number, bool is_told)
{
	ending.number = number;
	store_release(&ending.alone, 1);
	if (is_told)
		valve_own_hang_up();
	for (int look = 0;
	     look < 2 * LOOKS && !load_acquire(&ending.answered) && (is_told || !valve_is_linked()); look++) {
		futex_wake(&valve_shim.leaving, 1); /* it may have looked just before, and waits only now */
		sleep_ns(LOOK_MS * 1000000u);
	}
}

static void tell(int link, int number)
{
	struct valve_link_ending message = {.signal = (uint32_t)number};

	valve_link_head(&message.header, sizeof(message), VALVE_LINK_ENDING);
	ending.number = number;
	store_release(&ending.seq, message.header.seq);
	if (valve_packet_send(link, &message, sizeof(message), NULL, 0))
		store_release(&ending.seq, 0); /* valved's socket is full */
}

/* A lock that this very thread has is no danger: the session puts no other file under the number meanwhile. */
static void try_to_tell(int link, bool is_borrowed, int number, int look)
{
	uint32_t free = 0;
	bool is_ours = swap_if(&valve_shim.link_lock.word, &free, 1);

	if ((is_ours || look >= TRIES) && (is_borrowed || valve_own_has(link)))
		tell(link, number);
	if (is_ours)
		valve_unlock(&valve_shim.link_lock);
}

/* Ends with the link, whose end the kernel shows as POLLHUP. The answer comes before that: the session reads it. */
static void wait_for_valved(int number, bool is_teller)
{
	uint32_t generation = load_relaxed(&valve_shim.link_generation);
	bool is_borrowed;
	struct pollfd link = {.fd = valve_own_borrow(VALVE_OWN_LINK, &is_borrowed)};

	for (int look = 0; link.fd >= 0 && look < LOOKS; look++) {
		if (is_teller && !load_acquire(&ending.seq))
			try_to_tell(link.fd, is_borrowed, number, look);
		if (is_refused(syscall(SYS_poll, &link, 1, LOOK_MS)))
			sleep_ns(LOOK_MS * 1000000u);
		if (link.revents || load_acquire(&ending.answered) || !valve_is_linked() ||
		    generation != load_relaxed(&valve_shim.link_generation))
			return;
	}
}

/* The signal has a handler of the program's, which is still to end it, or not. */
static bool is_called_by_another(int number)
{
	struct kernel_action now = {0};
	bool is_known = !syscall(SYS_rt_sigaction, number, NULL, &now, sizeof(now.mask));

	for (size_t i = 0; is_known && i < NUMBERS; i++)
		if (numbers[i] == number && load_acquire(&in_kernel[i]))
			return now.handler != load_acquire(&in_kernel[i]);
	return false;
}

static void leave(int number)
{
	uint32_t nobody = 0;
	int saved_errno = errno;

	if (!is_called_by_another(number)) {
		if (!valve_is_child()) {
			bool is_teller = swap_if(&ending.begun, &nobody, 1);

			if (stands_alone() || load_acquire(&ending.alone))
				wait_for_session(number, false);
			if (may_tell()) {
				wait_for_valved(number, is_teller);
				wait_for_session(number, true);
			}
		}
		die(number);
	}
	errno = saved_errno;
}

/* ---- the session's thread ---- */

/* At once: our channels are on, and online work that comes before our end has them switched off again. Or they were switched on
 * as we stood, and the link ends. */
void valve_ending_answer(uint32_t seq)
{
	if (seq != load_acquire(&ending.seq))
		return;
	die(ending.number);
	store_release(&ending.answered, 1); /* a sandbox keeps this thread from it */
}

/* No valved is there that would do it, or has done it. */
static void end_alone(void)
{
	store_relaxed(&valve_shim.self_stopped, 0);
	valve_self_gate(false, VALVE_GATE_ALL);
	die(ending.number);
	store_release(&ending.answered, 1);
}

static struct sigaction ours(void)
{
	static const int forced[] = {SIGSYS, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}; /* interpose.c */
	struct sigaction action = {.sa_handler = leave, .sa_flags = SA_RESTART | SA_ONSTACK};

	sigfillset(&action.sa_mask);
	for (size_t i = 0; i < sizeof(forced) / sizeof(forced[0]); i++)
		sigdelset(&action.sa_mask, forced[i]);
	return action;
}

static bool has(int number, void (*handler)(int))
{
	struct sigaction now;

	return !sigaction(number, NULL, &now) && !(now.sa_flags & SA_SIGINFO) && now.sa_handler == handler;
}

/* What the program sets between our look and our set comes back at once: whatever we took that is not ours is its own. */
static void take(size_t at)
{
	struct sigaction next = ours(), taken;
	struct kernel_action set = {0};
	int number = numbers[at];

	if (!has(number, SIG_DFL))
		return;
	store_release(&in_kernel[at], NULL);
	if (sigaction(number, &next, &taken))
		return;
	while ((taken.sa_flags & SA_SIGINFO) || (taken.sa_handler != SIG_DFL && taken.sa_handler != leave)) {
		next = taken;
		if (sigaction(number, &next, &taken))
			return;
	}
	if (!syscall(SYS_rt_sigaction, number, NULL, &set, sizeof(set.mask)) && has(number, leave))
		store_release(&in_kernel[at], set.handler);
}

/* The first process of a namespace is not ended by these signals where they have no handler. */
void valve_ending_watch(void)
{
	uint64_t now = now_ns();

	if (load_acquire(&ending.alone) && !load_relaxed(&ending.answered) && !valve_is_linked())
		end_alone();
	if (!(may_tell() || stands_alone()) || load_acquire(&ending.begun) || valve_shim.pid == 1 ||
	    now - ending.looked_ns < AGAIN_NS)
		return;
	if (!ending.has_channels && !valve_capture_has_channels())
		return;
	ending.has_channels = true;
	ending.looked_ns = now;
	for (size_t i = 0; i < NUMBERS; i++)
		take(i);
}

/* A child is ended at once. */
void valve_ending_reset(void)
{
	struct sigaction by_default = {.sa_handler = SIG_DFL};

	if (!ending.has_channels)
		return;
	memset(&ending, 0, sizeof(ending));
	for (size_t i = 0; i < NUMBERS; i++)
		if (has(numbers[i], leave))
			sigaction(numbers[i], &by_default, NULL);
}
