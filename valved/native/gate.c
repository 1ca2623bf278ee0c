/*
 * gate.c - opens and closes the gate: driver version, cards, threads; and the few calls about a whole GPU. Caller
 * thread only.
 */
#include "internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/timerfd.h>

static int real_open(const char *path, int flags)
{
	return open(path, flags);
}

static int real_ioctl(int fd, unsigned long request, void *argument)
{
	return ioctl(fd, request, argument);
}

void at_point(struct valve_gate *gate, enum valve_point point)
{
	if (gate->os.between)
		gate->os.between((int)point);
}

enum valve_gpu_state gpu_target(const struct gpu *gpu, uint64_t holders)
{
	const struct valve_gate *gate = gpu->gate;

	if (holders_count(holders) == 0)
		return VALVE_GPU_RUNNING;
	if (holders_count(holders) == 1 && load_full(&gpu->sliced))
		return VALVE_GPU_WATCHED;
	return load_acquire(&gate->let) & 1u << gpu->index ? VALVE_GPU_WATCHED : VALVE_GPU_STOPPED;
}

/* Issuer: a GPU whose channels run, or may after a stop that was refused, is held: no more of it is enabled first. A
 * hold whose stop was tried is no reason to wait: it may fail for as long as the hold lasts, and channels that leave
 * are to be enabled. */
bool gpu_is_awaited(const struct gpu *gpu)
{
	uint64_t holders = load_full(&gpu->holders);

	if (gpu->state == VALVE_GPU_FAILED && (uint32_t)(holders >> 32) == gpu->closings)
		return false;
	return gpu->state != VALVE_GPU_STOPPED && gpu_target(gpu, holders) == VALVE_GPU_STOPPED;
}

static void open_gpu(struct valve_gate *gate, uint32_t index, const struct valve_gpu_info *info)
{
	struct gpu *gpu = &gate->gpu[index];

	gpu->gate = gate;
	gpu->index = index;
	gpu->info = *info;
	gpu->own = (struct rm_client){.ctl = -1, .node = -1};
	if (!gate->branch) {
		gpu->info.status = -ENOTSUP;
		return;
	}
	gpu->info.status = rm_open(&gate->os, &gpu->info, &gpu->own);
}

/* That nothing could be opened says nothing of what is there. The same numbers as in valved/fds.py. */
static bool is_scarce(int rc)
{
	return rc == -EMFILE || rc == -ENFILE || rc == -ENOMEM;
}

/* 0 also where there is no driver, or one that refuses. Else it is not known: a gate without cards would gate none. */
static int open_driver(struct valve_gate *gate)
{
	struct valve_gpu_info cards[MAX_GPUS];
	int rc = rm_read_version(&gate->os, gate->version);

	if (rc) {
		snprintf(gate->refusal, sizeof gate->refusal, "no driver answers on /dev/nvidiactl (%d)", rc);
		return is_scarce(rc) ? rc : 0;
	}
	gate->branch = rm_branch(gate->version);
	if (!gate->branch)
		snprintf(gate->refusal, sizeof gate->refusal,
		         "driver %.20s is unknown: branches %u to %u are supported", gate->version,
		         NV_BRANCH_FIRST, NV_BRANCH_LAST);
	rc = rm_list_cards(&gate->os, cards, MAX_GPUS, &gate->gpu_count);
	for (uint32_t i = 0; i < gate->gpu_count; i++) {
		open_gpu(gate, i, &cards[i]);
		if (is_scarce(gate->gpu[i].info.status))
			rc = gate->gpu[i].info.status;
	}
	return is_scarce(rc) ? rc : 0;
}

/* Where the kernel cannot ring, the gate does without. */
static int open_files(struct valve_gate *gate)
{
	gate->rings = bell_open(&gate->errands.ringer);
	gate->epoll = epoll_create1(EPOLL_CLOEXEC);
	gate->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	gate->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	if (gate->errands.ringer.nothing < 0 || gate->epoll < 0 || gate->wake < 0 || gate->timer < 0)
		return -errno;
	return stamps_open(&gate->stamps);
}

