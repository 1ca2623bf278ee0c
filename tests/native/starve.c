/*
 * starve.c - the gate where one call that takes a descriptor or a thread fails: the first in the first round, the second
 * in the second, until a round needs no more of them. Whatever comes of it, nothing stays open and nothing is left to
 * the leak detector. The calls are wrapped by the linker (test_starved.py).
 *
 *     starve ERRNO
 */
#include "fake_rm.h"
#include "internal.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/timerfd.h>

static uint32_t calls, fails_at;
static int why;

static bool fails(void)
{
	if (__atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) != load_relaxed(&fails_at))
		return false;
	errno = why;
	return true;
}

#define WRAP(name, parameters, arguments)                      \
	int __real_##name parameters;                          \
	int __wrap_##name parameters;                          \
	int __wrap_##name parameters                           \
	{                                                      \
		return fails() ? -1 : __real_##name arguments; \
	}

WRAP(epoll_create1, (int flags), (flags))
WRAP(epoll_ctl, (int epoll, int op, int fd, struct epoll_event *event), (epoll, op, fd, event))
WRAP(eventfd, (unsigned count, int flags), (count, flags))
WRAP(timerfd_create, (int clock, int flags), (clock, flags))
WRAP(memfd_create, (const char *name, unsigned flags), (name, flags))
WRAP(dup3, (int from, int to, int flags), (from, to, flags))

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*body)(void *),
                          void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*body)(void *),
                          void *argument);

/* As glibc does where the kernel refuses: the number of a thread that never was is there. */
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*body)(void *), void *argument)
{
	if (!fails())
		return __real_pthread_create(thread, how, body, argument);
	memset(thread, 0x5A, sizeof *thread);
	return EAGAIN;
}

static uint32_t open_files(void)
{
	DIR *folder = opendir("/proc/self/fd");
	uint32_t count = 0;

	while (folder && readdir(folder))
		count++;
	closedir(folder);
	return count;
}

static int memory(size_t bytes)
{
	int fd = __real_memfd_create("starve", MFD_CLOEXEC);

	if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0)
		abort();
	return fd;
}

static struct valve_client *join(struct valve_gate *gate, uint32_t role, int32_t service)
{
	int control = memory(VALVE_CONTROL_BYTES), region = memory(VALVE_REGION_BYTES);
	int bell[2] = {__real_eventfd(0, EFD_CLOEXEC), __real_eventfd(0, EFD_CLOEXEC)};
	struct valve_client *client =
	        valve_client_new(gate, role, role, service, 0, control, region, bell[0], bell[1]);

	for (int i = 0; i < 2 && !client; i++)
		close(bell[i]);
	close(control);
	close(region);
	return client;
}

/* An offline process that passed its file and leaves while a plan names it. */
static void come_and_leave(struct valve_gate *gate)
{
	struct valve_client *client = join(gate, VALVE_ROLE_OFFLINE, -1);
	uint32_t h_subdevice;
	int file, number;

	if (!client)
		return;
	fake_client(&file, &h_subdevice, 0);
	number = file >= 0 ? dup(file) : -1;
	if (number >= 0 && valve_client_take_fd(client, number) == 0) {
		client->refs++; /* as of a plan */
		valve_client_free(gate, client);
		if (fcntl(number, F_GETFD) < 0) {
			fprintf(stderr, "call %u: a number that a plan names was let go\n", fails_at);
			exit(1);
		}
		client->refs--;
		client_reap(client);
	} else {
		valve_client_free(gate, client);
	}
	close_fd(file);
}

static void open_door(void)
{
	const uint8_t uuid[16] = {0};
	int fd = memory(1), bell = __real_eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	struct valve_door *door = valve_door_open(fd, bell, uuid);

	if (door) {
		valve_door_close(door);
		while (fcntl(fd, F_GETFD) >= 0) /* its thread closes both, the bell last */
			sleep_ns(100000);
		while (fcntl(bell, F_GETFD) >= 0)
			sleep_ns(100000);
		return;
	}
	close(fd);
	close(bell);
}

static void live(void)
{
	const struct valve_config config = {
	        .lease_ns = 1000000000, .hang_ns = 1000000000, .order_ns = 1000000};
	struct valve_gate *gate = valve_gate_open(&config, fake_machine());
	bool is_starved = load_relaxed(&calls) >= fails_at;
	struct valve_client *client;
	int32_t service;

	if (!gate || is_starved) {
		if (gate) {
			fprintf(stderr, "call %u failed, and there is a gate with %u cards\n", fails_at,
			        gate->gpu_count);
			exit(1);
		}
		return;
	}
	service = valve_service_new(gate, 1);
	client = join(gate, VALVE_ROLE_ONLINE, service);
	come_and_leave(gate);
	if (client)
		valve_client_free(gate, client);
	valve_service_free(gate, service);
	open_door();
	valve_gate_settle(gate, 60000000000ull);
	if (valve_gate_close(gate))
		exit(1);
}

int main(int argc, char **argv)
{
	uint32_t before, after;

	why = argc > 1 ? atoi(argv[1]) : EMFILE;
	fake_reset();
	fails_at = UINT32_MAX;
	live(); /* what is opened once for all */
	for (fails_at = 1; calls + 1 >= fails_at; fails_at++) {
		fake_reset();
		before = open_files();
		store_relaxed(&calls, 0);
		live();
		after = open_files();
		if (after != before) {
			fprintf(stderr, "call %u failed: %u descriptors before, %u after\n", fails_at, before,
			        after);
			return 1;
		}
	}
	printf("%u calls\n", fails_at - 1);
	return fails_at > 10 ? 0 : 1;
}
