/*
 * held_start.c - a thread that is made before a step and gets a core only amid it: a pthread_create below the emulated node's,
 * in a library of its own (-DHELD), keeps it back until the step runs. The program says when both run, and ends with its
 * standard input.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#ifdef HELD

uint32_t held_start_next, held_start_go;

static struct {
	void *(*routine)(void *);
	void *argument;
} held;

static void *wait_and_run(void *unused)
{
	(void)unused;
	while (!__atomic_load_n(&held_start_go, __ATOMIC_SEQ_CST))
		usleep(1000);
	return held.routine(held.argument);
}

int pthread_create(pthread_t *out, const pthread_attr_t *attributes, void *(*routine)(void *), void *argument)
{
	int (*next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

	*(void **)&next = dlsym(RTLD_NEXT, "pthread_create");
	if (!__atomic_exchange_n(&held_start_next, 0, __ATOMIC_SEQ_CST))
		return next(out, attributes, routine, argument);
	held.routine = routine;
	held.argument = argument;
	return next(out, attributes, wait_and_run, NULL);
}

#else

typedef int launch_fn(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                      void **, void **);
launch_fn cuLaunchKernel;
int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
int valve_emu_step_begin(launch_fn *), valve_emu_step_end(void);
extern uint32_t held_start_next, held_start_go;

static uint32_t runs;

static void *run(void *unused)
{
	__atomic_store_n(&runs, 1, __ATOMIC_SEQ_CST);
	pause();
	return unused;
}

int main(void)
{
	pthread_t thread;
	void *context;
	char byte;

	if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context))
		return 1;
	held_start_next = 1;
	if (pthread_create(&thread, NULL, run, NULL) || valve_emu_step_begin(cuLaunchKernel))
		return 1;
	__atomic_store_n(&held_start_go, 1, __ATOMIC_SEQ_CST);
	while (!__atomic_load_n(&runs, __ATOMIC_SEQ_CST))
		usleep(1000);
	puts("both run");
	fflush(stdout);
	return read(0, &byte, 1) < 0 || valve_emu_step_end();
}

#endif
