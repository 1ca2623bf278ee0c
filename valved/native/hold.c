/*
 * hold.c - which service holds which GPU. A service's epoch is even while it holds and odd while its gate is open; each control
 * page carries a copy, the word that the launch hooks read.
 *
 *   ring   (listener)  epoch odd -> even by compare-and-swap: the winner closes all words, counts the hold on each
 *                      GPU of the service, and kicks the issuers of those that no service held.
 *   wake   (opener)    epoch even -> odd, open all words, fence every client, re-read all counters. All idle:
 *                      drop the hold. Not idle: swap back to even; if that fails a ring has already taken a new hold.
 *
 * A service has one opener at a time. While it has a permission (service.permitted) that is the listener, which then is
 * the only thread that changes the epoch at all: a ring cannot fall into its own wake, for it hears the ring afterwards.
 * Without one it is the caller, which takes the permission back and waits until the listener has left its turn before it
 * opens, holds, or changes the GPUs (waking_withdraw); then a ring may fall anywhere into a wake.
 *
 * Every odd -> even transition adds one hold and every wake that opened removes exactly one, the one it found. So a
 * ring between "opened" and "dropped" leaves the GPUs held throughout: they are never enabled for an instant.
 * The epoch opens before the words and words only ever rise: a client that saw an open word finds the epoch open (or
 * already retaken), and a slow writer cannot undo a later close. A launch that saw the closed word was counted before the
 * fence, so the counters show it and the wake is refused; one that saw the open word rings, and a ring is never lost: the
 * doorbell is an eventfd, heard after the wake at the latest. The first open request does as a launch does (but for grants).
 *
 * A grant (grant.c) is a wake with an end, by the listener and with a permission only, so all of the above holds for it. It
 * adds one more way back: at its end the listener takes the hold as a ring does, by the same swap; whichever of ring, end and
 * caller wins the swap counts the hold, closes the grant, and says the cause. A launch that comes as it ends either rang (it
 * saw the open word) or saw the closed one, and then the hold is being counted already. */
#include "internal.h"

#include <linux/membarrier.h>

uint32_t holders_count(uint64_t holders)
{
	return (uint32_t)(holders & 0xFFFFu);
}

uint32_t holders_closer(uint64_t holders)
{
	return (uint32_t)(holders >> 16 & 0xFFFFu);
}

/* Count one more hold. True if the issuer must look: no service held this GPU, or its holder shared it in slices. */
static bool gpu_hold(struct gpu *gpu, uint32_t service)
{
	uint64_t old = load_relaxed(&gpu->holders), next; /* the swap decides */
	bool closes;

	do {
		closes = holders_count(old) == 0 || load_full(&gpu->sliced);
		next = old + 1;
		if (closes)
			next = ((old >> 32) + 1) << 32 | (uint64_t)service << 16 | (holders_count(old) + 1);
		at_point(gpu->gate, VALVE_POINT_COUNTING);
	} while (!compare_swap(&gpu->holders, &old, next));
	/* again, after the swap: slice_open sets `sliced`, then looks at the holders, so one sees the other */
	if (closes ? holders_count(old) == 0 : !load_full(&gpu->sliced))
		return closes;
	slice_break(gpu);
	if (!closes) /* no closing of this hold: its issuer tells of none */
		issuer_kick(gpu);
	return closes;
}

/* The first GPU that no service holds any more is the listener's to enable (*freed); the caller passes NULL. */
static void gpu_drop(struct gpu *gpu, struct gpu **freed)
{
	uint64_t old = load_relaxed(&gpu->holders);

	while (!compare_swap(&gpu->holders, &old, old - 1))
		;
	if (holders_count(old) == 1 && freed && !*freed)
		*freed = gpu;
	else if (holders_count(old) == 1)
		issuer_kick(gpu);
}

/* Hold every GPU, or let go of them, on the account of no service. */
void guard_hold(struct valve_gate *gate, bool on)
{
	for (uint32_t i = 0; i < gate->gpu_count; i++) {
		if (!on)
			gpu_drop(&gate->gpu[i], NULL);
		else if (gpu_hold(&gate->gpu[i], MAX_SERVICES))
			issuer_kick(&gate->gpu[i]);
	}
}

/* Store `epoch` unless the word is already there or beyond: false. Listener and caller both write words; see the top. */
bool word_raise(uint32_t *word, uint32_t epoch)
{
	uint32_t old = load_relaxed(word);

	while (is_later(epoch, old)) {
		if (compare_swap(word, &old, epoch))
			return true; /* full order: pairs with the launch hook's fence (region.h) */
	}
	return false;
}

