/*
 * activity.c - the slow path of a launch: claim a counter slot, ring the doorbell once per gate epoch, find the real
 * call. In the flow: trampoline -> here (rarely) -> valved's listener, which gates offline channels.
 *
 * The launch itself is never delayed, except in an offline client that was told to hold its launches.
 */
#include "shim.h"

#include <errno.h>

#define HOLD_RECHECK_NS \
	100000000u /* a held launch looks again: pages may have been replaced under the futex */

_Thread_local struct valve_tls valve_tls __attribute__((tls_model("initial-exec")));

static struct valve_slot *slot_at(uint32_t index)
{
	unsigned char *first = valve_pages + VALVE_CONTROL_BYTES + VALVE_SLOT_OFFSET;

	return (struct valve_slot *)(void *)(first + (size_t)index * sizeof(struct valve_slot));
}

/* valved adds up no more slots than the header says: each is in before its thread counts there. */
static void show_slots(uint32_t count)
{
	uint32_t *shown = &VALVE_REGION->slot_count;
	uint32_t old = load_relaxed(shown); /* the swap decides */

	while (old < count && !swap_if(shown, &old, count))
		;
}

/* A slot whose thread has ended, once all were given out. Its count stays: the sum only ever rises. */
static struct valve_slot *inherit_slot(uint32_t tid)
{
	long pid = syscall(SYS_getpid);

	show_slots(VALVE_SLOTS);
	for (uint32_t i = 0; i < VALVE_SLOTS - 1; i++) {
		struct valve_slot *slot = slot_at(i);
		uint32_t owner = load_relaxed(&slot->tid);

		if (syscall(SYS_tgkill, pid, owner, 0) == 0 || errno != ESRCH)
			continue;
		if (swap_if(&slot->tid, &owner, tid))
			return slot;
	}
	return slot_at(VALVE_SLOTS - 1); /* shared, so it is a fenced one: several threads count in it */
}

static struct valve_slot *claim_slot(void)
{
	uint32_t tid = (uint32_t)syscall(SYS_gettid);
	uint32_t index = load_relaxed(&valve_shim.next_slot);

	while (index < VALVE_SLOTS - 1)
		if (swap_if(&valve_shim.next_slot, &index, index + 1)) {
			struct valve_slot *slot = slot_at(index);

			store_relaxed(&slot->tid, tid);
			show_slots(index + 1);
			return slot;
		}
	return inherit_slot(tid);
}

/* Counts first, then the gate is read: see region.h. */
static void take_slot(void)
{
	struct valve_slot *slot = claim_slot();
	bool is_shared = slot == slot_at(VALVE_SLOTS - 1);

	if (is_shared || load_relaxed(&valve_shim.must_fence))
		valve_tls.fenced = slot;
	else
		valve_tls.slot = slot;
	add_full(&slot->submitted, 1);
}

uint64_t valve_submitted(void)
{
	uint64_t sum = load_acquire(&slot_at(VALVE_SLOTS - 1)->submitted);
	uint32_t given = load_acquire(&valve_shim.next_slot);

	for (uint32_t i = 0; i < given; i++)
		sum += load_acquire(&slot_at(i)->submitted); /* pairs with the trampolines' add */
	return sum;
}

void valve_wake_watcher(void)
{
	futex_wake(&VALVE_REGION->busy, 1);
}

void valve_ring(void)
{
	struct valve_region *region = VALVE_REGION;
	uint32_t epoch = load_acquire(&VALVE_LAUNCH->gate_epoch);
	bool is_heard = true, is_borrowed;
	const uint64_t one = 1;
	int bell;

	/* Cheap test first: while valved is slow or dead every launch comes here. */
	if (!(epoch & 1) || load_relaxed(&region->rung_epoch) == epoch ||
	    exchange_full(&region->rung_epoch, epoch) == epoch)
		return;
	store_relaxed(&region->launch_ns, now_ns());
	store_release(&region->busy,
	              1); /* valved reads launch_ns after it saw the bell, which is ordered by the kernel */
	store_relaxed(&region->rings, load_relaxed(&region->rings) + 1);
	bell = valve_own_borrow(VALVE_OWN_DOORBELL, &is_borrowed);
	if (bell < 0)
		valve_own_hang_up(); /* closed behind our back: a new link brings a new one, which rings for us */
	else if (syscall(SYS_write, bell, &one, sizeof(one)) < 0)
		is_heard = false; /* no listener: valved is gone, and then no work is gated either */
	if (is_borrowed)
		syscall(SYS_close, bell);
	if (is_heard)
		valve_wake_watcher();
}

/*
 * The pages and the bell have just changed hands. Launches of other threads meanwhile were counted in a page that is gone,
 * read its closed word, or rang where no bell was yet: one count and one ring speak for all of them. A slot that was given
 * out meanwhile was shown there, too. A thread that never launched owns no slot.
 */
void valve_speak_for_the_past(void)
{
	uint32_t given = load_acquire(&valve_shim.next_slot);

	show_slots(given < VALVE_SLOTS - 1 ? given : VALVE_SLOTS);
	if (load_relaxed(&valve_shim.role) != VALVE_ROLE_ONLINE || !given)
		return;
	if (!valve_submitted()) {
		show_slots(VALVE_SLOTS);
		add_full(&slot_at(VALVE_SLOTS - 1)->submitted, 1);
	}
	store_relaxed(&VALVE_REGION->rung_epoch, 0); /* even: no epoch that is rung */
	valve_ring();
}

static void hold(void)
{
	uint32_t order;

	while (order = load_relaxed(&VALVE_LAUNCH->order), valve_launches_wait())
		futex_wait(&VALVE_LAUNCH->order, order, HOLD_RECHECK_NS);
}

static CUresult missing(void)
{
	return CUDA_ERROR_NOT_FOUND;
}

/* First use of an exported name. Two threads may both do it: they store the same values. */
static void *resolve(struct valve_entry *entry)
{
	void *real = valve_real_symbol(entry->name);

	if (!real)
		return (void *)(uintptr_t)missing; /* not kept: libcuda may come later */
	return valve_bind(entry, real, valve_has_ptds_suffix(entry->name));
}

/*
 * Precondition: called from a trampoline with the entry it belongs to. The call is counted, unless this thread has
 * no slot yet. Returns the address to jump to.
 */
void *valve_launch_slow(struct valve_entry *entry)
{
	int saved_errno = errno;
	void *real = load_acquire(&entry->real);

	valve_heed_child();
	if (!valve_tls.slot && !valve_tls.fenced)
		take_slot();
	/* full, as the count of take_slot: an acquire load alone may pass it on some CPUs (LDAPR). A plain load on x86. */
	if (load_full(&VALVE_LAUNCH->gate_epoch) & 1) {
		if (valve_is_offline())
			hold();
		else
			valve_ring();
	}
	if (real == (void *)(uintptr_t)valve_slow)
		real = resolve(entry);
	errno = saved_errno;
	return real;
}
