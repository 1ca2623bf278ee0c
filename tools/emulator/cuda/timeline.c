/* timeline.c - how far a stream has come, and "wait until stream T has done N" in both forms: queued and blocking. */
#include "core.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NOBODY UINT64_MAX

struct timeline *timeline_new(void)
{
	struct timeline *line = zeroed(sizeof(*line));

	line->refs = 1;
	line->wake_at = NOBODY;
	return line;
}

struct timeline *timeline_ref(struct timeline *line)
{
	line->refs++;
	return line;
}

void timeline_unref(struct timeline *line)
{
	if (line && --line->refs == 0)
		free(line);
}

/*
 * Only a completion that a thread waits for costs a system call. The waiter states its wish and then looks at done;
 * the executor writes done and then looks for wishes; so one of the two sees the other.
 */
void timeline_wait(struct timeline *line, uint64_t seq)
{
	for (;;) {
		uint32_t bell = __atomic_load_n(&line->bell, __ATOMIC_SEQ_CST);
		uint64_t wish = __atomic_load_n(&line->wake_at, __ATOMIC_SEQ_CST);
		while (wish > seq && !__atomic_compare_exchange_n(&line->wake_at, &wish, seq, false,
		                                                  __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
			;
		if (__atomic_load_n(&line->done, __ATOMIC_SEQ_CST) >= seq)
			return;
		syscall(SYS_futex, &line->bell, FUTEX_WAIT_PRIVATE, bell, NULL, NULL, 0);
	}
}

void timeline_advance(struct timeline *line, uint64_t seq)
{
	__atomic_store_n(&line->done, seq, __ATOMIC_SEQ_CST);
	if (__atomic_load_n(&line->wake_at, __ATOMIC_SEQ_CST) > seq)
		return;
	__atomic_store_n(&line->wake_at, NOBODY, __ATOMIC_SEQ_CST);
	__atomic_fetch_add(&line->bell, 1, __ATOMIC_SEQ_CST);
	syscall(SYS_futex, &line->bell, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void deps_add(struct dependencies *deps, struct timeline *line, uint64_t seq)
{
	if (line->done >= seq)
		return;
	for (unsigned i = 0; i < deps->count; i++) {
		if (deps->at[i].line != line)
			continue;
		if (deps->at[i].seq < seq)
			deps->at[i].seq = seq;
		return;
	}
	if (deps->count == deps->room) {
		deps->room = deps->room ? 2 * deps->room : 4;
		deps->at = realloc(deps->at, deps->room * sizeof(*deps->at));
		if (!deps->at)
			abort();
	}
	deps->at[deps->count++] = (struct dependency){timeline_ref(line), seq};
}

void deps_copy(struct dependencies *into, const struct dependencies *from)
{
	for (unsigned i = 0; i < from->count; i++)
		deps_add(into, from->at[i].line, from->at[i].seq);
}

void deps_wait(struct dependencies *deps)
{
	for (unsigned i = 0; i < deps->count; i++)
		timeline_wait(deps->at[i].line, deps->at[i].seq);
	LOCKED(&emu.lock);
	deps_clear(deps);
}

bool deps_met(struct dependencies *deps)
{
	while (deps->count) {
		struct dependency *last = &deps->at[deps->count - 1];
		if (last->line->done < last->seq)
			return false;
		timeline_unref(last->line);
		deps->count--;
	}
	return true;
}

void deps_clear(struct dependencies *deps)
{
	while (deps->count)
		timeline_unref(deps->at[--deps->count].line);
	free(deps->at);
	*deps = (struct dependencies){0};
}
