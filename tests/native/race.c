/*
 * race.c - the gate under a sanitizer: listener, issuers and watchdog of the real gate, online clients that launch and
 * prove idle in threads of this process, a caller that wakes and that adds and removes channels and clients, over the
 * fake driver, which now and then refuses to enable. The pages are used through the gate's own mapping, so that the
 * sanitizer sees both sides of each word.
 *
 * Checked at every launch that found its gate word closed: the GPUs are held, now and until the launch is proven done.
 * At the end each ring is heard, and all channels are on. With HANGS driver calls hang now and then, for longer than the
 * watchdog's patience.
 *
 *     race SEED ROUNDS [HANGS]
 */
#include "fake_rm.h"
#include "internal.h"
#include "kv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

enum { ONLINE = 3, OFFLINE = 2, CHANNELS = 70 };

struct online {
	struct valve_client *client;
	struct valve_gate *gate;
	uint32_t gpus; /* that its service holds throughout */
	int doorbell;
	uint32_t seed, quit;
	uint64_t submitted, rings;
	pthread_t thread;
};

static uint32_t next(uint32_t *seed)
{
	*seed ^= *seed << 13;
	*seed ^= *seed >> 17;
	*seed ^= *seed << 5;
	return *seed;
}

static int memory(size_t bytes)
{
	int fd = memfd_create("race", MFD_CLOEXEC);

	if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0)
		abort();
	return fd;
}

