/* slowclock.c - a preload: a thread that asks for the time is away for a while, unless it is the first. What lies between
 * two looks at the clock can be seen. */
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
	if (clock == CLOCK_MONOTONIC && syscall(SYS_gettid) != getpid())
		usleep(3000);
	return (int)syscall(SYS_clock_gettime, clock, now);
}
