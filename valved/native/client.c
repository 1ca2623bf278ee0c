/*
 * client.c - one connected process: its two shared pages, its doorbell and its order line. Caller thread only, but
 * for client_is_idle's data, which the client itself writes at any time and in any way it likes: every offset that a
 * region states is checked against the size that we gave it, each time.
 */
#include "internal.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static uint32_t free_slot(struct valve_gate *gate)
{
	for (uint32_t i = 0; i < MAX_CLIENTS; i++) {
		if (!gate->client[i])
			return i;
	}
	return MAX_CLIENTS;
}

static void *map(int fd, size_t bytes, int protection)
{
	void *at = mmap(NULL, bytes, protection, MAP_SHARED, fd, 0);

	return at == MAP_FAILED ? NULL : at;
}

static void unmap(struct valve_client *client)
{
	if (client->control)
		munmap(client->control, VALVE_CONTROL_BYTES);
	if (client->region)
		munmap(client->region, VALVE_REGION_BYTES);
}

static void fill_control(struct valve_gate *gate, struct valve_client *client, uint64_t service_id)
{
	struct valve_control *control = client->control;

	control->abi = VALVE_REGION_ABI;
	control->bytes = VALVE_CONTROL_BYTES;
	control->features = VALVE_FEATURE_GAPS | VALVE_FEATURE_HINT | VALVE_FEATURE_SELF_GATE |
	                    VALVE_FEATURE_HOLD | VALVE_FEATURE_GRANT;
	control->role = client->role;
	control->service = service_id;
	control->lease_ns = gate->config.lease_ns;
	control->quiet_us = gate->config.quiet_us;
	store_relaxed(&control->heartbeat_ns, now_ns());
	store_release(&control->magic, VALVE_CONTROL_MAGIC); /* last: a page with a magic is a whole page */
}

/* Put the client into its service's list or take it out, by swapping the list. The gate word follows the epoch: a
 * ring while we write may have moved it on, so look again after the list is public. */
void service_enlist(struct valve_gate *gate, struct valve_client *client, bool in)
{
	struct service *service = &gate->service[client->service];
	struct client_list *old = service->clients;
	uint32_t count = old ? old->count : 0, kept = 0;
	struct client_list *list = calloc(1, sizeof *list + (count + 1) * sizeof *list->client);

	if (!list)
		abort(); /* a few bytes: the process is lost anyway, and its successor takes over */
	for (uint32_t i = 0; i < count; i++) {
		if (old->client[i] != client)
			list->client[kept++] = old->client[i];
	}
	if (in)
		list->client[kept++] = client;
	list->count = kept;
	if (in)
		store_release(&client->control->gate_epoch, load_full(&service->epoch));
	store_full(&service->clients,
	           list); /* pairs with raise_words: the listener walks this one from now on */
	if (in) {
		word_raise(&client->control->gate_epoch, load_full(&service->epoch));
		waking_kick(gate); /* it may be a second engine: slice_is_sole */
	}
	listener_quiesce(gate);
	free(old);
}

/* On success doorbell and order are the gate's to close; the memfds stay the caller's. */
struct valve_client *valve_client_new(struct valve_gate *gate, uint64_t id, uint32_t role, int32_t service,
                                      uint64_t service_id, int control, int region, int doorbell, int order)
{
	uint32_t slot = free_slot(gate);
	struct valve_client *client = slot < MAX_CLIENTS ? calloc(1, sizeof *client) : NULL;

	if (!client)
		return NULL;
	client->control = map(control, VALVE_CONTROL_BYTES, PROT_READ | PROT_WRITE);
	client->region = map(region, VALVE_REGION_BYTES, PROT_READ);
	if (!client->control || !client->region) {
		unmap(client);
		free(client);
		return NULL;
	}
	client->id = id;
	client->errand.runners = &gate->errands;
	client->role = role;
	client->slot = slot;
	client->generation = ++gate->generation;
	client->service = service;
	client->doorbell = doorbell;
	client->order = order;
	memset(client->passed, -1, sizeof client->passed);
	fill_control(gate, client, service_id);
	if (service >= 0)
		service_enlist(gate, client, true);
	pthread_mutex_lock(&gate->roster_lock);
	store_full(&gate->client[slot], client);
	if (slot >= gate->places)
		gate->places = slot + 1;
	pthread_mutex_unlock(&gate->roster_lock);
	if (service >= 0 && listener_add(gate, client) != 0) {
		client->doorbell = client->order = -1; /* still the caller's */
		valve_client_free(gate, client);
		return NULL;
	}
	return client;
}

