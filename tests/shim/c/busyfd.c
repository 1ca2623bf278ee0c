/* busyfd.c - a descriptor's number that the kernel calls busy for ever: an open() was given it, and waits. */
#include "ownfd.h"
#include "shim.h"

#include <errno.h>
#include <stdarg.h>
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

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);

long __wrap_syscall(long number, ...)
{
	long at[3];
	va_list more;

	va_start(more, number);
	for (int i = 0; i < 3; i++)
		at[i] = va_arg(more, long);
	va_end(more);
	if (number == SYS_dup3) {
		errno = EBUSY;
		return -1;
	}
	return __real_syscall(number, at[0], at[1], at[2]);
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
