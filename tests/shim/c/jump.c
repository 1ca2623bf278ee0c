/*
 * jump.c - a program whose handler leaves a driver call by siglongjmp, and then works on. The fake driver raises the signal in the
 * call that FAKERM_RAISES names.
 */
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "cuda.h"
#include "nvrm.h"

#define HANGS 0x4e /* NV_ESC_RM_MAP_MEMORY */

extern CUresult cuInit(unsigned flags);
extern CUresult cuLaunchKernel(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                               uint64_t, uint64_t, uint64_t);

static sigjmp_buf way_out;

static void leave(int number)
{
	(void)number;
	siglongjmp(way_out, 1);
}

static uint32_t allocate(int fd, uint32_t root, uint32_t parent, uint32_t handle, uint32_t class)
{
	uint8_t params[1024] = {0};
	struct nvos64_alloc call = {.hRoot = root,
	                            .hObjectParent = parent,
	                            .hObjectNew = handle,
	                            .hClass = class,
	                            .pAllocParms = root ? (uintptr_t)params : 0};

	return ioctl(fd, NV_IOWR(NV_ESC_RM_ALLOC, sizeof(call)), &call) ? 0 : call.hObjectNew;
}

int main(void)
{
	uint8_t enable[4] = {1}, nothing[32] = {0};
	struct nvos54_control schedule = {.hObject = 0x10,
	                                  .cmd = NVA06F_CTRL_CMD_GPFIFO_SCHEDULE,
	                                  .params = (uintptr_t)enable,
	                                  .paramsSize = 3};
	char line[8];
	int fd;

	alarm(300); /* only ends a hung test */
	signal(SIGUSR1, leave);
	fd = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	if (!sigsetjmp(way_out, 1) && (ioctl(fd, NV_IOWR(HANGS, sizeof(nothing)), nothing), 1))
		return 1;
	puts("out");
	fflush(stdout);
	if (read(0, line, 1) != 1 || cuInit(0))
		return 2;
	cuLaunchKernel(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11);
	schedule.hClient = allocate(fd, 0, 0, 0, 0x41);
	allocate(fd, schedule.hClient, schedule.hClient, 1, 0x80);
	allocate(fd, schedule.hClient, 1, 0x10, 0xc86f);
	ioctl(fd, NV_IOWR(NV_ESC_RM_CONTROL, sizeof(schedule)), &schedule);
	return read(0, line, 1) < 0;
}
