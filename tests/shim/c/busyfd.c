/* busyfd.c - a descriptor's number that the kernel calls busy for ever: an open() was given it, and waits. */
#include "ownfd.h"
#include "shim.h"

#include "../../native/syscalls.h"

#include <errno.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct valve_shim valve_shim;

void valve_lock(struct valve_lock *lock)
{
	(void)lock;
}

void valve_unlock(struct valve_lock *lock)
{
	(void)lock;
}

static bool takes_syscall(long number, const long *word, long *result)
{
	(void)word;
	if (number != SYS_dup3)
		return false;
	errno = EBUSY;
	*result = -1;
	return true;
}

int main(void)
{
	int first, second;

	alarm(300); /* only ends a hung test */
	valve_own_take(VALVE_OWN_LINK, eventfd(0, 0));
	first = valve_own(VALVE_OWN_LINK);
	valve_own_take(VALVE_OWN_LINK, eventfd(0, 0));
	second = valve_own(VALVE_OWN_LINK);
	printf("%d %d\n", first >= 0, second >= 0 && second != first);
	return 0;
}
