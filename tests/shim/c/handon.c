/* handon.c - a library with a handler that hands each signal on to the one that it found, if there was one. */
#include <signal.h>

int heard;
static struct sigaction before;

static void hear(int number, siginfo_t *info, void *context)
{
	heard++;
	if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN)
		return;
	if (before.sa_flags & SA_SIGINFO)
		before.sa_sigaction(number, info, context);
	else
		before.sa_handler(number);
}

int handle(int number)
{
	struct sigaction action = {.sa_sigaction = hear, .sa_flags = SA_SIGINFO | SA_RESTART};

	return sigaction(number, &action, &before);
}
