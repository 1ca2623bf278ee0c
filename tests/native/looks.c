/*
 * looks.c - the watchdog on virtual time: it sleeps until the test lets the time come at which it wants to look again. So
 * what it sees, and when, is the same on every machine. The clock and its sleep are wrapped by the linker
 * (test_gate_watch.py).
 *
 *     looks hang|loop|beat
 */
#include "fake_rm.h"
#include "peers.h"
#include "syscalls.h"

#include <stdio.h>
#include <string.h>

#define MS   1000000ull
#define PAST 1000000ull /* of a wait for another thread, in naps */

static uint64_t clock_ns = 1000000 * MS, wakes_ns; /* when it looks next; 0: it looks now */
static uint32_t *slept_on, is_over; /* by the watchdog alone; from its end on time is real again */

int __real_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);

static void nap(void)
{
	sleep_ns(50000);
}

static void wait_for(const uint32_t *word, uint32_t wanted)
{
	for (uint64_t i = 0; load_full(word) != wanted; i++) {
		if (i == PAST)
			abort();
		nap();
	}
}

int __wrap_clock_gettime(clockid_t clock, struct timespec *now)
{
	if (load_full(&is_over))
		return __real_clock_gettime(clock, now);
	*now = timespec_of(load_full(&clock_ns));
	return 0;
}

static void sleep_until_told(const uint32_t *word, long seen, const struct timespec *rest)
{
	uint64_t wakes = load_full(&clock_ns) + (uint64_t)rest->tv_sec * 1000 * MS + (uint64_t)rest->tv_nsec;

	store_full(&wakes_ns, wakes);
	while (load_full(&clock_ns) < wakes && load_full(word) == (uint32_t)seen)
		nap();
	store_full(&wakes_ns, 0);
}

static bool takes_syscall(long number, const long *word, long *result)
{
	if (number != SYS_futex || word[1] != FUTEX_WAIT_PRIVATE || word[0] != (long)load_full(&slept_on))
		return false;
	sleep_until_told((const uint32_t *)word[0], word[2], (const struct timespec *)word[3]);
	*result = 0;
	return true;
}

/* Until it sleeps. Returns when it looks next. */
static uint64_t next_look(void)
{
	uint64_t at;

	for (uint64_t i = 0; !(at = load_full(&wakes_ns)); i++) {
		if (i == PAST)
			abort();
		nap();
	}
	return at;
}

/* Lets it look once more, no sooner than it wants to. It sleeps again when this returns. */
static void look(void)
{
	uint64_t at = next_look();

	store_full(&clock_ns, at);
	while (load_full(&wakes_ns) == at)
		nap();
	next_look();
}

struct scene {
	struct valve_gate *gate;
	struct valve_client *online, *offline;
	struct valve_entry channel;
	int32_t service;
	int doorbell, file;
};

static void begin(struct scene *scene, const struct valve_config *config)
{
	uint32_t h_subdevice;
	int bell;

	fake_reset();
	scene->gate = valve_gate_open(config, fake_machine());
	store_full(&slept_on,
	           &scene->gate->quit); /* it may still sleep its first rest by the machine's clock */
	scene->service = valve_service_new(scene->gate, 1);
	valve_service_gpus(scene->gate, scene->service, 1);
	scene->online = peer_new(scene->gate, 1, VALVE_ROLE_ONLINE, scene->service, &scene->doorbell);
	scene->offline = peer_new(scene->gate, 2, VALVE_ROLE_OFFLINE, -1, &bell);
	scene->channel = (struct valve_entry){
	        .client = scene->offline,
	        .reach = VALVE_REACH_OWN,
	        .h_client = fake_client(&scene->file, &h_subdevice, 0),
	        .h_channel = 0x5C000000,
	};
	fake_channel(scene->channel.h_client, scene->channel.h_channel, 0);
	valve_arm(scene->gate, 0, &scene->channel, 1, &scene->channel, 1, NULL, 0, NULL);
	if (valve_wake(scene->gate, scene->service) != VALVE_WOKEN ||
	    valve_gate_settle(scene->gate, UINT32_MAX) || fake_off_count())
		abort();
	next_look();
}

static void end(struct scene *scene)
{
	valve_client_free(scene->gate, scene->online);
	valve_service_free(scene->gate, scene->service);
	valve_arm(scene->gate, 0, NULL, 0, NULL, 0, &scene->channel, 1, NULL);
	valve_client_free(scene->gate, scene->offline);
	close(scene->file);
	store_full(&is_over, 1);
	if (valve_gate_close(scene->gate))
		abort();
}

