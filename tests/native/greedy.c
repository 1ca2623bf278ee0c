/*
 * greedy.c - clients whose order eventfds take as long to ring as they like, as if a million epolls waited for them. Beside
 * them, one process whose channels valved switches, and one that is stopped by an order. A ring of a greedy client first takes
 * a millisecond of the thread's own time, later it comes back only when this program says so. The calls are wrapped by the
 * linker (test_gate_greedy.py), which also shows who closes and gives up the clients' files: never the caller. A thread's own
 * time is what this program says, too: an interrupt counts to the thread that it meets, and would make any ring dear.
 */
#include "fake_rm.h"
#include "internal.h"
#include "syscalls.h"

#include <linux/aio_abi.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

enum { GREEDY = 4, PATIENCE_MS = 200000 };

struct process {
	struct valve_client *client;
	struct valve_entry channel;
	int order, passed;
};

static struct process greedy[GREEDY], switched, polite;
static pthread_t caller;
static uint32_t hangs, takes, hanging, rung, guilty, reformed;

int __real_close(int fd);
int __wrap_close(int fd);
int __real_dup3(int from, int to, int flags);
int __wrap_dup3(int from, int to, int flags);
int __real_epoll_ctl(int epoll, int op, int fd, struct epoll_event *event);
int __wrap_epoll_ctl(int epoll, int op, int fd, struct epoll_event *event);
int __real_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);

/* Whose file it is: a bit, 0: of none that is greedy. */
static uint32_t owner_of(int fd)
{
	for (uint32_t i = 0; i < GREEDY; i++)
		if (greedy[i].client && (fd == greedy[i].order || fd == greedy[i].passed))
			return 1u << i;
	return 0;
}

static _Thread_local long own_time_ns;

int __wrap_clock_gettime(clockid_t clock, struct timespec *now)
{
	if (clock != CLOCK_THREAD_CPUTIME_ID)
		return __real_clock_gettime(clock, now);
	*now = (struct timespec){.tv_nsec = own_time_ns};
	return 0;
}

static void take_long(uint32_t owner)
{
	if (!owner || load_acquire(&reformed) == owner)
		return;
	add_fetch(&hanging, 1); /* first: whoever was rung, and is not in here, has cost what it costs */
	__atomic_fetch_or(&rung, owner, __ATOMIC_SEQ_CST);
	if (load_acquire(&takes))
		own_time_ns += 1000000;
	while (load_acquire(&hangs))
		sleep_ns(100000);
	add_fetch(&hanging, UINT32_MAX);
}

static bool takes_syscall(long number, const long *word, long *result)
{
	(void)result;
	if (number == SYS_io_submit) {
		const struct iocb *look = *(struct iocb **)word[2];

		take_long(owner_of((int)look->aio_resfd));
	}
	return false;
}

/* What the client may have made dear is not for the thread that everything waits for. */
static void blame(int fd)
{
	if (owner_of(fd) && pthread_equal(pthread_self(), caller))
		add_fetch(&guilty, 1);
}

int __wrap_close(int fd)
{
	blame(fd);
	return __real_close(fd);
}

int __wrap_dup3(int from, int to, int flags)
{
	blame(to);
	return __real_dup3(from, to, flags);
}

int __wrap_epoll_ctl(int epoll, int op, int fd, struct epoll_event *event)
{
	if (op == EPOLL_CTL_DEL) /* under the lock that every listener needs, whichever thread it is */
		add_fetch(&guilty, 1);
	return __real_epoll_ctl(epoll, op, fd, event);
}

static int memory(size_t bytes)
{
	int fd = memfd_create("greedy", MFD_CLOEXEC);

	if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0)
		abort();
	return fd;
}

static void begin(struct valve_gate *gate, struct process *it, uint32_t reach)
{
	static uint64_t id;
	static uint32_t h_client = 0xC1E00000;
	int control = memory(VALVE_CONTROL_BYTES), region = memory(VALVE_REGION_BYTES);

	it->order = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	it->client = valve_client_new(gate, ++id, VALVE_ROLE_OFFLINE, -1, 0, control, region,
	                              eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), it->order);
	it->passed = memory(1);
	if (!it->client || valve_client_take_fd(it->client, it->passed) < 0)
		abort();
	it->channel = (struct valve_entry){.client = it->client, .reach = reach, .fd = -1, .h_channel = 1};
	it->channel.h_client = h_client++;
	__real_close(control);
	__real_close(region);
}

static void wait_for(bool (*is_so)(void), const char *what)
{
	for (uint32_t i = 0; !is_so(); i++) {
		if (i == PATIENCE_MS) {
			fprintf(stderr, "never came: %s\n", what);
			_exit(1);
		}
		sleep_ns(1000000);
	}
}

static bool is_off(void)
{
	return fake_is_on(switched.channel.h_client, 1) == 0;
}

static bool runs(void)
{
	return fake_is_on(switched.channel.h_client, 1) == 1;
}

static bool is_rung(void)
{
	struct pollfd bell = {.fd = polite.order, .events = POLLIN};

	return poll(&bell, 1, 0) == 1;
}

static bool is_let(void)
{
	return load_acquire(&polite.client->control->order) == VALVE_ORDER_RUN;
}

static bool all_have_cost(void)
{
	return load_acquire(&rung) == (1u << GREEDY) - 1 && !load_acquire(&hanging);
}