/* The gate maps regions read-only; this client needs the same address writable. */
static struct valve_client *add_client(struct valve_gate *gate, uint64_t id, uint32_t role, int32_t service,
                                       int *doorbell)
{
	int control = memory(VALVE_CONTROL_BYTES), region = memory(VALVE_REGION_BYTES);
	struct valve_client *client;

	*doorbell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	client = valve_client_new(gate, id, role, service, 0, control, region, *doorbell,
	                          eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
	if (!client || mprotect(client->region, VALVE_REGION_BYTES, PROT_READ | PROT_WRITE) < 0)
		abort();
	store_relaxed(&client->region->slot_offset, VALVE_SLOT_OFFSET);
	store_relaxed(&client->region->slot_count, 2);
	store_release(&client->region->magic, VALVE_REGION_MAGIC);
	close(control);
	close(region);
	return client;
}

static uint64_t *counter(const struct online *online)
{
	return (uint64_t *)(void *)((char *)online->client->region + VALVE_SLOT_OFFSET);
}

/* A ring closes the words before it has counted its hold, so let it finish; but then somebody must hold. */
static void must_be_held(const struct online *online)
{
	const struct service *service = &online->gate->service[online->client->service];
	uint32_t epoch;

	do {
		epoch = load_full(&service->epoch);
	} while (epoch % 2 == 0 && load_acquire(&service->settled) != epoch);
	for (uint32_t gpu = 0; gpu < online->gpus; gpu++) {
		if (holders_count(load_full(&online->gate->gpu[gpu].holders)) == 0)
			abort(); /* a launch beside running offline work, and nobody will be told */
	}
}

/* The shim's half of the protocol: count, full fence, read the word, ring once per epoch. */
static void launch(struct online *online)
{
	struct valve_region *region = online->client->region;
	uint64_t one = 1;
	uint32_t word;

	store_full(counter(online), ++online->submitted);
	word = load_full(&online->client->control->gate_epoch);
	if (word % 2 == 0)
		must_be_held(online);
	if (word % 2 == 0 || load_relaxed(&region->rung_epoch) == word)
		return;
	store_relaxed(&region->rung_epoch, word);
	store_relaxed(&region->launch_ns, now_ns());
	online->rings++;
	if (write(online->doorbell, &one, sizeof one) < 0)
		abort();
}

static void *online_main(void *argument)
{
	struct online *online = argument;

	while (!load_acquire(&online->quit)) {
		for (uint32_t i = next(&online->seed) % 5; i > 0; i--)
			launch(online);
		store_full(&online->client->region->idle_submitted, online->submitted);
		sleep_ns(next(&online->seed) % 200000);
	}
	return NULL;
}

/* The hook of an engine: asks for pauses, and takes them back, as it likes. */
static void *hook_main(void *argument)
{
	struct online *hook = argument;
	struct valve_region *region = hook->client->region;
	uint64_t one = 1;

	while (!load_acquire(&hook->quit)) {
		uint32_t dice = next(&hook->seed);

		store_relaxed(&region->grant_until_ns, dice % 4 ? now_ns() + dice % 4000000 : 0);
		store_release(&region->grant_seq, load_relaxed(&region->grant_seq) + 1);
		if (write(hook->doorbell, &one, sizeof one) < 0)
			abort();
		sleep_ns(next(&hook->seed) % 300000);
	}
	return NULL;
}

static void begin_hook(struct valve_gate *gate, struct online *hook, int32_t service, uint32_t seed)
{
	valve_gate_grantable(gate, 3);
	valve_service_consent(gate, service, 2000000, 0);
	hook->seed = seed;
	hook->client = add_client(gate, 300, VALVE_ROLE_HOOK, service, &hook->doorbell);
	if (pthread_create(&hook->thread, NULL, hook_main, hook) != 0)
		abort();
}

static void end_hook(struct valve_gate *gate, struct online *hook)
{
	store_release(&hook->quit, 1);
	pthread_join(hook->thread, NULL);
	valve_client_free(gate, hook->client);
}

/* Who may grant, and where, changes all the time. */
static void meddle_with_grants(struct valve_gate *gate, const int32_t *service, uint32_t dice)
{
	if (dice % 19 == 0)
		valve_service_consent(gate, service[dice % 2], dice % 3 ? 2000000 : 0, dice % 5 * 100000);
	if (dice % 23 == 0)
		valve_gate_grantable(gate, dice % 4 ? 3 : dice % 3);
}

/* A reclaim that stands ready while the caller sleeps, and the engine's hook that needs it. */
static struct {
	_Alignas(64) uint8_t table[256];
	uint32_t wanted, mode, quit, block;
	int32_t service;
	int hook[2], link[2];
	uint8_t packet[64];
	struct valve_prepared_packet packets;
	struct valve_prepared prepared;
	uint64_t begun, told, taken_back;
	pthread_t thread;
} ready;

static void *need_main(void *unused)
{
	uint32_t seed = 4711;

	(void)unused;
	while (!load_acquire(&ready.quit)) {
		store_release(&ready.wanted, next(&seed) % 2);
		if (send(ready.hook[1], "n", 1, MSG_DONTWAIT) < 0)
			while (recv(ready.hook[0], &(char){0}, 1, MSG_DONTWAIT) > 0)
				;
		sleep_ns(next(&seed) % 200000);
	}
	return NULL;
}

static void begin_ready(struct valve_gate *gate)
{
	struct valve_kv_table *table = (void *)ready.table;

	ready.mode = 1;
	table->entry_offset = sizeof *table;
	ready.service = valve_service_new(gate, 99);
	if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ready.hook) ||
	    socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ready.link) ||
	    valve_prepared_listen(gate, ready.hook[0]) ||
	    pthread_create(&ready.thread, NULL, need_main, NULL))
		abort();
	ready.packets = (struct valve_prepared_packet){
	        .fd = ready.link[0], .bytes = sizeof ready.packet, .at = ready.packet};
	ready.prepared = (struct valve_prepared){.wanted = &ready.wanted,
	                                         .mode = &ready.mode,
	                                         .table = table,
	                                         .blocks = &ready.block,
	                                         .block_count = 1,
	                                         .packet_count = 1,
	                                         .packet = &ready.packets};
}

static void end_ready(struct valve_gate *gate)
{
	store_release(&ready.quit, 1);
	pthread_join(ready.thread, NULL);
	for (uint32_t i = 0; i < 2; i++) {
		close(ready.hook[i]);
		close(ready.link[i]);
	}
	valve_service_free(gate, ready.service);
}