/* Once no plan and no mail names a dropped client. It may be gone afterwards. */
void client_reap(struct valve_client *client)
{
	if (client->dropped && !client->refs)
		errand_do(client, ERRAND_END);
}

/* By the thread that runs its last errand. The doorbell stays in the listeners' epoll: taking it out would hold the epoll's lock
 * for as long as the client rings. It is muted, and goes with its file. */
void client_end(struct valve_client *client)
{
	for (uint32_t i = 0; i < MAX_PASSED; i++)
		close_fd(client->passed[i]);
	close_fd(client->doorbell);
	close_fd(client->order);
	unmap(client);
	free(client);
}

/* A passed fd keeps the workload's channels and memory alive, so it goes now, even if an ioctl on it still hangs: the
 * number stays ours (the plan may yet use it, and finds ENOTTY) until the last plan that names it is gone, and so does the
 * file where no other can be put in its place. By a thread that may be kept: the driver takes down what hangs on it. */
void client_give_up_passed(struct valve_client *client)
{
	for (uint32_t i = 0; i < MAX_PASSED; i++) {
		while (client->passed[i] >= 0 &&
		       dup3(client->errand.runners->ringer.nothing, client->passed[i], O_CLOEXEC) < 0 &&
		       (errno == EBUSY || errno == EINTR))
			;
	}
}

void valve_client_leaves(struct valve_client *client, uint32_t lives_on)
{
	store_relaxed(&client->leaves, lives_on);
}

void valve_client_part(struct valve_gate *gate, struct valve_client *client)
{
	pthread_mutex_lock(&gate->roster_lock);
	if (gate->client[client->slot] == client) /* else it has parted, and the slot is another's */
		store_full(&gate->client[client->slot], NULL);
	pthread_mutex_unlock(&gate->roster_lock);
}

void valve_client_free(struct valve_gate *gate, struct valve_client *client)
{
	valve_client_part(gate, client);
	if (client->service >= 0) {
		listener_mute(gate, client, true);
		service_enlist(gate, client, false); /* waits until the listener is out of this client, too */
		if (client->role == VALVE_ROLE_HOOK)
			waking_kick(gate); /* no hook moves the end of its slices on */
	}
	store_release(&client->dropped, 1); /* pairs with the acquire in late.c */
	errand_do(client,
	          client->refs ? ERRAND_GIVE_UP : ERRAND_END); /* a plan or a mail may name it still */
}

bool client_has_passed(const struct valve_client *client, int fd)
{
	for (uint32_t i = 0; i < MAX_PASSED; i++) {
		if (fd >= 0 && client->passed[i] == fd)
			return true;
	}
	return false;
}

/* From here on the fd is the gate's to close. */
int valve_client_take_fd(struct valve_client *client, int fd)
{
	for (uint32_t i = 0; i < MAX_PASSED; i++) {
		if (client->passed[i] < 0) {
			client->passed[i] = fd;
			return 0;
		}
	}
	close(fd);
	return -EMFILE;
}

