/*
 * sandbox.c - a program that forbids some system calls to all its threads, before or after it opens the driver: they are
 * refused, or trapped by a handler that says that there are no such calls, or end the thread. Usage: sandbox
 * refuse|trap|kill before|after NUMBER...
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define CALLS 8

static void say_that_there_is_none(int number, siginfo_t *info, void *context)
{
	(void)number;
	(void)info;
	((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = -ENOSYS;
}

static int forbid(unsigned action, char **numbers, int count)
{
	struct sock_filter rule[CALLS + 3] = {
	        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
	};
	struct sock_fprog filter = {(unsigned short)(count + 3), rule};

	if (count > CALLS || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		return -1;
	for (int i = 0; i < count; i++)
		rule[i + 1] = (struct sock_filter)BPF_JUMP(
		        BPF_JMP | BPF_JEQ | BPF_K, (unsigned)atoi(numbers[i]), (unsigned char)(count - i), 0);
	rule[count + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	rule[count + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action);
	return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter);
}

int main(int argc, char **argv)
{
	struct sigaction trap = {.sa_sigaction = say_that_there_is_none, .sa_flags = SA_SIGINFO | SA_NODEFER};
	unsigned action = !strcmp(argv[1], "trap")   ? SECCOMP_RET_TRAP
	                  : !strcmp(argv[1], "kill") ? SECCOMP_RET_KILL_THREAD
	                                             : SECCOMP_RET_ERRNO | EPERM;
	int is_before = !strcmp(argv[2], "before");
	char line[8];

	alarm(300); /* only ends a hung test */
	if (sigaction(SIGSYS, &trap, NULL) || (is_before && forbid(action, argv + 3, argc - 3)))
		return 1;
	if (open("/dev/nvidiactl", O_RDWR) < 0)
		return 2;
	if (!is_before && forbid(action, argv + 3, argc - 3))
		return 1;
	puts("ready");
	fflush(stdout);
	return read(0, line, sizeof(line)) < 0;
}
