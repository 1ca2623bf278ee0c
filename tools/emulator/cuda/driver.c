/* driver.c - cuInit, version, clocks, settings, and what a forked child may do (nothing: CUDA does not survive fork). */
#include "fault.h"
#include "memory.h"
#include "rm.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define CUDA_VERSION   13000
#define SHORTEST_SLEEP 5000u /* ns; below it a sleep costs more than it models, so the debt is kept */

struct emu emu = {.lock = PTHREAD_MUTEX_INITIALIZER, .ctl = -1, .uvm = -1};
static bool exiting;

uint64_t real_ns(uint64_t model_ns)
{
	double scale = emu.board->time_scale;

	return scale > 0 ? (uint64_t)((double)model_ns / scale) : model_ns;
}

void sleep_model_ns(uint64_t model_ns)
{
	static _Thread_local uint64_t debt_ns;

	debt_ns += real_ns(model_ns);
	meter_model(real_ns(model_ns));
	if (debt_ns < SHORTEST_SLEEP)
		return;
	struct timespec limit = {(time_t)(debt_ns / 1000000000u), (long)(debt_ns % 1000000000u)};
	long slack = prctl(PR_GET_TIMERSLACK);
	uint64_t start = now_ns();
	prctl(PR_SET_TIMERSLACK, 1UL);
	nanosleep(&limit, NULL);
	prctl(PR_SET_TIMERSLACK, slack);
	uint64_t slept = now_ns() - start;
	debt_ns -= slept < debt_ns ? slept : debt_ns;
}

CUresult driver_check(void)
{
	REFUSE_IF(emu.forked || !__atomic_load_n(&emu.ready, __ATOMIC_ACQUIRE), CUDA_ERROR_NOT_INITIALIZED);
	return __atomic_load_n(&exiting, __ATOMIC_RELAXED) ? CUDA_ERROR_DEINITIALIZED : CUDA_SUCCESS;
}

static void child_after_fork(void)
{
	if (emu.ready)
		emu.forked = true;
	pthread_mutex_init(&emu.lock, NULL); /* the thread that held it is not in this process */
	pthread_mutex_init(&memory.lock, NULL);
}

static void at_exit(void)
{
	if (setting(SETTING_exit_waits) && driver_check() == CUDA_SUCCESS)
		for (struct context *ctx = emu.contexts; ctx; ctx = ctx->next)
			context_wait(ctx);
	__atomic_store_n(&exiting, true, __ATOMIC_RELAXED); /* other threads go on */
}

static CUresult open_board(void)
{
	int fd = open("/dev/nvidia-emu-board", O_RDWR | O_CLOEXEC);

	REFUSE_IF(fd < 0, CUDA_ERROR_NO_DEVICE);
	void *at = mmap(NULL, sizeof(struct emu_board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	REFUSE_IF(at == MAP_FAILED, CUDA_ERROR_OPERATING_SYSTEM);
	emu.board = at;
	return emu.board->magic == EMU_BOARD_MAGIC ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

static CUresult start(void)
{
	struct nv_ioctl_rm_api_version version = {
	        .cmd = '2'}; /* "query": relaxed comparison, answers the string */

	emu.ctl = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	REFUSE_IF(emu.ctl < 0, CUDA_ERROR_NO_DEVICE);
	settings_read();
	TRY(open_board());
	rm_escape(emu.ctl, NV_ESC_CHECK_VERSION_STR, &version, sizeof(version));
	REFUSE_IF(rm_alloc_root(&emu.h_client) != NV_OK || uvm_open() != NV_OK, CUDA_ERROR_OPERATING_SYSTEM);
	TRY(devices_open());
	fault_install();
	pthread_atfork(NULL, NULL, child_after_fork);
	atexit(at_exit);
	return CUDA_SUCCESS;
}

CUAPI(2000, cuInit, unsigned flags)
{
	static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
	CUresult result = CUDA_SUCCESS;

	REFUSE_IF(flags, CUDA_ERROR_INVALID_VALUE);
	REFUSE_IF(emu.forked, CUDA_ERROR_NOT_INITIALIZED);
	LOCKED(&once);
	if (!emu.ready) {
		result = start();
		if (result == CUDA_SUCCESS)
			__atomic_store_n(&emu.ready, true, __ATOMIC_RELEASE);
	}
	return result;
}

CUAPI(2020, cuDriverGetVersion, int *version)
{
	REFUSE_IF(!version, CUDA_ERROR_INVALID_VALUE);
	*version = CUDA_VERSION;
	return CUDA_SUCCESS;
}