static void begin_hooks(struct valve_gate *gate, struct online *hook, int32_t service, uint32_t seed)
{
	begin_hook(gate, hook, service, seed);
	begin_ready(gate);
}

static void end_hooks(struct valve_gate *gate, struct online *hook)
{
	end_hook(gate, hook);
	end_ready(gate);
	printf("reclaims begun %lu told %lu taken back %lu\n", ready.begun, ready.told, ready.taken_back);
}

struct offline {
	struct valve_client *client;
	uint32_t h_client, h_subdevice, count;
	int fd, doorbell, passed; /* passed: its channels are reached by that file; -1: by our own */
};

static void begin_offline(struct valve_gate *gate, struct offline *offline, uint64_t id, uint32_t gpu)
{
	offline->client = add_client(gate, id, VALVE_ROLE_OFFLINE, -1, &offline->doorbell);
	offline->h_client = fake_client(&offline->fd, &offline->h_subdevice, gpu);
	offline->passed = -1;
}

static uint32_t name_channels(const struct offline *offline, uint32_t from, uint32_t to,
                              struct valve_entry *out)
{
	bool by_file = offline->passed >= 0;

	for (uint32_t i = from; i < to; i++)
		*out++ = (struct valve_entry){
		        .client = offline->client,
		        .reach = by_file ? VALVE_REACH_FD : VALVE_REACH_OWN,
		        .h_client = offline->h_client,
		        .h_channel = 0x5C000000 + i,
		        .fd = offline->passed,
		        .h_target = by_file ? offline->h_client : 0,
		        .h_subdevice = by_file ? offline->h_subdevice : 0,
		};
	return to > from ? to - from : 0;
}

static bool runs(const struct offline *offline, uint32_t gpus)
{
	for (uint32_t g = 0; g < OFFLINE; g++)
		for (uint32_t i = 0; (gpus & 1u << g) && i < offline[g].count; i++)
			if (fake_is_on(offline[g].h_client, 0x5C000000 + i) == 1)
				return true;
	return false;
}

/* What was told was told while nothing ran, and all stands until the caller lets go. */
static void sleep_beside(struct valve_gate *gate, uint32_t gpus, uint32_t dice, const struct offline *offline)
{
	char packet[64];

	ready.prepared.gpus = gpus;
	valve_prepared_put(gate, &ready.prepared, 1);
	valve_prepared_rest(gate, ready.service);
	sleep_ns(dice % 300000);
	if (valve_prepared_wake(gate) < 0)
		return;
	ready.begun++;
	sleep_ns(dice % 3 * 50000);
	if (valve_prepared_end(gate, dice & 1) < 0) {
		ready.taken_back++;
	} else {
		ready.told++;
		if (recv(ready.link[1], packet, sizeof packet, MSG_DONTWAIT) != sizeof packet ||
		    runs(offline, gpus))
			abort();
	}
	valve_service_gpus(gate, ready.service, 0);
}

/* What is new is stopped now if the GPU is; what left is run, however late. */
static void change_channels(struct valve_gate *gate, struct offline *offline, uint32_t gpu, uint32_t wanted)
{
	struct valve_entry all[CHANNELS], more[CHANNELS], fewer[CHANNELS];
	uint32_t count = name_channels(offline, 0, wanted, all),
	         come = name_channels(offline, offline->count, wanted, more),
	         gone = name_channels(offline, wanted, offline->count, fewer);

	valve_arm(gate, gpu, all, count, more, come, fewer, gone, NULL);
	offline->count = wanted;
}