static void raise_words(const struct service *service, uint32_t epoch)
{
	const struct client_list *list = load_full(&service->clients); /* see listener_quiesce */

	for (uint32_t i = 0; list && i < list->count; i++)
		word_raise(&list->client[i]->control->gate_epoch, epoch);
}

/* What a stamp says of the hold whose cause stands. Who finds its epoch unclaimed, or the newest, afterwards has it whole. */
static struct valve_stamp stamp_of(const struct service *service, enum valve_stamp_kind kind, uint32_t gpu,
                                   uint32_t epoch)
{
	struct valve_stamp stamp = {
	        .kind = kind,
	        .gpu = gpu,
	        .epoch = epoch,
	        .service = load_relaxed(&service->id),
	        .client = load_acquire(&service->cause_client),
	        .cause = load_acquire(&service->cause),
	        .launch_ns = load_acquire(&service->launch_ns),
	        .seen_ns = load_acquire(&service->seen_ns),
	};

	waking_fill_requests(service, &stamp);
	return stamp;
}

/* Tell of a hold whose cause stands, if nobody did. */
static void tell_hold(struct valve_gate *gate, struct service *service, uint32_t epoch)
{
	uint32_t mask = load_acquire(&service->mask);
	struct valve_stamp stamp =
	        stamp_of(service, VALVE_STAMP_HOLD, mask ? (uint32_t)__builtin_ctz(mask) : 0, epoch);

	if (!word_raise(&service->stamped, epoch))
		return;
	stamp.done_ns = now_ns();
	stamp_push(&gate->stamps, &stamp, !waking_is_ordinary(service));
}

/* Take the hold. False if the service holds already. The listener also borrows the seat of the first GPU that no
 * service held (see issuer_borrow), if *taken is not set yet; the caller passes NULL for cause and taken. */
bool service_hold(struct valve_gate *gate, uint32_t index, const struct valve_client *cause,
                  uint64_t launch_ns, uint64_t seen_ns, struct gpu **taken)
{
	struct service *service = &gate->service[index];
	uint32_t epoch = load_full(&service->epoch), mask;
	bool closed = false;

	do {
		if (epoch % 2 == 0)
			return false;
	} while (!compare_swap(&service->epoch, &epoch, epoch + 1));
	epoch++;
	raise_words(service, epoch); /* before any ioctl: launches from here on need not ring */
	store_release(&service->cause, grant_close(service, cause != NULL, seen_ns)); /* after the epoch */
	store_release(&service->cause_client, cause ? cause->id : 0);
	at_point(gate, VALVE_POINT_HOLDING);
	store_release(&service->launch_ns, launch_ns);
	store_release(&service->seen_ns, seen_ns);
	store_relaxed(&service->held_since_ns, launch_ns ? launch_ns : seen_ns);
	store_relaxed(&service->told_open, 0);
	waking_note_requests(service);
	store_release(&service->caused, epoch); /* pairs with the acquire in service_owe */
	mask = load_acquire(&service->mask);
	for (uint32_t i = 0; i < gate->gpu_count; i++) {
		if (!(mask & 1u << i) || !gpu_hold(&gate->gpu[i], index))
			continue;
		closed = true;
		if (taken && !*taken && issuer_borrow(&gate->gpu[i]))
			*taken = &gate->gpu[i];
		else
			issuer_kick(&gate->gpu[i]);
	}
	grant_clear(gate, service,
	            mask); /* after the holds: an issuer that finds it cleared finds them, too */
	if (!closed)
		tell_hold(gate, service, epoch);
	if (cause)
		waking_held(gate, service, seen_ns);
	store_release(&service->settled, epoch); /* pairs with the acquire in settle: all holds are counted */
	return true;
}

/* Called by an issuer after each closing of its GPU: no hold may stay without a stamp, even where the walk that would
 * have carried it was not needed (held again before the GPU was ever enabled). */
void service_owe(struct gpu *gpu)
{
	struct valve_gate *gate = gpu->gate;

	for (uint32_t i = 0; i < load_acquire(&gate->services); i++) {
		struct service *service = &gate->service[i];
		uint32_t epoch = load_acquire(&service->epoch);

		if (epoch % 2 || load_acquire(&service->stamped) == epoch) /* first: most end here */
			continue;
		if (load_acquire(&service->caused) != epoch) /* who takes it stamps it, or closes a GPU yet */
			continue;
		if (load_relaxed(&service->live) && load_acquire(&service->mask) & 1u << gpu->index)
			tell_hold(gate, service, epoch);
	}
}

