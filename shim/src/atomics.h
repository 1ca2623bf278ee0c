/*
 * atomics.h - names for the orders that the shim relies on, and the futex calls. Each use says what it pairs with.
 *
 * Calls that wait are made by syscall() here and everywhere in the shim: the names in libc are cancellation points, and a
 * thread of the application that is cancelled inside one would leave our locks held.
 */
#ifndef VALVE_ATOMICS_H
#define VALVE_ATOMICS_H

#include <errno.h>
#include <linux/futex.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define REFUSED_NAP_NS 1000000u    /* the caller looks again so often where it may not wait */
#define UNWOKEN_NS     1000000000u /* and so often where nobody woke it */

#define load_relaxed(p)     __atomic_load_n((p), __ATOMIC_RELAXED)
#define load_acquire(p)     __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define load_full(p)        __atomic_load_n((p), __ATOMIC_SEQ_CST)
#define store_relaxed(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define full_fence()        __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define release_fence()     __atomic_thread_fence(__ATOMIC_RELEASE)
#define exchange_full(p, v) __atomic_exchange_n((p), (v), __ATOMIC_SEQ_CST)
#define add_full(p, v)      __atomic_add_fetch((p), (v), __ATOMIC_SEQ_CST)
#define swap_if(p, old, new) \
	__atomic_compare_exchange_n((p), (old), (new), 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)

/*
 * A sandbox may refuse a call that waits (seccomp). Then another one waits instead: no thread of ours spins, and none of the
 * application does in a call of ours. libc's own choice comes first, because a list of what is allowed has it.
 */
static inline bool is_refused(long result)
{
	return result < 0 && errno != EINTR && errno != EAGAIN && errno != ETIMEDOUT;
}

static inline void sleep_ns(uint64_t ns)
{
	struct timespec span = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};

	if (is_refused(syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &span, NULL)) &&
	    is_refused(syscall(SYS_nanosleep, &span, NULL)))
		syscall(SYS_ppoll, NULL, 0, &span, NULL, 0);
}

/* Waits while *word == value, at most ns; 0: until it is woken, or looks again by itself, because a sandbox that began meanwhile
 * may refuse the wake. Callers look in a loop. The shared form also works on a page mapped read-only. */
static inline void futex_wait(const volatile uint32_t *word, uint32_t value, uint64_t ns)
{
	uint64_t most_ns = ns ? ns : UNWOKEN_NS;
	struct timespec limit = {(time_t)(most_ns / 1000000000u), (long)(most_ns % 1000000000u)};

	if (is_refused(syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0)))
		sleep_ns(most_ns < REFUSED_NAP_NS ? most_ns : REFUSED_NAP_NS);
}

static inline void futex_wake(const volatile uint32_t *word, int count)
{
	syscall(SYS_futex, word, FUTEX_WAKE, count, NULL, NULL, 0);
}

#endif
