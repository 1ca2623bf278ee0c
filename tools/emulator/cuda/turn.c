/* turn.c - see turn.h. The protocol with the server is the "Execution" paragraph of emu.h. */
#include "turn.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOK_AGAIN_NS \
	100000000ull /* a wait looks up this often, in case the server died with the grant at 0 */

static void futex_wait(uint32_t *word, uint32_t value, uint64_t timeout_ns)
{
	struct timespec limit = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};

	syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}

static void futex_wake(uint32_t *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static bool is_granted(struct channel *channel)
{
	return __atomic_load_n(&channel->slot->grant, __ATOMIC_SEQ_CST) != 0;
}

static bool is_stopping(struct channel *channel)
{
	return __atomic_load_n(&channel->stop, __ATOMIC_ACQUIRE);
}

void turn_leave(struct emu_channel *slot, struct emu_gpu *gpu)
{
	uint32_t active = __atomic_load_n(&slot->active, __ATOMIC_SEQ_CST);

	__atomic_store_n(&slot->stopped_ns, now_ns(), __ATOMIC_RELAXED);
	do {
		if (!active)
			return; /* the server gave up on this channel and reset it */
	} while (!__atomic_compare_exchange_n(&slot->active, &active, active - 1, false, __ATOMIC_SEQ_CST,
	                                      __ATOMIC_SEQ_CST));
	if (active != 1)
		return;
	__atomic_fetch_add(&gpu->ack, 1, __ATOMIC_SEQ_CST);
	futex_wake(&gpu->ack);
}

bool turn_join(struct emu_channel *slot, uint32_t cid, const uint64_t *word, uint64_t parked)
{
	while (__atomic_load_n(&slot->cid, __ATOMIC_SEQ_CST) == cid &&
	       __atomic_load_n(word, __ATOMIC_SEQ_CST) == parked) {
		if (__atomic_load_n(&slot->grant, __ATOMIC_SEQ_CST)) {
			__atomic_add_fetch(&slot->active, 1, __ATOMIC_SEQ_CST);
			return true;
		}
		futex_wait(&slot->grant, 0, LOOK_AGAIN_NS);
	}
	return false;
}

void turn_nudge(struct emu_channel *slot)
{
	futex_wake(&slot->grant);
}

static void lower(struct channel *channel)
{
	sparse_refresh();
	if (channel->in_turn)
		channel->slot->busy_ns += now_ns() - channel->turn_start_ns;
	channel->in_turn = false;
	turn_leave(channel->slot, channel->gpu);
}

bool turn_begin(struct channel *channel)
{
	while (!is_stopping(channel)) {
		if (channel->in_turn)
			return turn_check(channel);
		if (is_granted(channel)) {
			/* Raise active before the second look: the server clears grant before it reads active. */
			__atomic_add_fetch(&channel->slot->active, 1, __ATOMIC_SEQ_CST);
			if (is_granted(channel)) {
				channel->in_turn = true;
				channel->turn_start_ns = now_ns();
				return true;
			}
			lower(channel);
		}
		futex_wait(&channel->slot->grant, 0, LOOK_AGAIN_NS);
	}
	return false;
}

void turn_end(struct channel *channel)
{
	if (channel->in_turn)
		lower(channel);
}

bool turn_check(struct channel *channel)
{
	if (is_granted(channel) && !is_stopping(channel))
		return true;
	turn_end(channel);
	return turn_begin(channel);
}

bool turn_run(struct channel *channel, uint64_t real)
{
	uint64_t left = real;

	while (left) {
		if (!turn_check(channel))
			return false;
		uint64_t start = now_ns();
		futex_wait(&channel->slot->grant, 1, left < LOOK_AGAIN_NS ? left : LOOK_AGAIN_NS);
		uint64_t ran = now_ns() - start;
		if (!is_granted(channel))
			turn_end(channel);
		left -= ran < left ? ran : left;
	}
	return true;
}

uint64_t turn_clock(const struct channel *channel)
{
	return channel->slot->busy_ns + (channel->in_turn ? now_ns() - channel->turn_start_ns : 0);
}

bool turn_run_until(struct channel *channel, uint64_t clock)
{
	uint64_t now = turn_clock(channel);

	return now >= clock || turn_run(channel, clock - now);
}

bool turn_pause(struct channel *channel, uint64_t real)
{
	struct timespec limit = {(time_t)(real / 1000000000u), (long)(real % 1000000000u)};

	turn_end(channel);
	nanosleep(&limit, NULL);
	return turn_begin(channel);
}

void turn_publish_locked(struct channel *channel, bool ready)
{
	uint32_t pending = ready ? channel->queued : 0;
	uint32_t before = __atomic_exchange_n(&channel->slot->pending, pending, __ATOMIC_SEQ_CST);

	if (pending && !before) {
		uint32_t at = channel->slot->cid % EMU_CHANNELS;

		__atomic_fetch_or(&channel->gpu->work[at / 32], 1u << at % 32, __ATOMIC_SEQ_CST);
		__atomic_fetch_add(&channel->gpu->kick, 1, __ATOMIC_SEQ_CST);
		futex_wake(&channel->gpu->kick);
	}
}
