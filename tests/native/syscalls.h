/* syscalls.h - a wrapped system call (-Wl,--wrap=syscall): a test program says what becomes of each. */
#ifndef VALVE_TESTS_SYSCALLS_H
#define VALVE_TESTS_SYSCALLS_H

#include <stdarg.h>
#include <stdbool.h>

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);

/* True: it is not made, and *result is its answer. */
static bool takes_syscall(long number, const long *word, long *result);

long __wrap_syscall(long number, ...)
{
	long word[6], result;
	va_list words;

	va_start(words, number);
	for (int i = 0; i < 6; i++)
		word[i] = va_arg(words, long);
	va_end(words);
	if (takes_syscall(number, word, &result))
		return result;
	return __real_syscall(number, word[0], word[1], word[2], word[3], word[4], word[5]);
}

#endif
