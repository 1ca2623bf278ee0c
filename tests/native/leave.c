/*
 * leave.c - the clock on the wall jumps ahead by an hour while a thread that ends is waited for. The calls are wrapped by the
 * linker (test_gate_watch.py).
 */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>

int __real_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);
int __real_usleep(useconds_t us);
int __wrap_usleep(useconds_t us);

static uint32_t may_end;

int __wrap_clock_gettime(clockid_t clock, struct timespec *now)
{
	int rc = __real_clock_gettime(clock, now);

	if (clock == CLOCK_REALTIME)
		now->tv_sec -= 3600; /* it jumps once this is read */
	return rc;
}

int __wrap_usleep(useconds_t us)
{
	store_full(&may_end, 1);
	return __real_usleep(us);
}

static void *body(void *argument)
{
	while (!load_acquire(&may_end))
		sched_yield();
	return argument;
}

int main(void)
{
	pthread_t thread;
	bool joined;

	if (thread_start(&thread, body, NULL))
		abort();
	joined = thread_join(thread);
	if (!joined)
		fprintf(stderr, "a thread that ends was given up\n");
	return !joined;
}