static int start_threads(struct valve_gate *gate)
{
	int rc = listener_open(gate);

	rc = rc ? rc : errands_start(gate);
	for (uint32_t i = 0; i < gate->gpu_count && rc == 0; i++)
		rc = worker_start(gate, &gate->worker[i], &gate->gpu[i]);
	for (uint32_t i = 0; i < LISTENERS && rc == 0; i++)
		rc = worker_start(gate, &gate->worker[gate->gpu_count + i], NULL);
	return rc ? rc : watchdog_start(gate);
}

/* A thread of a client may sleep between reading an epoch and saying that it rang it, while another valved comes: to that
 * one it must not seem to have rung an epoch that is still to come (region.h, rung_epoch). */
static uint32_t first_epoch(void)
{
	uint32_t epoch;

	if (getrandom(&epoch, sizeof epoch, GRND_NONBLOCK) != sizeof epoch)
		epoch = (uint32_t)now_ns();
	return epoch & ~1u;
}

struct valve_gate *valve_gate_open(const struct valve_config *config, const struct valve_os *os)
{
	struct valve_gate *gate = aligned_alloc(64, sizeof *gate); /* a multiple of 64: it has such members */

	if (!gate)
		return NULL;
	memset(gate, 0, sizeof *gate);
	gate->config = *config;
	gate->os = os ? *os : (struct valve_os){0};
	gate->os.open = gate->os.open ? gate->os.open : real_open;
	gate->os.ioctl = gate->os.ioctl ? gate->os.ioctl : real_ioctl;
	pthread_mutex_init(&gate->roster_lock, NULL);
	gate->errands.ringer.nothing = gate->epoll = gate->wake = gate->timer = gate->stamps.fd = -1;
	gate->look_ns = gate->armed_ns = UINT64_MAX;
	gate->service[0].epoch = first_epoch();
	for (uint32_t i = 1; i < MAX_SERVICES; i++)
		gate->service[i].epoch = gate->service[0].epoch;
	if (open_files(gate) || open_driver(gate) || start_threads(gate)) {
		valve_gate_close(gate); /* of any part of a gate */
		return NULL;
	}
	return gate;
}

const char *valve_gate_version(struct valve_gate *gate)
{
	return gate->version;
}

const char *valve_gate_refusal(struct valve_gate *gate)
{
	return gate->refusal;
}

/* 0: orders reach clients. Else -errno: why not, and the rungs that need them are not to be had. */
int valve_gate_orders(struct valve_gate *gate)
{
	return gate->rings;
}

uint32_t valve_gate_gpus(struct valve_gate *gate, struct valve_gpu_info *out, uint32_t max)
{
	uint32_t count = gate->gpu_count < max ? gate->gpu_count : max;

	for (uint32_t i = 0; i < count; i++)
		out[i] = gate->gpu[i].info;
	return count;
}

void valve_gate_alive(struct valve_gate *gate)
{
	store_release(&gate->alive_ns, now_ns());
	for (uint32_t i = 0; i < gate->gpu_count; i++)
		mail_reap(&gate->gpu[i]); /* what was late may have been the last that named a client */
}

/* The gate words stay closed: online launches meanwhile do not ring, and nothing is stopped for them. */
void valve_gate_let(struct valve_gate *gate, uint32_t mask)
{
	uint32_t changed = gate->let ^ mask;

	store_full(&gate->let, mask);
	for (uint32_t i = 0; i < gate->gpu_count; i++)
		if (changed & 1u << i)
			issuer_kick(&gate->gpu[i]);
}

/* The issuer has seen everything up to now (it may be half way through an edge that is over already) and is where it
 * should be. */
static bool is_settled(struct gpu *gpu)
{
	return gpu_target(gpu, load_full(&gpu->holders)) == load_acquire(&gpu->state) &&
	       !(load_acquire(&gpu->seat) & SEAT_LENT) && /* a borrower that keeps it was kicked before */
	       load_acquire(&gpu->handled) == load_acquire(&gpu->kick);
}

