/* direct.c - a program (or plugin) that is linked to libcuda.so.1 and launches N times. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "cuda.h"

#ifndef EMPTY
extern CUresult cuInit(unsigned flags);
extern CUresult cuLaunchKernel(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                               uint64_t, uint64_t, uint64_t);
extern uint64_t stub_count(const char *what);
extern uint64_t stub_argument(int index);

int run(int count)
{
	uint64_t sum = 0;

	cuInit(0);
	for (int i = 0; i < count; i++)
		cuLaunchKernel(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11);
	for (int i = 0; i < 11; i++)
		sum += stub_argument(i);
	printf("%d %llu %llu\n", count, (unsigned long long)stub_count("launches"), (unsigned long long)sum);
	fflush(stdout);
	return getchar() == EOF ? 0 : 1;
}

#ifndef PLUGIN
int main(int argc, char **argv)
{
	return run(argc > 1 ? atoi(argv[1]) : 1);
}
#endif
#endif
