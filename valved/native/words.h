/*
 * words.h - the few things the native threads say to each other and to clients: ordered loads and stores on plain
 * words (the ABI headers cannot carry _Atomic), private and shared futexes, and the one clock.
 *
 * The names say the ordering, not the instruction. Every use says which access on the other side it pairs with.
 */
#ifndef VALVE_NATIVE_WORDS_H
#define VALVE_NATIVE_WORDS_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define load_relaxed(p)     __atomic_load_n((p), __ATOMIC_RELAXED)
#define load_acquire(p)     __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define store_relaxed(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define swap(p, v)          __atomic_exchange_n((p), (v), __ATOMIC_ACQ_REL)
#define add_fetch(p, v)     __atomic_add_fetch((p), (v), __ATOMIC_ACQ_REL)
#define compare_swap(p, expect, v) \
	__atomic_compare_exchange_n((p), (expect), (v), false, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE)

/* Store, then nothing that follows may be read before others can see the store. A read-modify-write rather than a
 * bare fence, so that the thread sanitizer understands it; on x86 both are one locked instruction. */
#define store_full(p, v) (void)__atomic_exchange_n((p), (v), __ATOMIC_SEQ_CST)
#define load_full(p)     __atomic_load_n((p), __ATOMIC_SEQ_CST)

static inline uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline struct timespec timespec_of(uint64_t ns)
{
	return (struct timespec){.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
}

static inline void sleep_ns(uint64_t ns)
{
	struct timespec t = timespec_of(ns);

	nanosleep(&t, NULL);
}

/* Sleep while *word == seen, at most timeout_ns (0: for ever). Spurious returns are allowed: callers look again. */
static inline void futex_wait(uint32_t *word, uint32_t seen, uint64_t timeout_ns)
{
	struct timespec t = timespec_of(timeout_ns);

	syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, timeout_ns ? &t : NULL, NULL, 0);
}

static inline void futex_wake(uint32_t *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* For words in memory that another process sleeps on: the private form would not find its waiters. */
static inline void futex_wake_shared(uint32_t *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static inline void close_fd(int fd)
{
	if (fd >= 0)
		close(fd);
}

/* True when epoch a is later than b; epochs wrap (49 days at 1,000 a second). */
static inline bool is_later(uint32_t a, uint32_t b)
{
	return (int32_t)(a - b) > 0;
}

#endif