/* A client that goes right after mails that name it and its file, and leaves its channels late if the driver refuses. */
static void come_and_leave(struct valve_gate *gate, const struct offline *there, uint32_t gpu)
{
	struct offline one = {0};
	struct valve_entry all[CHANNELS + 1], mine;
	uint32_t count = name_channels(there, 0, there->count, all);

	begin_offline(gate, &one, 901, gpu);
	one.passed = dup(one.fd);
	if (valve_client_take_fd(one.client, one.passed) < 0)
		abort();
	fake_channel(one.h_client, 0x5C000000, gpu);
	name_channels(&one, 0, 1, &mine);
	all[count] = mine;
	valve_arm(gate, gpu, all, count + 1, &mine, 1, NULL, 0, NULL);
	valve_gpu_slice(gate, gpu, one.client, one.passed, one.h_client, 1, 1000);
	valve_arm(gate, gpu, all, count, NULL, 0, &mine, 1, NULL);
	valve_client_free(gate, one.client);
	close(one.fd);
	fake_free_channel(one.h_client, 0x5C000000);
}

static void hang(uint32_t stops, uint32_t enables)
{
	store_relaxed(&fake_rules.hang, stops);
	store_relaxed(&fake_rules.hang_enable, enables);
}

/* The watchdog gives a stop up, and then the issuer finds that a channel of it was freed without a word. */
static void stop_late_and_less(struct valve_gate *gate, const int32_t *service, struct offline *offline)
{
	for (uint32_t s = 0; s < 2; s++)
		valve_wake(gate, service[s]);
	change_channels(gate, offline, 0, 2);
	fake_free_channel(offline->h_client, 0x5C000001);
	hang(1, 0);
	valve_hold(gate, service[0]);
	while (load_relaxed(&gate->gpu[0].flight) % 4 != FLIGHT_HELD)
		sleep_ns(100000);
	hang(0, 0);
	valve_gate_settle(gate, 10000000000ull);
	change_channels(gate, offline, 0, 0);
	fake_channel(offline->h_client, 0x5C000001, 0);
	valve_hold(gate, service[1]);
}

/* Whoever finds its word open rings; and a ring closes the word. */
static bool is_heard(struct online *online)
{
	launch(online);
	for (uint32_t i = 0; i < 10000; i++) {
		if (load_full(&online->client->control->gate_epoch) % 2 == 0)
			return true;
		sleep_ns(1000000);
	}
	fprintf(stderr, "a ring was never heard\n");
	return false;
}

static bool end_online(struct valve_gate *gate, struct online *online)
{
	bool heard;

	store_release(&online->quit, 1);
	pthread_join(online->thread, NULL);
	heard = is_heard(online);
	valve_client_free(gate, online->client);
	return heard;
}

/* What the caller does to the services while their clients launch. */
static bool meddle(struct valve_gate *gate, const int32_t *service, struct offline *offline, uint32_t dice,
                   uint32_t *seed)
{
	static const struct valve_wake_rule rule = {
	        .cooldown_ns = 1,
	        .learn_ns = UINT64_MAX,
	        .watcher_lease_ns = UINT64_MAX,
	        .refused_backoff_ns = 10000,
	        .look_share = 16,
	        .look_least_ns = 10000,
	        .look_most_ns = 100000,
	};
	bool woken = false;
	int doorbell;

	if (dice % 3) /* takes the permission back, and the listener opened or looks just now */
		woken = valve_wake(gate, service[dice % 2]) == VALVE_WOKEN;
	else
		valve_service_permit(gate, service[dice % 2], dice % 5 ? &rule : NULL);
	if (dice % 5 == 0)
		fake_refuse_enables(dice % 4);
	if (dice % 7 == 0)
		change_channels(gate, &offline[dice % OFFLINE], dice % OFFLINE, next(seed) % CHANNELS);
	if (dice % 11 == 0)
		valve_hold(gate, service[dice % 2]);
	if (dice % 13 == 0)
		valve_service_gpus(gate, service[0], dice % 26 ? 1 : 2);
	if (dice % 29 == 0)
		come_and_leave(gate, &offline[dice % OFFLINE], dice % OFFLINE);
	valve_gate_alive(gate);
	if (dice % 17 == 0)
		valve_client_free(gate,
		                  add_client(gate, 900, VALVE_ROLE_ONLINE, service[dice % 2], &doorbell));
	return woken;
}

