/*
 * fakenv.h - libfakenv.so inside: a preload that answers the NVIDIA nodes from valve-emu-server.
 * nodes.c opens and recognises them, calls.c carries one request of one thread, ioctls.c packs what
 * an ioctl points to, pages.c changes mappings when UVM says so, sparse.c
 * keeps what is sparse, meter.c counts the time spent here, threads.c knows what a native step consists of, hooks.c holds the interposed names
 * and nothing else.
 */
#ifndef VALVE_FAKENV_H
#define VALVE_FAKENV_H

#include "../emu.h"
#include "../guards.h"
#include "../wire.h"
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct node {
	enum emu_kind kind;
	uint32_t minor, nonce;
	uint64_t file;
};

/* The functions behind ours in the look-up order; libvalve in front of us reaches us the same way.
 */
struct real {
	int (*open)(const char *, int, ...);
	int (*openat)(int, const char *, int, ...);
	int (*ioctl)(int, unsigned long, ...);
	void *(*mmap)(void *, size_t, int, int, int, off_t);
	int (*access)(const char *, int);
	int (*faccessat)(int, const char *, int, int);
};
const struct real *fake_real(void);

/* Where VALVE_EMU_DIR points, or NULL: then every hook passes through. Read once. */
const char *fake_dir(void);

/* "/dev/nvidia..." or "/proc/driver/nvidia..."; cheap enough for every open of a process. */
bool fake_is_ours(const char *path);
int fake_open(const char *path, int flags);
/* File of the server's that stands for a /proc/driver/nvidia path, or NULL when path is none of
 * ours. */
const char *fake_proc_path(const char *path, char *out, size_t size);
bool fake_node_exists(const char *path, uint32_t *minor, enum emu_kind *kind);
bool fake_node_of_fd(int fd, struct node *out);
uint64_t fake_nodes_held(void);

/* A new connection to the server past its hello; -1 and errno. */
int fake_connect(enum emu_kind kind, uint32_t minor, uint64_t file, struct emu_welcome *welcome);
/* One packet, and the fd that came with it; -1 and errno. */
ssize_t fake_receive(int fd, void *data, size_t size, int *passed_fd);
const struct emu_board *fake_board(void);
uint32_t fake_branch(void);

/* One request on this thread's own connection. message (of capacity bytes) holds call + arg +
 * params, and the answer on return. Returns 0 or -errno; *fd_out (may be NULL) receives a passed fd
 * or -1, *op_out a page operation or kind 0. */
int fake_call(void *message, size_t size, size_t capacity, struct emu_reply **reply, int *fd_out,
              struct emu_page_op *op_out);

int fake_ioctl(const struct node *node, unsigned long request, void *arg);

/* libc's pthread_sigmask: ours keeps the park signal out of masks, which is not wanted under a lock of ours. */
int fake_sigmask(int how, const sigset_t *set, sigset_t *before);

void fake_pages_apply(const struct emu_page_op *op, int memfd);
/* sparse.c: a range becomes sparse; stops being so, with the change that ends it. */
void fake_sparse_make(uint64_t base, uint64_t end);
void fake_sparse_end(uint64_t base, uint64_t end, void (*change)(const struct emu_page_op *, int),
                     const struct emu_page_op *op, int memfd);
/* Starts the thread that changes this process's pages on behalf of other processes. */
void fake_pages_serve(uint64_t file);

#endif
