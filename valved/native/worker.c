/*
 * worker.c - the hot threads: two more than there are GPUs, each either a listener or at a GPU's seat. At a ring, and at a
 * wake, a listener borrows the seat of a sleeping issuer (issuer_borrow), because waking a second thread costs as much as all
 * the rest: 4 us where it runs on the same core, 30 to 40 us where a virtual machine has to interrupt another one. While one
 * listener is in the driver, the other hears what rings. If it borrows a seat as well, the issuer whose seat that is wakes up
 * and listens.
 */
#include "internal.h"

#include <sched.h>
#include <signal.h>
#include <sys/resource.h>

#define NICE     (-20)
#define SLICE_NS 100000u /* the shortest that Linux takes */
#define JOIN_MS  2000    /* how long close waits for a thread that hangs in the driver, by no clock */

/* struct sched_attr: its name and header depend on the libc */
struct policy {
	uint32_t size, policy;
	uint64_t flags;
	int32_t nice;
	uint32_t priority;
	uint64_t runtime, deadline, period;
};

/* Real time if it is asked for, else the best niceness, where permitted. A normal thread is placed by the scheduler: on
 * an idle core if there is one, else beside the launch that woke it. A real-time one stays where it last ran, be that
 * the core of the very launch (which it then keeps from running while the driver spins) or one that has to be
 * interrupted. In return it never waits for other nice work; so it is for hosts without idle cores. A thread that
 * spins must not be real-time: the kernel takes its CPU away for 50 ms of every second.
 *
 * A thread that wakes beside others waits for the end of the slice of the one that runs there (some 3 ms), however nice it is.
 * Unless its own slice is shorter: then Linux, from 6.12 on, lets it run at once.
 *
 * Only a thread whose run no client decides may be real-time. Of a worker the driver does: see calm in watchdog.c.
 * `thread`: its number for the kernel, 0 is the caller. */
void hurry(const struct valve_config *config, uint32_t thread, bool may_be_real_time)
{
	struct sched_param param = {.sched_priority = may_be_real_time ? (int)config->fifo_priority : 0};
	struct policy normal = {.size = sizeof normal, .runtime = SLICE_NS};

	if (param.sched_priority && config->spin_ns == 0 &&
	    sched_setscheduler((pid_t)thread, SCHED_FIFO, &param) == 0)
		return;
	setpriority(PRIO_PROCESS, thread, NICE); /* of this thread alone; EPERM: as a normal one, then */
	normal.nice = getpriority(PRIO_PROCESS, thread);
	syscall(SYS_sched_setattr, thread, &normal, 0); /* before Linux 6.12 without effect */
}

static void *worker_main(void *argument)
{
	struct worker *worker = argument;
	struct valve_gate *gate = worker->gate;
	struct gpu *gpu = worker->gpu;

	hurry(&gate->config, 0, true);
	while (!load_acquire(&gate->quit)) {
		if (gpu)
			issuer_serve(gpu);
		gpu = listener_serve(gate);
	}
	return NULL;
}

/* Native threads take no signals: those are Python's. Where there is no thread, nothing is left to be joined: libc may
 * have written the number of one that never ran. */
int thread_start(pthread_t *thread, void *(*body)(void *), void *argument)
{
	sigset_t all, before;
	int rc;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	rc = pthread_create(thread, NULL, body, argument);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (rc)
		*thread = 0;
	return -rc;
}

bool thread_join(pthread_t thread)
{
	int looks = JOIN_MS;

	while (pthread_tryjoin_np(thread, NULL) && looks--)
		usleep(1000);
	return looks >= 0;
}

int worker_start(struct valve_gate *gate, struct worker *worker, struct gpu *gpu)
{
	int rc;

	worker->gate = gate;
	worker->gpu = gpu;
	rc = thread_start(&worker->thread, worker_main, worker);
	worker->started = rc == 0;
	return rc;
}