static bool one_hangs(void)
{
	return load_acquire(&hanging) == 1;
}

static bool a_beat_passes(void)
{
	static uint64_t first;
	uint64_t beat = load_acquire(&switched.client->control->heartbeat_ns);

	first = first ? first : beat;
	return beat > first;
}

static void be_held_and_woken(struct valve_gate *gate, int32_t service)
{
	uint64_t count;

	valve_hold(gate, service);
	wait_for(is_off, "the stop of what a driver call stops");
	wait_for(is_rung, "the ring of a process that is not greedy");
	if (read(polite.order, &count, sizeof count) < 0)
		abort();
	while (valve_wake(gate, service) == VALVE_WAKE_REFUSED)
		;
	wait_for(runs, "its enable");
	wait_for(is_let, "the end of the order");
}

static bool first_is_done(void)
{
	return !load_acquire(&greedy[0].client->errand.due);
}

/* One of them was dear by chance: from here on its rings cost what a ring costs. */
static void mend_its_ways(void)
{
	store_release(&reformed, 1);
	for (uint32_t i = 0; i < 100; i++) {
		wait_for(first_is_done, "a ring of one that was dear once");
		valve_client_hold(greedy[0].client, i % 2 == 0);
	}
	wait_for(first_is_done, "the last of its rings");
}

/* An online process whose doorbell is at its end, which every epoll is told as an error. */
static void come_and_go(struct valve_gate *gate, int32_t service)
{
	const uint64_t most = UINT64_MAX - 1;
	int control = memory(VALVE_CONTROL_BYTES), region = memory(VALVE_REGION_BYTES);
	int doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	struct valve_client *client;

	if (write(doorbell, &most, sizeof most) < 0)
		abort();
	bell_ring(&gate->errands.ringer, doorbell);
	client = valve_client_new(gate, 99, VALVE_ROLE_ONLINE, service, 0, control, region, doorbell,
	                          eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
	if (!client)
		abort();
	if (dup(doorbell) < 0) /* it keeps its copy, and rings on */
		abort();
	valve_client_free(gate, client);
	__real_close(control);
	__real_close(region);
}

static bool many_beats_pass(void)
{
	static uint64_t last;
	static uint32_t beats;
	uint64_t beat = load_acquire(&switched.client->control->heartbeat_ns);

	beats += beat != last;
	last = beat;
	return beats > 20;
}

/* How often the listener wakes up meanwhile. */
static uint64_t turns_of_listener(struct valve_gate *gate)
{
	uint64_t before = load_full(&gate->listener_turn);

	wait_for(many_beats_pass, "heartbeats");
	return (load_full(&gate->listener_turn) - before) / 2;
}

int main(void)
{
	const struct valve_config config = {.lease_ns = 5000000, .hang_ns = 60000000000, .order_ns = 1000000};
	struct valve_entry all[GREEDY + 2];
	struct valve_gate *gate;
	int32_t service;
	int file;

	caller = pthread_self();
	fake_reset();
	gate = valve_gate_open(&config, fake_machine());
	service = valve_service_new(gate, 1);
	begin(gate, &switched, VALVE_REACH_OWN);
	switched.channel.h_client = fake_client(&file, &(uint32_t){0}, 0);
	fake_channel(switched.channel.h_client, 1, 0);
	all[0] = switched.channel;
	for (uint32_t i = 0; i < GREEDY; i++) {
		begin(gate, &greedy[i], VALVE_REACH_HOLD);
		all[1 + i] = greedy[i].channel;
	}
	begin(gate, &polite, VALVE_REACH_HOLD);
	all[GREEDY + 1] = polite.channel;
	valve_arm(gate, 0, all, GREEDY + 2, NULL, 0, NULL, 0, NULL);
	store_release(&takes, 1);
	valve_service_gpus(gate, service, 1);
	be_held_and_woken(gate, service);
	wait_for(all_have_cost, "a ring of each that is greedy");
	mend_its_ways();
	store_release(&hangs, 1);
	be_held_and_woken(gate, service);
	wait_for(one_hangs, "a ring that hangs");
	wait_for(a_beat_passes, "a heartbeat");
	be_held_and_woken(gate, service);
	wait_for(first_is_done, "a ring of one whose dear one was long ago");
	valve_client_hold(greedy[1].client, 1);
	if (load_acquire(&hanging) > 1)
		return fprintf(stderr, "greedy clients keep more than one thread\n"), 1;
	all[1] = all[GREEDY + 1];
	valve_arm(gate, 0, all, 2, NULL, 0, NULL, 0, NULL);
	for (uint32_t i = 0; i < GREEDY; i++)
		valve_client_free(gate, greedy[i].client);
	come_and_go(gate, service);
	be_held_and_woken(gate, service);
	if (turns_of_listener(gate) > 20)
		return fprintf(stderr, "the listener is kept awake by a client that has left\n"), 1;
	store_release(&hangs, 0);
	valve_service_free(gate, service);
	valve_arm(gate, 0, NULL, 0, NULL, 0, NULL, 0, NULL);
	valve_client_free(gate, switched.client);
	valve_client_free(gate, polite.client);
	__real_close(file);
	if (valve_gate_close(gate))
		return fprintf(stderr, "it does not close\n"), 1;
	if (load_acquire(&guilty))
		return fprintf(stderr, "%u times a client could make dear what others wait for\n", guilty), 1;
	return 0;
}