static bool told_of_a_hang(struct valve_gate *gate, uint64_t *late_ns)
{
	struct valve_stamp stamps[64];

	for (uint32_t i = valve_stamps_take(gate, stamps, 64); i > 0; i--) {
		*late_ns = stamps[i - 1].done_ns - stamps[i - 1].ioctl_ns;
		if (stamps[i - 1].kind == VALVE_STAMP_GATE_FAILED)
			return true;
	}
	return false;
}

/* From a driver call that begins just after a look to the report that it hangs. Heartbeats are rare. */
static uint64_t hang(uint64_t hang_ns)
{
	const struct valve_config config = {.lease_ns = 5000 * MS, .hang_ns = hang_ns, .order_ns = 1 * MS};
	struct scene scene = {0};
	uint64_t late_ns = 0;

	begin(&scene, &config);
	look();
	store_full(&clock_ns, load_full(&clock_ns) + MS);
	store_relaxed(&fake_rules.hang, 1);
	peer_ring(scene.doorbell);
	while (!__atomic_load_n(&fake_counts.hanging, __ATOMIC_RELAXED))
		nap();
	for (int looks = 0; looks < 20 && !told_of_a_hang(scene.gate, &late_ns); looks++)
		look();
	store_relaxed(&fake_rules.hang, 0);
	end(&scene);
	return late_ns;
}

/* From the last turn of the caller's loop, just after a look, to the hold of every GPU. */
static uint64_t loop(uint64_t loop_ns)
{
	const struct valve_config config = {
	        .lease_ns = 20 * loop_ns, .hang_ns = 4 * loop_ns, .order_ns = 1 * MS, .loop_ns = loop_ns};
	struct scene scene = {0};
	uint64_t turned_ns;

	begin(&scene, &config);
	for (int turns = 0; turns < 3; turns++) {
		store_full(&clock_ns, next_look() - loop_ns / 4);
		valve_gate_alive(scene.gate);
		look();
	}
	if (load_acquire(&scene.gate->guarding))
		abort();
	store_full(&clock_ns, load_full(&clock_ns) + MS);
	valve_gate_alive(scene.gate); /* the last time */
	turned_ns = load_full(&clock_ns);
	for (int looks = 0; looks < 20 && !load_acquire(&scene.gate->guarding); looks++)
		look();
	turned_ns = load_full(&clock_ns) - turned_ns;
	for (uint64_t i = 0; load_acquire(&scene.gate->guarding) && !fake_off_count(); i++) {
		if (i == PAST)
			abort();
		nap();
	}
	valve_gate_alive(scene.gate);
	look();
	wait_for(&scene.gate->guarding, 0);
	end(&scene);
	return turned_ns;
}

/* The longest time between two heartbeats, where a look for a driver call that hangs is not due at a beat. */
static uint64_t beat(uint64_t beat_ns)
{
	const struct valve_config config = {
	        .lease_ns = 5 * beat_ns, .hang_ns = beat_ns * 3 / 10, .order_ns = 1 * MS};
	const uint64_t *beats;
	struct scene scene = {0};
	uint64_t longest_ns = 0;

	begin(&scene, &config);
	beats = &scene.offline->control->heartbeat_ns;
	look();
	for (uint64_t last_ns = load_acquire(beats), i = 0; i < 50; i++) {
		uint64_t now;

		look();
		now = load_acquire(beats);
		if (now - last_ns > longest_ns)
			longest_ns = now - last_ns;
		last_ns = now;
	}
	end(&scene);
	return longest_ns;
}

/* Prints how long it took, and how long it may take. */
int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	uint64_t took_ns, most_ns;

	if (strcmp(what, "hang") == 0) {
		most_ns = 150 * MS * 5 / 4;
		took_ns = hang(150 * MS);
	} else if (strcmp(what, "loop") == 0) {
		most_ns = 200 * MS * 3 / 2;
		took_ns = loop(200 * MS);
	} else {
		most_ns = 100 * MS * 11 / 10;
		took_ns = beat(100 * MS);
	}
	printf("%lu of %lu us\n", took_ns / 1000, most_ns / 1000);
	return took_ns == 0 || took_ns > most_ns;
}
