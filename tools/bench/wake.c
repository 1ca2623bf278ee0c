/*
 * wake.c - what `valve bench gate-sleep` compares: the ring of a launch, and a plain listener, a thread that waits in epoll as
 * the gate's do and does nothing else. gate_peers.py and gate_host.py load it.
 */
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT int valve_bench_ring(uint64_t *launch_ns, int bell);
EXPORT int valve_bench_hear(int bell, int heard, const uint64_t *launch_ns, uint64_t *took_ns,
                            uint32_t count);

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

/* The last steps of a launch that rings, as the shim takes them. */
int valve_bench_ring(uint64_t *launch_ns, int bell)
{
	uint64_t one = 1;

	__atomic_store_n(launch_ns, now_ns(), __ATOMIC_RELEASE);
	return write(bell, &one, sizeof one) == sizeof one ? 0 : -1;
}

/* As valved/native/worker.c does; what is refused is refused there, too. */
static void hurry(void)
{
	struct policy normal = {.size = sizeof normal, .nice = -20, .runtime = 100000};

	setpriority(PRIO_PROCESS, 0, -20);
	syscall(SYS_sched_setattr, 0, &normal, 0);
}

/* How long each of so many rings took to be heard; `heard` is rung after each. */
int valve_bench_hear(int bell, int heard, const uint64_t *launch_ns, uint64_t *took_ns, uint32_t count)
{
	struct epoll_event event = {.events = EPOLLIN | EPOLLET};
	int poll = epoll_create1(EPOLL_CLOEXEC);
	uint64_t one = 1;
	uint32_t i = 0;

	hurry();
	if (poll >= 0 && epoll_ctl(poll, EPOLL_CTL_ADD, bell, &event) == 0) {
		while (i < count && epoll_wait(poll, &event, 1, -1) == 1) {
			took_ns[i++] = now_ns() - __atomic_load_n(launch_ns, __ATOMIC_ACQUIRE);
			if (write(heard, &one, sizeof one) != sizeof one)
				break;
		}
	}
	if (poll >= 0)
		close(poll);
	return i == count ? 0 : -1;
}
