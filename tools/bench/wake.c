/*
 * wake.c - what a wake costs on this machine, without Valve: one process writes to an eventfd after a random quiet, a thread
 * of another one sleeps on it in epoll, as the listener does. Prints the nanoseconds of each wake, one a line.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define QUIET_LEAST_NS 200000 /* as gate_peers.launch */
#define QUIET_MORE_NS  800000

struct shared {
	uint64_t rung_ns;
	uint32_t heard;
};

struct policy { /* struct sched_attr: its name and header depend on the libc */
	uint32_t size, policy;
	uint64_t flags;
	int32_t nice;
	uint32_t priority;
	uint64_t runtime, deadline, period;
};

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* The last steps of a launch that rings, as the shim takes them; gate_peers.py calls them, too. */
__attribute__((visibility("default"))) int valve_bench_ring(uint64_t *launch_ns, int bell);

int valve_bench_ring(uint64_t *launch_ns, int bell)
{
	uint64_t one = 1;

	__atomic_store_n(launch_ns, now_ns(), __ATOMIC_RELEASE);
	return write(bell, &one, sizeof one) == sizeof one ? 0 : -1;
}

static void rest(long ns)
{
	nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}

static int ring(struct shared *shared, int bell, uint32_t count)
{
	for (uint32_t i = 1; i <= count; i++) {
		rest(QUIET_LEAST_NS + random() % QUIET_MORE_NS);
		if (valve_bench_ring(&shared->rung_ns, bell))
			return 1;
		while (__atomic_load_n(&shared->heard, __ATOMIC_ACQUIRE) != i)
			rest(QUIET_LEAST_NS);
	}
	return 0;
}

/* As valved/native/worker.c does; what is refused is refused there, too. */
static void hurry(void)
{
	struct policy normal = {.size = sizeof normal, .nice = -20, .runtime = 100000};

	setpriority(PRIO_PROCESS, 0, -20);
	syscall(SYS_sched_setattr, 0, &normal, 0);
}

static int hear(struct shared *shared, int poll, uint32_t count)
{
	struct epoll_event event;
	uint64_t took_ns;

	hurry();
	for (uint32_t i = 1; i <= count; i++) {
		if (epoll_wait(poll, &event, 1, -1) != 1)
			return 1;
		took_ns = now_ns() - __atomic_load_n(&shared->rung_ns, __ATOMIC_ACQUIRE);
		printf("%llu\n", (unsigned long long)took_ns);
		__atomic_store_n(&shared->heard, i, __ATOMIC_RELEASE);
	}
	return 0;
}

int main(int argc, char **argv)
{
	uint32_t count = argc > 1 ? (uint32_t)atoi(argv[1]) : 0;
	struct shared *shared =
	        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	struct epoll_event event = {.events = EPOLLIN | EPOLLET};
	int bell = eventfd(0, 0), poll = epoll_create1(0), status = 0;
	pid_t child;

	if (shared == MAP_FAILED || bell < 0 || poll < 0 || epoll_ctl(poll, EPOLL_CTL_ADD, bell, &event) < 0)
		return 1;
	child = fork();
	if (child == 0)
		return ring(shared, bell, count);
	if (child < 0 || hear(shared, poll, count))
		return 1;
	return waitpid(child, &status, 0) < 0 || status != 0;
}
