/* Books what ordinary stops and wakes did: the twin of valved/gate/edges.py for whole batches. */
#include "booking.h"

#include <stdbool.h>
#include <stddef.h>

#include "gate.h"

#define FAR_NS ((int64_t)1 << 60) /* no clock of a running machine says that */
#define LONG_NS \
	((int64_t)1 << 40) /* a delay of minutes is no ordinary one; sums of shorter ones cannot overflow */

static struct valve_book_service *service_of(const struct valve_book *book, uint64_t id)
{
	uint32_t low = 0, high = book->service_count;

	while (low < high) {
		uint32_t middle = (low + high) / 2;

		if (book->services[middle]->id < id)
			low = middle + 1;
		else
			high = middle;
	}
	return low < book->service_count && book->services[low]->id == id ? book->services[low] : NULL;
}

static void note(struct valve_book *book, uint32_t place, enum valve_book_note what)
{
	book->notes[book->note_count++] = 8 * place + (uint32_t)what;
}

/* GpuAccount.advance */
static void advance(struct valve_book_gpu *gpu, int64_t at_ns)
{
	int64_t took_ns = at_ns - gpu->since_ns;

	if (took_ns <= 0)
		return;
	gpu->since_ns = at_ns;
	if (!gpu->online)
		gpu->left_sum += took_ns;
	if (gpu->holders) {
		gpu->gated_sum += gpu->channels ? took_ns : 0;
	} else {
		gpu->open_sum += took_ns;
		gpu->harvest_sum += gpu->channels ? took_ns : 0;
	}
}

static int64_t begun_ns(const struct valve_stamp *stamp)
{
	return (int64_t)(stamp->launch_ns ? stamp->launch_ns : stamp->seen_ns);
}

/* Edges._held */
static void held(struct valve_book *book, struct valve_book_service *service, const struct valve_stamp *stamp)
{
	int64_t at_ns = begun_ns(stamp);

	if (service->woken_epoch >= 0 && stamp->epoch - (uint32_t)service->woken_epoch >= 1u << 31)
		return; /* of before the wake */
	for (uint32_t left = service->gpus & ~service->held; left; left &= left - 1) {
		struct valve_book_gpu *gpu = &book->gpus[__builtin_ctz(left)];

		if (!gpu->online)
			advance(gpu, (int64_t)stamp->done_ns);
		gpu->online++;
		gpu->holders++;
	}
	service->held |= service->gpus;
	if (service->holding)
		return;
	if (at_ns > service->since_ns)
		service->freed_ns += at_ns - service->since_ns;
	service->holding = true;
	service->since_ns = at_ns;
	if (at_ns > service->seen_ns)
		service->seen_ns = at_ns;
}

/* Edges._count_preemption */
static void preempted(struct valve_book *book, struct valve_book_service *service,
                      const struct valve_stamp *stamp, uint32_t place)
{
	struct valve_book_gpu *gpu = &book->gpus[stamp->gpu];
	int64_t delay_ns = (int64_t)stamp->done_ns - (int64_t)stamp->launch_ns, before_ns;
	uint32_t bucket = 0;
	bool is_first = stamp->epoch != service->epoch;

	if (delay_ns < 0)
		delay_ns = 0;
	while (bucket < VALVE_BOOK_BUCKETS - 1 && book->bounds_ns[bucket] < delay_ns)
		bucket++;
	gpu->latency[bucket]++;
	gpu->delay_sum += delay_ns;
	gpu->gates++;
	before_ns = is_first ? 0 : service->epoch_delay_ns;
	service->delay_ns += delay_ns > before_ns ? delay_ns - before_ns : 0;
	service->epoch_delay_ns = delay_ns > before_ns ? delay_ns : before_ns;
	service->epoch = stamp->epoch;
	service->stopped = true;
	if (is_first) {
		service->preemptions++;
		service->unclaimed = true;
		note(book, place, VALVE_BOOK_HIT);
	}
}

/* Edges._closed */
static void closed(struct valve_book *book, struct valve_book_service *service,
                   const struct valve_stamp *stamp, uint32_t place)
{
	bool by_grant = stamp->cause == VALVE_CAUSE_GRANT_END || stamp->cause == VALVE_CAUSE_GRANT_BROKEN;

	book->stops++;
	held(book, service, stamp);
	if (stamp->client && stamp->launch_ns && stamp->channels && !by_grant)
		preempted(book, service, stamp, place);
	if (service->gpus & (service->gpus - 1) && stamp->ioctl_ns)
		note(book, place, VALVE_BOOK_LOCKS);
}

