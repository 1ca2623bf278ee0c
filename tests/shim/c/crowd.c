/* crowd.c - opens the driver, then four threads ask at once for a namespace that takes only a process of one thread. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#define THREADS 4
#define TIMES   20

static atomic_int refused;

static void *ask(void *unused)
{
	for (int times = 0; times < TIMES; times++)
		refused += unshare(CLONE_NEWUSER) && errno == EINVAL;
	return unused;
}

int main(void)
{
	pthread_t threads[THREADS];
	char line[8];

	alarm(300); /* only ends a hung test */
	if (open("/dev/nvidiactl", O_RDWR) < 0)
		return 1;
	for (int i = 0; i < THREADS; i++)
		if (pthread_create(&threads[i], NULL, ask, NULL))
			return 1;
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	printf("%d refused\n", (int)refused);
	fflush(stdout);
	return read(0, line, sizeof(line)) < 0;
}
