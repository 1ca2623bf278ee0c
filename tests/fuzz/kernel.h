/*
 * kernel.h - stands in front of every file of the link's fuzzer (-include): what the link asks of the kernel is asked of a model in
 * this process (kernel.c). An order of link events makes some 300 such calls, and each is a kernel entry less.
 *
 * The model is stricter than the kernel: a wait that nobody ends, a number that the shim uses and does not own, and a page
 * that is read after it was unmapped end the run. Its clock stands still until somebody waits.
 */
#ifndef VALVE_FUZZ_KERNEL_H
#define VALVE_FUZZ_KERNEL_H

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* ---- for the shim ---- */
long kernel_call(long number, ...);
void *kernel_map(void *at, size_t bytes, int flags, int number);
void *kernel_remap(void *from, size_t bytes, void *to);
int kernel_unmap(void *at);
off_t kernel_size(int number);
int kernel_socket(void);
int kernel_clock(struct timespec *now);
_Noreturn void kernel_exit(int status);

#define syscall(...)                           kernel_call(__VA_ARGS__)
#define mmap(at, bytes, prot, flags, fd, from) kernel_map(at, bytes, flags, fd)
#define mremap(from, old, bytes, flags, to)    kernel_remap(from, bytes, to)
#define munmap(at, bytes)                      kernel_unmap(at)
#define lseek(fd, offset, whence)              kernel_size(fd)
#define socket(domain, type, protocol)         kernel_socket()
#define prctl(what, to)                        ((void)(to), 0)
#define clock_gettime(clock, now)              kernel_clock(now)
#define _exit(status)                          kernel_exit(status)

#include "shim.h"

/* The shim's three fixed addresses are entries of a table: a mapping moves in one step, as mremap has it. */
enum kernel_place { KERNEL_LAUNCH, KERNEL_REGION, KERNEL_CONTROL, KERNEL_PLACES };
extern unsigned char *kernel_at[KERNEL_PLACES];
#undef VALVE_REGION
#undef VALVE_CONTROL_PAGE
#undef VALVE_LAUNCH
#define VALVE_REGION       ((struct valve_region *)(void *)kernel_at[KERNEL_REGION])
#define VALVE_CONTROL_PAGE (kernel_at[KERNEL_CONTROL])
#define VALVE_LAUNCH       ((const volatile struct valve_control *)(const void *)kernel_at[KERNEL_LAUNCH])

/* Of a small node: each turn looks at each GPU. */
#undef VALVE_GRANT_GPUS
#define VALVE_GRANT_GPUS 3u

/* ---- for the fuzzer, which is valved and the application ---- */
struct kernel_file;
struct kernel_file *kernel_memory(uint32_t bytes, uint32_t seals);
struct kernel_file *kernel_bell(void);
void *kernel_bytes(const struct kernel_file *memory); /* while it holds the file */
void kernel_let_go(struct kernel_file *file);
void kernel_ring(struct kernel_file *bell);
/* What valved says on a link that it holds. False: nobody reads any more. */
bool kernel_tell(struct kernel_file *link, const void *packet, uint32_t bytes,
                 struct kernel_file *const *files, uint32_t count);
void kernel_hang_up(struct kernel_file *link,
                    bool unread); /* lets go of it; `unread`: with words of ours in it */
void kernel_begin(void);
void kernel_end(void); /* nothing is left: no number, no file, no page */
uint64_t kernel_now(void);
void kernel_pass(uint64_t ns);
void kernel_steal(int number,
                  bool reuse); /* the application closes it, and may open a file of its own there */
void kernel_limit(int numbers, bool no_memory);
extern bool kernel_is_crowded; /* too many descriptors of the user are under way: none is passed */
int kernel_open(void);         /* a file of the shim's or the application's; -EMFILE */
const struct kernel_file *kernel_look(int number, int *signal); /* NULL: nothing is open there */

/* What the model asks of the fuzzer. */
int valved_accepts(struct kernel_file *link);
int valved_hears(struct kernel_file *link, const void *packet, uint32_t bytes); /* 0 or -errno */
bool valved_has_room(void);
void kernel_waits(void);  /* the clock has moved */
void kernel_enters(void); /* before each call of the shim */

#define CHECK(condition)                                                                \
	do {                                                                            \
		if (!(condition)) {                                                     \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
			abort();                                                        \
		}                                                                       \
	} while (0)

#endif