/* What a GATE stamp says of the service that closed this GPU: of its last hold whose cause stands. It tells of that hold,
 * but for a stop that is tried again, which may be told no more (tell_stop in issuer.c). Without
 * a cause where the next hold writes its own there by now, or where the service has this GPU no more. */
struct valve_stamp service_stamp(struct gpu *gpu, uint64_t holders)
{
	struct service *closer = &gpu->gate->service[holders_closer(holders)];
	struct valve_stamp stamp =
	        stamp_of(closer, VALVE_STAMP_GATE, gpu->index, load_acquire(&closer->caused));

	if (load_acquire(&closer->epoch) - stamp.epoch > 1 ||
	    !(load_acquire(&closer->mask) & 1u << gpu->index))
		stamp.client = stamp.launch_ns = stamp.seen_ns = stamp.cause = 0;
	if (load_relaxed(&gpu->state) != VALVE_GPU_FAILED)
		word_raise(&closer->stamped, stamp.epoch);
	return stamp;
}

/* Push a stamp of service_stamp. The caller hears at once of what is out of the ordinary. */
void service_tell(struct gpu *gpu, uint64_t holders, const struct valve_stamp *stamp)
{
	struct service *closer = &gpu->gate->service[holders_closer(holders)];

	word_raise(&closer->stamped, stamp->epoch);
	stamp_push(&gpu->gate->stamps, stamp, stamp->kind != VALVE_STAMP_GATE || !waking_is_ordinary(closer));
}

/* The epoch, once no ring is half way through counting its hold. The caller may have to wait for the listener, which is
 * short; the listener never waits, as no other thread takes a hold of a service that it opens. */
uint32_t service_settle(const struct service *service)
{
	for (;;) {
		uint32_t epoch = load_full(&service->epoch);

		if (epoch % 2 || load_acquire(&service->settled) == epoch)
			return epoch;
		sleep_ns(5000);
	}
}

static void drop_hold(struct valve_gate *gate, const struct service *service, struct gpu **freed)
{
	for (uint32_t i = 0; i < gate->gpu_count; i++) {
		if (service->mask & 1u << i)
			gpu_drop(&gate->gpu[i], freed);
	}
}

static void stamp_wake(struct valve_gate *gate, struct service *service, enum valve_stamp_kind kind,
                       uint32_t epoch)
{
	struct valve_stamp stamp = {
	        .kind = kind,
	        .service = service->id,
	        .epoch = epoch,
	        .gpu = service->mask ? (uint32_t)__builtin_ctz(service->mask) : 0,
	        .done_ns = now_ns(),
	};

	if (kind == VALVE_STAMP_WAKE) {
		uint64_t leaked = load_relaxed(&service->said_leaked);

		stamp.status = (int32_t)(load_relaxed(&service->said_reason) & 0xFFu);
		stamp.channels = leaked < UINT32_MAX ? (uint32_t)leaked : UINT32_MAX;
	}
	waking_note_requests(service);
	waking_fill_requests(service, &stamp);
	stamp_push(&gate->stamps, &stamp, !waking_is_ordinary(service));
}

/* Launch hooks count without a fence of their own (VALVE_FEATURE_PLAIN_COUNT): every thread of a client that runs now
 * passes one here. Some microseconds, and only on a wake. Where the kernel refuses, wait until any store buffer is
 * long empty. */
static void fence_clients(void)
{
	const struct timespec drained = {.tv_nsec = 1000000};

	if (syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0))
		nanosleep(&drained, NULL);
}