/* Edges._woken */
static void woken(struct valve_book *book, struct valve_book_service *service,
                  const struct valve_stamp *stamp, uint32_t place)
{
	int64_t at_ns = (int64_t)stamp->done_ns, since_ns = service->since_ns;
	int64_t unseen_ns = since_ns > service->watch_since_ns ? since_ns : service->watch_since_ns;

	book->wakes++;
	for (uint32_t left = service->held; left; left &= left - 1) {
		struct valve_book_gpu *gpu = &book->gpus[__builtin_ctz(left)];

		if (gpu->online == 1)
			advance(gpu, at_ns);
		gpu->online--;
		gpu->holders--;
	}
	service->held = 0;
	if (service->holding && !service->watching && at_ns > unseen_ns)
		service->unseen_ns += at_ns - unseen_ns;
	if (at_ns > since_ns)
		service->held_ns += at_ns - since_ns;
	service->holding = false;
	service->since_ns = at_ns;
	if (at_ns > service->seen_ns) {
		service->aged_ns += at_ns - service->seen_ns;
		service->seen_ns = at_ns;
	}
	service->woken_epoch = stamp->epoch;
	if (service->unclaimed || stamp->teller)
		note(book, place, VALVE_BOOK_WOKEN);
	service->unclaimed = false;
}

static bool is_ordinary(const struct valve_book *book, const struct valve_book_service *service,
                        const struct valve_stamp *stamp)
{
	int64_t at_ns = begun_ns(stamp), done_ns = (int64_t)stamp->done_ns;

	if (!service || !book->gpu_count || service->gpus >> (book->gpu_count - 1) > 1)
		return false;
	switch (stamp->kind) {
	case VALVE_STAMP_WAKE_REFUSED:
	case VALVE_STAMP_LEARN:
		return true;
	case VALVE_STAMP_WAKE:
		return done_ns > 0 && done_ns < FAR_NS && stamp->channels == service->leaked;
	case VALVE_STAMP_GATE:
	case VALVE_STAMP_HOLD:
		return done_ns > 0 && done_ns < FAR_NS && at_ns > 0 && at_ns < FAR_NS &&
		       done_ns - at_ns < LONG_NS && at_ns - done_ns < LONG_NS && stamp->gpu < book->gpu_count;
	default:
		return false;
	}
}

/* Who holds what. */
static void begin(struct valve_book *book)
{
	const uint64_t *holder = book->holders;

	for (uint32_t i = 0; i < book->service_count; i++) {
		book->services[i]->booked = 0;
		book->services[i]->stopped = false;
	}
	for (uint32_t i = 0; i < book->gpu_count; i++) {
		for (uint32_t n = 0; n < book->gpus[i].holders; n++) {
			struct valve_book_service *service = service_of(book, *holder++);

			if (service) {
				service->booked |= 1u << i;
				book->gpus[i].online++;
			}
		}
	}
	for (uint32_t i = 0; i < book->service_count; i++)
		book->services[i]->held = book->services[i]->booked;
}

static void end(struct valve_book *book)
{
	for (uint32_t i = 0; i < book->service_count; i++) {
		if (book->services[i]->stopped || book->services[i]->held != book->services[i]->booked)
			book->changed[book->changed_count++] = i;
	}
}

uint32_t valve_book_take(struct valve_book *book, const uint8_t *stamps, uint32_t at, uint32_t count)
{
	const struct valve_stamp *all = (const void *)stamps;

	begin(book);
	for (; at < count; at++) {
		const struct valve_stamp *stamp = &all[at];
		struct valve_book_service *service = service_of(book, stamp->service);

		if (!is_ordinary(book, service, stamp))
			break;
		if (stamp->kind == VALVE_STAMP_HOLD)
			held(book, service, stamp);
		else if (stamp->kind == VALVE_STAMP_WAKE)
			woken(book, service, stamp, at);
		else if (stamp->kind == VALVE_STAMP_GATE)
			closed(book, service, stamp, at);
		else if (stamp->kind == VALVE_STAMP_LEARN)
			note(book, at, VALVE_BOOK_LEARN);
		else
			book->refused++;
	}
	end(book);
	return at;
}
