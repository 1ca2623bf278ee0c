/*
 * sealed.c - launches under a seccomp filter that kills at any system call but write and exit_group. The first launch
 * of a thread and of a name may do some (a slot, a look-up), so one of each comes before.
 */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cuda.h"

extern CUresult cuInit(unsigned flags);
extern CUresult cuLaunchKernel(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                               uint64_t, uint64_t, uint64_t);
extern CUresult cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status);

int main(int argc, char **argv)
{
	struct sock_filter rules[] = {
	        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
	        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_write, 1, 0),
	        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 0, 1),
	        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	};
	struct sock_fprog filter = {sizeof(rules) / sizeof(rules[0]), rules};
	int count = argc > 1 ? atoi(argv[1]) : 1;
	CUresult (*by_pointer)(void);
	void *pointer;
	char line[64];

	cuInit(0);
	cuLaunchKernel(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11);
	cuGetProcAddress_v2("cuLaunchKernel", &pointer, 12000, 0, NULL);
	by_pointer = (CUresult(*)(void))pointer;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter))
		return 2;
	for (int i = 0; i < count / 2; i++) {
		cuLaunchKernel(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11);
		by_pointer();
	}
	snprintf(line, sizeof(line), "%d launches\n", count);
	if (write(1, line, strlen(line)) < 0)
		return 3;
	_exit(0);
}
