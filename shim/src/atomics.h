/*
 * atomics.h - names for the orders that the shim relies on, and the futex calls. Each use says what it pairs with.
 *
 * Calls that wait are made by syscall() here and everywhere in the shim: the names in libc are cancellation points, and a
 * thread of the application that is cancelled inside one would leave our locks held.
 */
#ifndef VALVE_ATOMICS_H
#define VALVE_ATOMICS_H

#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define load_relaxed(p)     __atomic_load_n((p), __ATOMIC_RELAXED)
#define load_acquire(p)     __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define store_relaxed(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define full_fence()        __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define exchange_full(p, v) __atomic_exchange_n((p), (v), __ATOMIC_SEQ_CST)
#define add_full(p, v)      __atomic_add_fetch((p), (v), __ATOMIC_SEQ_CST)
#define swap_if(p, old, new) \
	__atomic_compare_exchange_n((p), (old), (new), 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)

static inline uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Waits while *word == value, at most ns (0: for ever). The shared form also works on a page mapped read-only. */
static inline void futex_wait(const volatile uint32_t *word, uint32_t value, uint64_t ns)
{
	struct timespec limit = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};

	syscall(SYS_futex, word, FUTEX_WAIT, value, ns ? &limit : NULL, NULL, 0);
}

static inline void futex_wake(const volatile uint32_t *word, int count)
{
	syscall(SYS_futex, word, FUTEX_WAKE, count, NULL, NULL, 0);
}

static inline void sleep_ns(uint64_t ns)
{
	struct timespec span = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};

	syscall(SYS_nanosleep, &span, NULL);
}

#endif
