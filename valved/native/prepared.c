/*
 * prepared.c - a reclaim of which the first part was worked out before its need. In the flow: the link of an engine's
 * hook becomes readable -> its book wants more than the engine can get -> the GPUs are held -> once all of them stand,
 * the table of the engine that loses says so, and the orders are sent. Python's books follow.
 *
 * Only while Python's loop sleeps (valve_prepared_rest): so nothing of what this rests on can be about to change, and
 * when the loop wakes it hears first of all whether one has begun. From then on there are two ends: the thread by which
 * the last GPU came to stand carries it out, or the caller takes it back untouched (valve_prepared_end). Whoever swaps
 * the word does it, and nobody else reads what a prepared one points to.
 */
#include "internal.h"
#include "link.h"

#include <sys/epoll.h>
#include <sys/socket.h>

/* gate.prepared_word: number of the arming << 3 | state. The number tells one that has begun from the next. */
enum prepared_state {
	OFF = 0,
	ARMED = 1,   /* the loop sleeps */
	CLAIMED = 2, /* a thread reads what is wanted, or takes the holds */
	BEGUN = 3,   /* the GPUs are held */
	GOING = 4,   /* all of them stand: it is being told and sent */
	TOLD = 5,
};
#define STATE_OF(word) ((word) & 7u)

static bool turn_from(struct valve_gate *gate, uint32_t word, enum prepared_state to)
{
	return compare_swap(&gate->prepared_word, &word, (word & ~7u) | to);
}

static void tell(struct valve_prepared *prepared, uint64_t now)
{
	struct valve_kv_table *table = prepared->table;
	uint32_t *entry = (uint32_t *)(void *)((char *)table + table->entry_offset);

	for (uint32_t i = 0; i < prepared->block_count; i++) {
		uint32_t *at = &entry[prepared->blocks[i]];

		store_relaxed(at, ((*at >> 1) + 1) << 1); /* another generation, without memory */
	}
	store_relaxed(&table->backed_blocks, prepared->backed);
	store_relaxed(&table->changed_ns, now);
	store_release(&table->epoch, table->epoch + 1); /* pairs with the hook's acquire: all entries */
}

/* Up to the first that cannot be sent now. */
static void send_packets(struct valve_prepared *prepared, uint64_t now)
{
	for (; prepared->sent < prepared->packet_count; prepared->sent++) {
		struct valve_prepared_packet *packet = &prepared->packet[prepared->sent];

		((struct valve_link_header *)(void *)packet->at)->sent_ns = now;
		if (send(packet->fd, packet->at, packet->bytes, MSG_DONTWAIT | MSG_NOSIGNAL) !=
		    (ssize_t)packet->bytes)
			return;
	}
}

static bool all_stand(struct valve_gate *gate, uint32_t gpus)
{
	for (uint32_t i = 0; i < gate->gpu_count; i++)
		if ((gpus & 1u << i) && valve_gpu_state(gate, i) != VALVE_GPU_STOPPED)
			return false;
	return !(load_full(&gate->let) & gpus);
}

/* Any thread that has brought a GPU to stand, or has held the GPUs: each of them first says so and looks here then. */
void prepared_go(struct valve_gate *gate)
{
	uint32_t word = load_full(&gate->prepared_word);
	struct valve_prepared *prepared;

	if (STATE_OF(word) != BEGUN || !all_stand(gate, load_relaxed(&gate->prepared_gpus)) ||
	    !turn_from(gate, word, GOING))
		return; /* the swap fails if those were the GPUs of another one */
	prepared = gate->prepared_begun;
	prepared->told_ns = now_ns();
	tell(prepared, prepared->told_ns);
	send_packets(prepared, prepared->told_ns);
	store_release(&gate->prepared_word, (word & ~7u) | TOLD);
}

static bool is_needed(const struct valve_prepared *prepared)
{
	return load_acquire(prepared->wanted) > prepared->had && load_acquire(prepared->mode);
}

/* The listener, or the caller when its loop wakes: whoever comes first begins. *taken: as of service_hold. */
void prepared_look(struct valve_gate *gate, uint64_t seen_ns, struct gpu **taken)
{
	uint32_t word = load_full(&gate->prepared_word), i = 0;
	struct valve_prepared *prepared;

	if (STATE_OF(word) != ARMED || !turn_from(gate, word, CLAIMED))
		return;
	while (i < gate->prepared_count && !is_needed(&gate->prepared[i]))
		i++;
	word &= ~7u;
	if (i == gate->prepared_count) {
		store_full(&gate->prepared_word, word | ARMED);
		return;
	}
	prepared = gate->prepared_begun = &gate->prepared[i];
	prepared->sent = 0;
	store_relaxed(&gate->prepared_gpus, prepared->gpus);
	service_extend(gate, gate->prepared_service, prepared->gpus, seen_ns, taken);
	store_full(&gate->prepared_word, word | BEGUN); /* pairs with issuers: see prepared_go */
	prepared_go(gate);
}

int valve_prepared_listen(struct valve_gate *gate, int fd)
{
	struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = LISTEN_PREPARED};

	if (epoll_ctl(gate->epoll, EPOLL_CTL_ADD, fd, &event) < 0 && errno != EEXIST)
		return -errno;
	return 0;
}

void valve_prepared_put(struct valve_gate *gate, struct valve_prepared *all, uint32_t count)
{
	gate->prepared = all;
	gate->prepared_count = count;
}

void valve_prepared_rest(struct valve_gate *gate, int32_t service)
{
	gate->prepared_service = (uint32_t)service;
	store_full(&gate->prepared_word, ((load_relaxed(&gate->prepared_word) >> 3) + 1) << 3 | ARMED);
}

int valve_prepared_wake(struct valve_gate *gate)
{
	prepared_look(gate, now_ns(), NULL); /* the loop may have been woken by the very need */
	for (;;) {
		uint32_t word = load_full(&gate->prepared_word);

		if (STATE_OF(word) == OFF || (STATE_OF(word) == ARMED && turn_from(gate, word, OFF)))
			return -1;
		if (STATE_OF(word) >= BEGUN)
			return (int)(gate->prepared_begun - gate->prepared);
		sleep_ns(1000);
	}
}

int valve_prepared_end(struct valve_gate *gate, uint32_t go)
{
	if (go)
		prepared_go(gate);
	for (;;) {
		uint32_t word = load_full(&gate->prepared_word);

		if (STATE_OF(word) == OFF || (STATE_OF(word) == BEGUN && turn_from(gate, word, OFF)))
			return -1;
		if (STATE_OF(word) == TOLD && turn_from(gate, word, OFF))
			return (int)gate->prepared_begun->sent;
		sleep_ns(1000);
	}
}