int main(int argc, char **argv)
{
	struct valve_config config = {
	        .lease_ns = 5000000,
	        .hang_ns = argc > 3 ? 1000000 : 2000000000,
	        .order_ns = 1000000,
	};
	uint32_t seed = argc > 1 ? (uint32_t)atoi(argv[1]) | 1 : 1,
	         rounds = argc > 2 ? (uint32_t)atoi(argv[2]) : 300;
	bool hangs = argc > 3, heard = true;
	struct online online[ONLINE] = {0};
	struct online hook = {0};
	struct offline offline[OFFLINE] = {0};
	struct valve_grants grants;
	struct valve_stamp stamps[64];
	struct valve_gate *gate;
	int32_t service[2];
	uint64_t seen[7] = {0};
	uint32_t woken = 0;

	fake_reset();
	gate = valve_gate_open(&config, fake_machine());
	for (uint32_t g = 0; g < OFFLINE; g++)
		begin_offline(gate, &offline[g], 100 + g, g);
	for (uint32_t i = 0; i < OFFLINE * CHANNELS; i++)
		fake_channel(offline[i % OFFLINE].h_client, 0x5C000000 + i / OFFLINE, i % OFFLINE);
	for (uint32_t s = 0; s < 2; s++) {
		service[s] = valve_service_new(gate, s + 1);
		valve_service_gpus(gate, service[s], s ? 3 : 1);
	}
	if (hangs)
		stop_late_and_less(gate, service, &offline[0]);
	for (uint32_t i = 0; i < ONLINE; i++) {
		online[i].gate = gate;
		online[i].gpus = i % 2 ? 2 : 0; /* the other service's GPUs change */
		online[i].seed = seed + 7 * i + 1;
		online[i].client =
		        add_client(gate, 200 + i, VALVE_ROLE_ONLINE, service[i % 2], &online[i].doorbell);
		if (pthread_create(&online[i].thread, NULL, online_main, &online[i]) != 0)
			abort();
	}
	begin_hooks(gate, &hook, service[0], seed + 99);
	for (uint32_t round = 0; round < rounds; round++) {
		uint32_t count, dice = next(&seed);

		woken += meddle(gate, service, offline, dice, &seed);
		meddle_with_grants(gate, service, dice);
		if (hangs)
			hang(dice % 31 < 4, dice % 37 < 3);
		count = valve_stamps_take(gate, stamps, 64);
		for (uint32_t i = 0; i < count; i++)
			seen[stamps[i].kind]++;
		sleep_beside(gate, 1 + dice % 3, next(&seed), offline);
	}
	end_hooks(gate, &hook);
	valve_service_grants(gate, service[0], &grants);
	for (uint32_t i = 0; i < ONLINE; i++)
		heard &= end_online(gate, &online[i]);
	hang(0, 0);
	for (uint32_t s = 0; s < 2; s++)
		valve_service_free(gate, service[s]);
	fake_refuse_enables(0);
	for (uint32_t i = 0; i < 10000 && fake_off_count();
	     i++) /* what is late is tried again every 256 ms */
		sleep_ns(1000000);
	if (valve_gate_settle(gate, 10000000000ull) != 0 || fake_off_count() != 0) {
		fprintf(stderr, "channels left off: %u\n", fake_off_count());
		return 1;
	}
	for (uint32_t g = 0; g < OFFLINE; g++) {
		change_channels(gate, &offline[g], g, 0);
		valve_client_free(gate, offline[g].client);
		close(offline[g].fd);
	}
	printf("woken %u gates %lu holds %lu refused %lu failed %lu rings %lu grants %lu broken %lu\n", woken,
	       seen[VALVE_STAMP_GATE], seen[VALVE_STAMP_HOLD], seen[VALVE_STAMP_WAKE_REFUSED],
	       seen[VALVE_STAMP_GATE_FAILED], online[0].rings + online[1].rings + online[2].rings,
	       grants.grants, grants.broken);
	return valve_gate_close(gate) || !heard || !seen[VALVE_STAMP_GATE_FAILED] == hangs || !woken ||
	       !seen[VALVE_STAMP_GATE] || !ready.told;
}
