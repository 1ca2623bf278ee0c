/*
 * race.c - the gate under a sanitizer: listener, issuers and watchdog of the real gate, online clients that launch and
 * prove idle in threads of this process, a caller that wakes and that adds and removes channels and clients, over the
 * fake driver, which now and then refuses to enable. The pages are used through the gate's own mapping, so that the
 * sanitizer sees both sides of each word.
 *
 * Checked at every launch that found its gate word closed: the GPUs are held, now and until the launch is proven done.
 * Checked now and then: where a GPU is called stopped, every channel of its plan is off. At the end each ring is heard, all
 * channels are on, and no order stands. With HANGS driver calls hang now and then, for longer than the watchdog's patience.
 *
 *     race SEED ROUNDS [HANGS]
 */
#include "fake_rm.h"
#include "peers.h"

#include <stdio.h>
#include <string.h>

enum { ONLINE = 3, OFFLINE = 2, CHANNELS = 70, PATIENCE_MS = 200000 };

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
	peer_ring(online->doorbell);
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

	while (!load_acquire(&hook->quit)) {
		uint32_t dice = next(&hook->seed);

		store_relaxed(&region->grant_until_ns, dice % 4 ? now_ns() + dice % 4000000 : 0);
		store_release(&region->grant_seq, load_relaxed(&region->grant_seq) + 1);
		peer_ring(hook->doorbell);
		sleep_ns(next(&hook->seed) % 300000);
	}
	return NULL;
}

