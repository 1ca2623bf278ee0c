/* errno.c - errno before and after a thread's first launch and a later one. */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>

#include "cuda.h"

extern CUresult cuInit(unsigned flags);
extern CUresult cuLaunchKernel(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                               uint64_t, uint64_t, uint64_t);

int main(void)
{
	CUresult result = cuInit(0);
	int first, second;

	errno = 1234;
	cuLaunchKernel(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11);
	first = errno;
	cuLaunchKernel(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11);
	second = errno;
	printf("%d %d %d\n", result, first, second);
	return 0;
}
