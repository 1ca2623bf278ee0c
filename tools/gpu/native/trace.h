/* trace.h - the parts of the tracer: hooks (trace.c), the log (decode.c), the table (table.c), requests (serve.c). */
#ifndef VALVE_GPU_TRACE_H
#define VALVE_GPU_TRACE_H

#include "rm.h"

#include <sys/types.h>

enum kind { UNKNOWN, OTHER, CTL, NODE, UVM };
struct tracer {
	pid_t pid, owner; /* owner: whose table it is; a forked child logs, but leaves the table alone */
	int log;
	uint32_t branch; /* of the driver: sizes of UVM calls differ */
	_Atomic int uvm;
	struct table *table;
	int (*ioctl)(int fd, unsigned long request, ...);
	int (*close)(int fd);
};
extern struct tracer tracer;
int tracer_uvm(void); /* the descriptor that channels were registered on; -1: none yet */

/* decode.c: `before` is a copy of the argument from before the call */
enum { PARAMS = 1600 };
struct seen {
	uint32_t bytes; /* of params */
	uint8_t arg[64], params[PARAMS];
};
void seen_before(struct seen *seen, enum kind kind, unsigned long request, const void *arg);
struct call {
	int fd, code, error;
	enum kind kind;
	unsigned long request;
	void *arg;
	uint64_t start_ns, ns;
};
void log_open(const char *path, int fd, uint64_t start_ns);
void log_close(int fd);
void log_call(const struct call *call, const struct seen *seen);

/* table.c */
void table_saw(const struct call *call);
void table_closed(int fd);

/* serve.c */
void serve_start(const char *sock, const char *guard);

#endif
