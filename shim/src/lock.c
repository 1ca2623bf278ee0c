/*
 * lock.c - a futex lock (the usual three states). pthread mutexes would do, but a forked child must be able to set
 * ours free whatever thread held them, and old C libraries keep pthread calls in a library that we do not need.
 */
#include "shim.h"

void valve_lock(struct valve_lock *lock)
{
	uint32_t seen = 0;

	if (swap_if(&lock->word, &seen, 1))
		return;
	while (exchange_full(&lock->word, 2) != 0)
		futex_wait(&lock->word, 2, 0);
}

/* Not written where it is free: most processes never touch the pages of most locks, and fork() must stay cheap. */
void valve_lock_reset(struct valve_lock *lock)
{
	if (lock->word)
		lock->word = 0;
}

void valve_unlock(struct valve_lock *lock)
{
	if (exchange_full(&lock->word, 0) == 2)
		futex_wake(&lock->word, 1);
}