/* 0: its client has not filled it in yet. 1: it makes sense. Else we do not understand it. */
static int region_state(const struct valve_region *region)
{
	uint64_t magic = load_acquire(&region->magic);
	uint64_t slots, gaps;

	if (magic == 0)
		return 0;
	slots = (uint64_t)load_relaxed(&region->slot_offset) + load_relaxed(&region->slot_count) * 64ull;
	gaps = (uint64_t)load_relaxed(&region->gap_offset) + load_relaxed(&region->gap_count) * 16ull;
	if (magic != VALVE_REGION_MAGIC || slots > VALVE_REGION_BYTES || gaps > VALVE_REGION_BYTES ||
	    load_relaxed(&region->slot_offset) % 64 || load_relaxed(&region->gap_offset) % 16)
		return -EPROTO;
	return 1;
}

/* The number of slots rises, too: read before them, and after what the caller compares with. */
static uint64_t sum_submitted(const struct valve_region *region)
{
	uint32_t offset = load_relaxed(&region->slot_offset), count = load_full(&region->slot_count);
	uint64_t sum = 0;

	if (count > VALVE_SLOTS || offset % 64 || offset + count * 64ull > VALVE_REGION_BYTES)
		return UINT64_MAX; /* changed since it was checked: a liar, and so never idle */
	for (uint32_t i = 0; i < count; i++) {
		const char *at = (const char *)region + offset + i * sizeof(struct valve_slot);

		sum += load_full((const uint64_t *)(const void *)at);
	}
	return sum;
}

/* All that was ever submitted is proven done. The proof is read before the counters, which only grow: if they agree,
 * they agreed at one instant. An online process that has not filled in its region proves nothing: one that ran before
 * this valved did may be launching all the while, and reads no word of ours yet. A hook has nothing to prove. */
bool client_is_idle(const struct valve_client *client)
{
	const struct valve_region *region = client->region;
	uint64_t idle;

	switch (region_state(region)) {
	case 0:
		return client->role != VALVE_ROLE_ONLINE;
	case 1:
		idle = load_full(&region->idle_submitted);
		return sum_submitted(region) == idle;
	default:
		return false;
	}
}

/* An online process that has launched, or may have: it has not filled in its region. */
bool client_may_launch(const struct valve_client *client)
{
	const struct valve_region *region = client->region;

	return client->role == VALVE_ROLE_ONLINE && (region_state(region) != 1 || sum_submitted(region));
}

static void read_gaps(struct valve_client *client, struct valve_view *out)
{
	const struct valve_region *region = client->region;
	uint32_t offset = load_relaxed(&region->gap_offset), ring = load_relaxed(&region->gap_count);
	uint64_t total = load_acquire(&region->gaps); /* pairs with the watcher's release after the entry */
	uint64_t from = client->gaps_seen;

	if (ring == 0 || ring > VALVE_GAPS || offset % 16 || offset + ring * 16ull > VALVE_REGION_BYTES)
		return;
	if (from > total || total - from > ring)
		from = total > ring ? total - ring : 0;
	for (; from < total; from++) {
		const char *at = (const char *)region + offset + (from % ring) * sizeof(struct valve_gap);
		const struct valve_gap *gap = (const struct valve_gap *)(const void *)at;

		out->gaps[out->gap_count].end_ns = load_relaxed(&gap->end_ns);
		out->gaps[out->gap_count++].gap_ns = load_relaxed(&gap->gap_ns);
	}
	client->gaps_seen = total;
}

/* One look. 0, or -EPROTO for a region that makes no sense (out is zero then). A gap is handed out once, to the
 * first look that asks for gaps. */