static void begin_hook(struct valve_gate *gate, struct online *hook, int32_t service, uint32_t seed)
{
	valve_gate_grantable(gate, 3);
	valve_service_consent(gate, service, 2000000, 0);
	hook->seed = seed;
	hook->client = peer_new(gate, 300, VALVE_ROLE_HOOK, service, &hook->doorbell);
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

/* A process that is stopped by orders, and obeys them at its leisure. */
struct obeying {
	struct valve_client *client;
	struct valve_entry channel;
	uint32_t seed, quit;
	pthread_t thread;
};

static struct obeying obeying; /* on GPU 0 */

static void *obeying_main(void *argument)
{
	struct obeying *it = argument;

	while (!load_acquire(&it->quit)) {
		store_release(&it->client->region->order_done, load_acquire(&it->client->control->order_seq));
		sleep_ns(next(&it->seed) % 100000);
	}
	return NULL;
}

static void begin_obeying(struct valve_gate *gate, uint32_t seed)
{
	int doorbell;

	obeying.seed = seed;
	obeying.client = peer_new(gate, 400, VALVE_ROLE_OFFLINE, -1, &doorbell);
	obeying.channel = (struct valve_entry){.client = obeying.client,
	                                       .reach = VALVE_REACH_HOLD,
	                                       .h_client = 0xC1EE0000,
	                                       .h_channel = 1,
	                                       .fd = -1};
	if (pthread_create(&obeying.thread, NULL, obeying_main, &obeying) != 0)
		abort();
}

static bool end_obeying(struct valve_gate *gate)
{
	bool is_let = load_full(&obeying.client->control->order) == VALVE_ORDER_RUN &&
	              load_full(&obeying.client->control->gate_epoch) % 2 == 0;

	store_release(&obeying.quit, 1);
	pthread_join(obeying.thread, NULL);
	valve_client_free(gate, obeying.client);
	if (!is_let)
		fprintf(stderr, "an order stands that nothing needs\n");
	return is_let;
}

struct offline {
	struct valve_client *client;
	uint32_t h_client, h_subdevice, count;
	int fd, doorbell, passed; /* passed: its channels are reached by that file; -1: by our own */
};

static void begin_offline(struct valve_gate *gate, struct offline *offline, uint64_t id, uint32_t gpu)
{
	offline->client = peer_new(gate, id, VALVE_ROLE_OFFLINE, -1, &offline->doorbell);
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

/* What is new is stopped now if the GPU is; what left is run, however late. */
static void change_channels(struct valve_gate *gate, struct offline *offline, uint32_t gpu, uint32_t wanted)
{
	struct valve_entry all[CHANNELS + 1], more[CHANNELS], fewer[CHANNELS];
	uint32_t count = name_channels(offline, 0, wanted, all),
	         come = name_channels(offline, offline->count, wanted, more),
	         gone = name_channels(offline, wanted, offline->count, fewer);

	if (gpu == 0 && wanted && obeying.client)
		all[count++] = obeying.channel;
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

/* A channel is freed without a word, and made anew with its numbers. */
static void lose_one(struct valve_gate *gate, struct offline *offline, uint32_t gpu, uint32_t dice)
{
	uint32_t h_channel = 0x5C000000 + (offline->count ? dice % offline->count : 0),
	         count = offline->count;
	struct valve_gone gone[GONE];

	if (!count)
		return;
	fake_free_channel(offline->h_client, h_channel);
	sleep_ns(dice % 2000000);
	if (dice % 2)
		valve_gpu_gone(gate, gpu, gone, GONE);
	change_channels(gate, offline, gpu, 0); /* the caller forgets it, and what it is to run with it */
	fake_channel(offline->h_client, h_channel, gpu);
	change_channels(gate, offline, gpu, count);
}

/* Nothing opened the GPU in between if it was closed no more often. */
static bool is_stopped(struct valve_gate *gate, uint32_t gpu, uint64_t *closings)
{
	uint64_t holders = load_full(&gate->gpu[gpu].holders);

	*closings = holders >> 32;
	return holders_count(holders) && valve_gpu_state(gate, gpu) == VALVE_GPU_STOPPED;
}

static void must_be_off(struct valve_gate *gate, const struct offline *offline, uint32_t gpu)
{
	uint64_t before, after;
	uint32_t on = 0;

	if (!is_stopped(gate, gpu, &before))
		return;
	for (uint32_t i = 0; i < offline->count; i++)
		on += fake_is_on(offline->h_client, 0x5C000000 + i) == 1;
	if (on && is_stopped(gate, gpu, &after) && before == after) {
		fprintf(stderr, "GPU %u is called stopped, and %u channels are on\n", gpu, on);
		abort();
	}
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
	valve_gate_settle(gate, PATIENCE_MS * 1000000ull);
	change_channels(gate, offline, 0, 0);
	fake_channel(offline->h_client, 0x5C000001, 0);
	valve_hold(gate, service[1]);
}

/* Whoever finds its word open rings; and a ring closes the word. */
static bool is_heard(struct online *online)
{
	launch(online);
	for (uint32_t i = 0; i < PATIENCE_MS; i++) {
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
	if (dice % 31 == 0)
		lose_one(gate, &offline[dice % OFFLINE], dice % OFFLINE, next(seed));
	valve_gate_alive(gate);
	if (dice % 17 == 0)
		valve_client_free(gate, peer_new(gate, 900, VALVE_ROLE_ONLINE, service[dice % 2], &doorbell));
	return woken;
}

/* What is late is tried again every 256 ms. */
static bool is_all_on(struct valve_gate *gate)
{
	for (uint32_t i = 0; i < PATIENCE_MS && fake_off_count(); i++)
		sleep_ns(1000000);
	if (valve_gate_settle(gate, PATIENCE_MS * 1000000ull) == 0 && fake_off_count() == 0)
		return true;
	fprintf(stderr, "channels left off: %u\n", fake_off_count());
	return false;
}

int main(int argc, char **argv)
{
	struct valve_config config = {
	        .lease_ns = 5000000,
	        .hang_ns = argc > 3 ? 1000000 : 60000000000,
	        .order_ns = argc > 3 ? 1000000 : 60000000000,
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
		        peer_new(gate, 200 + i, VALVE_ROLE_ONLINE, service[i % 2], &online[i].doorbell);
		if (pthread_create(&online[i].thread, NULL, online_main, &online[i]) != 0)
			abort();
	}
	begin_hook(gate, &hook, service[0], seed + 99);
	begin_obeying(gate, seed + 77);
	for (uint32_t round = 0; round < rounds; round++) {
		uint32_t count, dice = next(&seed);

		woken += meddle(gate, service, offline, dice, &seed);
		meddle_with_grants(gate, service, dice);
		if (hangs)
			hang(dice % 31 < 4, dice % 37 < 3);
		for (uint32_t g = 0; g < OFFLINE; g++)
			must_be_off(gate, &offline[g], g);
		count = valve_stamps_take(gate, stamps, 64);
		for (uint32_t i = 0; i < count; i++)
			seen[stamps[i].kind]++;
		sleep_ns(next(&seed) % 300000);
	}
	end_hook(gate, &hook);
	valve_service_grants(gate, service[0], &grants);
	for (uint32_t i = 0; i < ONLINE; i++)
		heard &= end_online(gate, &online[i]);
	hang(0, 0);
	for (uint32_t s = 0; s < 2; s++)
		valve_service_free(gate, service[s]);
	fake_refuse_enables(0);
	if (!is_all_on(gate))
		return 1;
	for (uint32_t g = 0; g < OFFLINE; g++) {
		change_channels(gate, &offline[g], g, 0);
		valve_client_free(gate, offline[g].client);
		close(offline[g].fd);
	}
	heard &= end_obeying(gate);
	printf("woken %u gates %lu holds %lu refused %lu failed %lu rings %lu grants %lu broken %lu\n", woken,
	       seen[VALVE_STAMP_GATE], seen[VALVE_STAMP_HOLD], seen[VALVE_STAMP_WAKE_REFUSED],
	       seen[VALVE_STAMP_GATE_FAILED], online[0].rings + online[1].rings + online[2].rings,
	       grants.grants, grants.broken);
	return valve_gate_close(gate) || !heard || !seen[VALVE_STAMP_GATE_FAILED] == hangs || !woken ||
	       !seen[VALVE_STAMP_GATE];
}