/* By the thread that may open this service: the top of this file. */
int service_wake(struct valve_gate *gate, uint32_t index, struct gpu **freed)
{
	struct service *service = &gate->service[index];
	uint32_t epoch = service_settle(service), open = epoch + 1;
	bool retaken, is_grant = load_relaxed(&service->granted_until_ns) && !load_relaxed(&service->slicing);

	if (epoch % 2)
		return VALVE_NOT_HOLDING;
	tell_hold(gate, service, epoch); /* the issuer that owes it may be late */
	store_full(&service->epoch, open);
	raise_words(service,
	            open); /* each a full fence: launches counted before are seen below, later ones ring */
	fence_clients();
	at_point(gate, VALVE_POINT_WAKE_OPENED);
	if (!service_is_idle(service) || (!is_grant && waking_has_requests(service))) {
		uint32_t expect = open;

		if (compare_swap(&service->epoch, &expect, open + 1)) { /* our hold simply goes on */
			raise_words(service, open + 1);
			store_relaxed(&service->stamped, open + 1);
			store_release(&service->caused, open + 1); /* as it was */
			store_release(&service->settled, open + 1);
		} else { /* a ring took a hold of its own: ours is one too many */
			service_settle(service);
			drop_hold(gate, service, freed);
		}
		if (!is_grant)
			stamp_wake(gate, service, VALVE_STAMP_WAKE_REFUSED, open);
		return VALVE_WAKE_REFUSED;
	}
	at_point(gate, VALVE_POINT_WAKE_PROVEN);
	retaken = service_settle(service) != open;
	slice_close(gate, service, now_ns(), false);
	drop_hold(gate, service, freed);
	if (is_grant) /* in the books the service goes on holding */
		return retaken ? VALVE_WAKE_REFUSED : VALVE_WOKEN;
	stamp_wake(gate, service, retaken ? VALVE_STAMP_WAKE_REFUSED : VALVE_STAMP_WAKE, open);
	if (!retaken)
		store_release(&service->told_open, 1); /* after the stamp: a reader of it finds that one */
	return retaken ? VALVE_WAKE_REFUSED : VALVE_WOKEN;
}

int valve_wake(struct valve_gate *gate, int32_t index)
{
	waking_withdraw(gate, &gate->service[index]);
	return service_wake(gate, (uint32_t)index, NULL);
}

int valve_hold(struct valve_gate *gate, int32_t index)
{
	bool taken;

	waking_withdraw(gate, &gate->service[index]);
	taken = service_hold(gate, (uint32_t)index, NULL, 0, now_ns(), NULL);
	service_settle(&gate->service[index]);
	return taken ? 0 : -EALREADY;
}

/* A service without GPUs yet, and holding: no launch precedes its gate. */
int32_t valve_service_new(struct valve_gate *gate, uint64_t id)
{
	for (uint32_t i = 0; i < MAX_SERVICES; i++) {
		struct service *service = &gate->service[i];

		if (service->live)
			continue;
		/* Epochs go on from the slot's former owner, so that no late reader takes the new one for the old. */
		store_full(&service->epoch, service->epoch + 2);
		store_relaxed(&service->id, id);
		store_relaxed(&service->cause_client, 0);
		store_relaxed(&service->launch_ns, 0);
		store_relaxed(&service->held_since_ns, now_ns());
		store_relaxed(&service->told_open, 0);
		store_relaxed(&service->said_reason, 0);
		grant_reset(service);
		service->wake = (struct valve_wake_state){0};
		store_relaxed(&service->stamped, service->epoch);
		store_release(&service->caused, service->epoch);
		store_relaxed(&service->settled, service->epoch);
		store_release(&service->live, 1);
		if (i >= gate->services)
			store_release(&gate->services, i + 1);
		return (int32_t)i;
	}
	return -1;
}

void valve_service_gpus(struct valve_gate *gate, int32_t index, uint32_t mask)
{
	struct service *service = &gate->service[index];
	uint32_t old = service->mask;

	if (mask == old)
		return;
	if (valve_hold(gate, index)) /* held, this thread alone changes it: no ring sees half a mask */
		tell_hold(gate, service, load_relaxed(&service->epoch));
	store_relaxed(&service->cause_client, 0); /* no launch has waited for a GPU that comes now */
	store_relaxed(&service->launch_ns, 0);
	store_relaxed(&service->seen_ns, now_ns());
	store_release(&service->mask, mask);
	for (uint32_t i = 0; i < gate->gpu_count; i++) {
		if ((mask & ~old & 1u << i) && gpu_hold(&gate->gpu[i], (uint32_t)index))
			issuer_kick(&gate->gpu[i]);
		else if (old & ~mask & 1u << i)
			gpu_drop(&gate->gpu[i], NULL);
	}
}

/* Its clients must be gone (or detached): no client rings for it any more. */
void valve_service_free(struct valve_gate *gate, int32_t index)
{
	struct service *service = &gate->service[index];

	valve_hold(gate, index);
	word_raise(&service->stamped, service->epoch); /* an issuer would tell it of the slot's next owner */
	drop_hold(gate, service, NULL);
	store_release(&service->mask, 0);
	store_release(&service->live, 0);
}