/* Wait until every issuer has done what it should. Returns the GPUs that have not within the time. */
uint32_t valve_gate_settle(struct valve_gate *gate, uint64_t timeout_ns)
{
	uint64_t until = now_ns() + timeout_ns;
	uint32_t waiting = 0;

	for (uint32_t i = 0; i < gate->gpu_count; i++) {
		while (!is_settled(&gate->gpu[i]) && now_ns() <= until)
			sleep_ns(20000);
		if (!is_settled(&gate->gpu[i]))
			waiting |= 1u << i;
	}
	return waiting;
}

uint32_t valve_gpu_state(struct valve_gate *gate, uint32_t gpu)
{
	uint32_t state = load_full(&gate->gpu[gpu].state); /* pairs with leave_stopped */

	/* The watchdog has told of a failure; that the rest is off is proven again when the call comes back. Or channels
	 * came that are not off yet, and their sender has given the mail up. */
	if (state == VALVE_GPU_STOPPED &&
	    (load_acquire(&gate->gpu[gpu].flight) % 4 > FLIGHT_OUT || load_acquire(&gate->gpu[gpu].unproven)))
		return VALVE_GPU_FAILED;
	return state;
}

/* Stopped, or about to be, or not yet enabled again. */
uint32_t valve_gpu_gated(struct valve_gate *gate, uint32_t index)
{
	struct gpu *gpu = &gate->gpu[index];

	return gpu_target(gpu, load_full(&gpu->holders)) == VALVE_GPU_STOPPED ||
	       load_acquire(&gpu->state) >= VALVE_GPU_STOPPED;
}

/* A stop or an enable is under way here, or about to begin. Not one that has been given up, and not the rest between
 * two tries: a caller that waits for those may wait for ever. */
static bool is_turning(const struct gpu *gpu)
{
	uint32_t state = load_acquire(&gpu->state);

	if (is_stuck(gpu))
		return false;
	if (state == VALVE_GPU_STOPPING || state == VALVE_GPU_ENABLING)
		return now_ns() >= load_relaxed(&gpu->retry_ns);
	return state == VALVE_GPU_RUNNING && gpu_target(gpu, load_full(&gpu->holders)) == VALVE_GPU_STOPPED;
}

/* Mapping work takes the driver's locks in write mode and must not come in between. */
uint32_t valve_gate_turning(struct valve_gate *gate)
{
	for (uint32_t i = 0; i < gate->gpu_count; i++)
		if (is_turning(&gate->gpu[i]))
			return 1;
	return 0;
}

static void free_gpu(struct valve_gate *gate, struct gpu *gpu)
{
	mail_discard(gpu);
	plan_free(gpu->plan);
	rm_close(&gate->os, &gpu->own);
}

/* Precondition: no client and no service is left. -EBUSY: a thread hangs in the driver, or a client keeps it; its memory is
 * left alone. */
int valve_gate_close(struct valve_gate *gate)
{
	uint64_t one = 1;
	bool joined = true;

	store_full(&gate->quit, 1);
	futex_wake(&gate->quit);
	if (write(gate->wake, &one, sizeof one) < 0)
		joined = true; /* counter full: readable already */
	for (uint32_t i = 0; i < gate->gpu_count; i++)
		issuer_kick(&gate->gpu[i]);
	for (uint32_t i = 0; i < gate->gpu_count + LISTENERS; i++)
		joined &= !gate->worker[i].started || thread_join(gate->worker[i].thread);
	joined &= !gate->watchdog || thread_join(gate->watchdog);
	if (!joined)
		return -EBUSY;
	for (uint32_t i = 0; i < gate->gpu_count; i++)
		free_gpu(gate, &gate->gpu[i]);
	if (!errands_end(gate))
		return -EBUSY;
	for (uint32_t i = 0; i < MAX_SERVICES; i++)
		free(gate->service[i].clients);
	stamps_close(&gate->stamps);
	bell_close(&gate->errands.ringer);
	close_fd(gate->wake);
	close_fd(gate->timer);
	close_fd(gate->epoll);
	pthread_mutex_destroy(&gate->roster_lock);
	free(gate);
	return 0;
}
