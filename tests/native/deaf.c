/*
 * deaf.c - a doorbell that rings for nothing is muted, and the watchdog unmutes it half way through: the one listener that
 * is not in the driver is kept in there until the watchdog has looked. Afterwards a ring must be heard. The call is wrapped
 * by the linker (test_gate_watch.py).
 */
#include "fake_rm.h"
#include "peers.h"

#include <stdio.h>
#include <sys/epoll.h>

enum { PATIENCE_MS = 200000, BEATS = 3 };

struct ringer_client {
	struct valve_client *client;
	int32_t service;
	int doorbell;
};

static struct ringer_client idle, other;
static uint32_t mutings;

int __real_epoll_ctl(int epoll, int op, int fd, struct epoll_event *event);
int __wrap_epoll_ctl(int epoll, int op, int fd, struct epoll_event *event);

int __wrap_epoll_ctl(int epoll, int op, int fd, struct epoll_event *event)
{
	int rc;

	/* A second one, or a goodbye, may fall into its end, which stops its heartbeat. */
	if (op != EPOLL_CTL_MOD || event->events & EPOLLIN || load_acquire(&mutings))
		return __real_epoll_ctl(epoll, op, fd, event);
	for (uint32_t i = 0; i < BEATS; i++) {
		uint64_t before = load_acquire(&idle.client->control->heartbeat_ns);

		while (load_acquire(&idle.client->control->heartbeat_ns) == before)
			sleep_ns(100000);
	}
	rc = __real_epoll_ctl(epoll, op, fd, event);
	add_fetch(&mutings, 1);
	return rc;
}

static void begin(struct valve_gate *gate, struct ringer_client *it, uint32_t gpus)
{
	it->service = valve_service_new(gate, gpus + 1);
	valve_service_gpus(gate, it->service, gpus);
	it->client = peer_new(gate, gpus + 1, VALVE_ROLE_ONLINE, it->service, &it->doorbell);
}

static void end(struct valve_gate *gate, struct ringer_client *it)
{
	valve_client_free(gate, it->client);
	valve_service_free(gate, it->service);
}

static void wake(struct valve_gate *gate, const struct ringer_client *it)
{
	if (valve_wake(gate, it->service) != VALVE_WOKEN || valve_gate_settle(gate, PATIENCE_MS * 1000000ull))
		abort();
}

int main(void)
{
	const struct valve_config config = {.lease_ns = 5000000, .hang_ns = 60000000000, .order_ns = 1000000};
	struct valve_gate *gate;
	struct valve_client *offline;
	struct valve_entry channel = {.reach = VALVE_REACH_OWN, .h_channel = 0x5C000000};
	uint32_t h_subdevice;
	bool heard = false;
	int file, doorbell;

	fake_reset();
	gate = valve_gate_open(&config, fake_machine());
	begin(gate, &idle, 0);
	begin(gate, &other, 1);
	channel.client = offline = peer_new(gate, 3, VALVE_ROLE_OFFLINE, -1, &doorbell);
	channel.h_client = fake_client(&file, &h_subdevice, 0);
	fake_channel(channel.h_client, channel.h_channel, 0);
	valve_arm(gate, 0, &channel, 1, &channel, 1, NULL, 0, NULL);
	wake(gate, &other);
	store_relaxed(&fake_rules.hang, 1);
	peer_ring(other.doorbell);
	while (!__atomic_load_n(&fake_counts.hanging, __ATOMIC_RELAXED))
		sleep_ns(100000);
	while (!load_acquire(&mutings))
		peer_ring(idle.doorbell);                     /* its service holds: each is for nothing */
	while (valve_wake(gate, idle.service) != VALVE_WOKEN) /* a ring from before may be heard just now */
		sleep_ns(100000);
	for (uint32_t i = 0; i < PATIENCE_MS && !heard; i++) {
		peer_ring(idle.doorbell);
		sleep_ns(1000000);
		heard = load_full(&idle.client->control->gate_epoch) % 2 == 0;
	}
	if (!heard)
		fprintf(stderr, "nobody listens to the doorbell any more\n");
	store_relaxed(&fake_rules.hang, 0);
	end(gate, &idle);
	end(gate, &other);
	valve_arm(gate, 0, NULL, 0, NULL, 0, &channel, 1, NULL);
	valve_client_free(gate, offline);
	close(file);
	return valve_gate_close(gate) || !heard;
}
