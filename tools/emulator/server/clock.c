/*
 * clock.c - real time, model time, and waiting on words that other processes write. Model latencies
 * are slept, never spun: eight GPUs must be able to wait side by side on two cores.
 */
#include "server.h"
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static struct timespec to_timespec(uint64_t ns)
{
	return (struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
}

uint64_t model_to_real_ns(uint64_t ns)
{
	return ns * 1000u / (uint64_t)knob(K_time_scale);
}

void sleep_until(uint64_t ns)
{
	struct timespec until = to_timespec(ns);

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
		;
}

static _Thread_local uint64_t charged_ns;

void charge_ns(uint64_t real_ns)
{
	charged_ns += real_ns;
}

uint64_t take_charges(void)
{
	uint64_t ns = charged_ns;

	charged_ns = 0;
	return ns;
}

void model_sleep_ns(uint64_t ns)
{
	uint64_t real = model_to_real_ns(ns);

	charge_ns(real);
	if (ns)
		sleep_until(now_ns() + real);
}

void futex_wake(uint32_t *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void futex_wait(uint32_t *word, uint32_t seen, uint64_t deadline_ns)
{
	struct timespec until = to_timespec(deadline_ns);

	/* WAIT_BITSET takes an absolute time, so an early wake costs no drift. */
	syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, deadline_ns ? &until : NULL, NULL,
	        FUTEX_BITSET_MATCH_ANY);
}
