/*
 * A thread that cannot look at its grant, as a CPU engine's model step: it adds to a counter without pause and is
 * stopped by the park signal alone (emu.h, "Native steps"). Prints the counter for each line on standard input.
 *   parked_step GPU CID
 */
#include "emu.h"
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct emu_channel *slot;
static struct emu_gpu *gpu;
static volatile uint64_t steps;

static void futex(uint32_t *word, int operation, uint32_t value)
{
	syscall(SYS_futex, word, operation, value, NULL, NULL, 0);
}

static void bump(uint32_t *word)
{
	__atomic_add_fetch(word, 1, __ATOMIC_SEQ_CST);
	futex(word, FUTEX_WAKE, INT_MAX);
}

static void wait_for_grant(void)
{
	__atomic_add_fetch(&slot->active, 1, __ATOMIC_SEQ_CST);
	while (!__atomic_load_n(&slot->grant, __ATOMIC_SEQ_CST)) {
		if (__atomic_sub_fetch(&slot->active, 1, __ATOMIC_SEQ_CST) == 0)
			bump(&gpu->ack);
		futex(&slot->grant, FUTEX_WAIT, 0);
		__atomic_add_fetch(&slot->active, 1, __ATOMIC_SEQ_CST);
	}
}

/* In a step active is raised already; parking gives it back and takes it again. */
static void park(int number)
{
	(void)number;
	if (__atomic_load_n(&slot->grant, __ATOMIC_SEQ_CST))
		return;
	if (__atomic_sub_fetch(&slot->active, 1, __ATOMIC_SEQ_CST) == 0)
		bump(&gpu->ack);
	wait_for_grant();
}

static void *step(void *unused)
{
	struct emu_board *board = (struct emu_board *)unused;
	struct emu_park *mine = &board->park[3];
	uint32_t at = slot->cid % EMU_CHANNELS;

	mine->cid = slot->cid;
	mine->pid = (uint32_t)getpid();
	mine->tid = (uint32_t)syscall(SYS_gettid);
	__atomic_store_n(&mine->ready, 1, __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&slot->parks, 1, __ATOMIC_SEQ_CST);
	__atomic_store_n(&slot->pending, 1, __ATOMIC_SEQ_CST);
	__atomic_fetch_or(&gpu->work[at / 32], 1u << at % 32, __ATOMIC_SEQ_CST);
	bump(&gpu->kick);
	wait_for_grant();
	for (;;)
		steps++;
	return NULL;
}

int main(int argc, char **argv)
{
	int fd = open("/dev/nvidia-emu-board", O_RDWR);
	struct emu_board *board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	struct sigaction action = {.sa_handler = park, .sa_flags = SA_RESTART};
	pthread_t thread;

	if (argc != 3 || board == MAP_FAILED)
		return 2;
	gpu = &board->gpu[atoi(argv[1])];
	slot = &board->channel[(unsigned)atoi(argv[2]) % EMU_CHANNELS];
	sigaction(EMU_PARK_SIGNAL, &action, NULL);
	pthread_create(&thread, NULL, step, board);
	while (getchar() != EOF) {
		printf("%llu\n", (unsigned long long)steps);
		fflush(stdout);
	}
	return 0;
}