int valve_client_view(struct valve_client *client, struct valve_view *out, uint32_t with_gaps)
{
	const struct valve_region *region = client->region;
	int state = region_state(region);
	uint32_t seq, tries = 0;

	memset(out, 0, sizeof *out);
	if (state <= 0)
		return state;
	out->filled = 1;
	do { /* the watcher's seqlock; a client that leaves it odd gets a torn look at its own words */
		seq = load_acquire(&region->idle_seq);
		out->idle_submitted = load_acquire(&region->idle_submitted); /* acquire: before the second */
		out->idle_ns = load_acquire(&region->idle_ns);               /* look at idle_seq */
		out->watcher_ns = load_acquire(&region->watcher_ns);
	} while ((seq % 2 || seq != load_relaxed(&region->idle_seq)) && ++tries < 100);
	out->submitted = sum_submitted(region);
	out->launch_ns = load_relaxed(&region->launch_ns);
	out->rings = load_relaxed(&region->rings);
	out->busy = load_relaxed(&region->busy);
	out->features = load_relaxed(&region->features);
	out->open_requests = load_relaxed(&region->open_requests);
	out->hint_ns = load_relaxed(&region->hint_ns);
	out->requests_started = load_relaxed(&region->requests_started);
	out->requests_ended = load_relaxed(&region->requests_ended);
	out->useful_tokens = load_relaxed(&region->useful_tokens);
	out->self_stops = load_relaxed(&region->self_stops);
	out->order_done = load_relaxed(&region->order_done);
	out->order_status = load_relaxed(&region->order_status);
	if (with_gaps)
		read_gaps(client, out);
	return 0;
}

void valve_client_watch(struct valve_client *client, uint32_t on)
{
	store_release(&client->control->watch, on); /* the watcher sleeps on this word */
	futex_wake_shared(&client->control->watch);
}

void valve_client_online(struct valve_client *client, uint32_t on)
{
	store_release(&client->control->online_registered, on);
}

void valve_client_memory(struct valve_client *client, uint64_t handle_bytes, uint64_t budget_bytes,
                         uint64_t size_rule)
{
	store_relaxed(&client->control->kv_budget_bytes, budget_bytes);
	store_relaxed(&client->control->kv_size_rule, size_rule);
	store_release(&client->control->kv_handle_bytes,
	              handle_bytes); /* last: it says that the others count */
}

/* Free handles of one GPU, and what an offline client must leave free there. The uuid of an index never changes. */
void valve_client_kv_free(struct valve_client *client, uint32_t index, const uint8_t *gpu_uuid,
                          uint64_t bytes, uint64_t keep_bytes)
{
	struct valve_kv_free *entry =
	        (struct valve_kv_free *)((char *)client->control + VALVE_KV_FREE_OFFSET) + index;

	if (index >= VALVE_KV_FREE_GPUS)
		return;
	memcpy(entry->gpu_uuid, gpu_uuid, sizeof(entry->gpu_uuid));
	store_release(&entry->keep_bytes, keep_bytes);
	store_release(&entry->bytes, bytes);
}

struct valve_grant *client_grant(const struct valve_client *client)
{
	return (struct valve_grant *)(void *)((char *)client->control + VALVE_GRANT_OFFSET);
}

/* To an engine's hook: what its owner stated, and whether it may ask for pauses. */
void valve_client_offer(struct valve_client *client, uint32_t consented, uint64_t tpot_ns, uint64_t gap_ns,
                        uint32_t by_slices)
{
	struct valve_grant *grant = client_grant(client);

	store_relaxed(&grant->by_slices, by_slices);
	store_relaxed(&grant->tpot_ns, tpot_ns);
	store_relaxed(&grant->gap_ns, gap_ns);
	store_release(&grant->consented, consented); /* last: it says that the others count */
}

/* The last step of an engine, as its hook says. */
void valve_client_step(const struct valve_client *client, uint64_t *begin_ns, uint64_t *end_ns)
{
	const struct valve_region *region = client->region;

	*end_ns = load_acquire(&region->step_end_ns);
	*begin_ns = load_relaxed(&region->step_begin_ns);
}

/* Hold its launches on account of no GPU: a mapping order that hangs may leave a hole until it comes back. */
void valve_client_hold(struct valve_client *client, uint32_t on)
{
	order_set(client, ORDER_NO_GPU, VALVE_ORDER_HOLD, on, false);
}
