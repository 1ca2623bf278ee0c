/*
 * decode.c - one JSON line for each driver call, in the form of ioctl.schema.json: enough to issue the call again
 * (the lab's replay) and to read what was asked. Neither malloc nor stdio's streams: we are a guest inside ioctl.
 */
#include "trace.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LOG_LIMIT = 14 << 20 };
struct line {
	size_t n;
	char text[4 * PARAMS + 2048];
};
static _Atomic uint64_t written;

__attribute__((format(printf, 2, 3))) static void add(struct line *l, const char *format, ...)
{
	size_t room = sizeof(l->text) - l->n - 2;
	va_list list;

	va_start(list, format);
	int n = vsnprintf(l->text + l->n, room, format, list);
	va_end(list);
	if (n > 0)
		l->n += (size_t)n < room ? (size_t)n : room - 1;
}

static void add_hex(struct line *l, const char *name, const void *bytes, uint32_t count)
{
	static const char digit[] = "0123456789abcdef";
	const uint8_t *b = bytes;

	add(l, ", \"%s\": \"", name);
	for (uint32_t i = 0; i < count && l->n + 4 < sizeof(l->text); i++) {
		l->text[l->n++] = digit[b[i] >> 4];
		l->text[l->n++] = digit[b[i] & 15];
	}
	add(l, "\"");
}

static void emit(struct line *l)
{
	add(l, "}");
	l->text[l->n++] = '\n';
	if (tracer.log < 0 || atomic_fetch_add(&written, l->n) > LOG_LIMIT)
		return;
	while (write(tracer.log, l->text, l->n) < 0 && errno == EINTR) {
	}
}

static void begin(struct line *l, const char *call, int fd, uint64_t start_ns)
{
	l->n = 0;
	add(l, "{\"t_ns\": %llu, \"pid\": %d, \"tid\": %ld, \"call\": \"%s\", \"fd\": %d",
	    (unsigned long long)start_ns, (int)tracer.pid, syscall(SYS_gettid), call, fd);
}

void log_open(const char *path, int fd, uint64_t start_ns)
{
	struct line l;

	begin(&l, "open", fd, start_ns);
	add(&l, ", \"path\": \"%s\"", path);
	emit(&l);
}

void log_close(int fd)
{
	struct line l;

	begin(&l, "close", fd, now_ns());
	emit(&l);
}

/* Bytes behind a UVM request; the number does not carry them. MAP_EXTERNAL_ALLOCATION: only its head. */
static uint32_t uvm_bytes(unsigned long request)
{
	switch (request) {
	case UVM_REGISTER_CHANNEL:
		return sizeof(struct uvm_register_channel);
	case UVM_UNREGISTER_CHANNEL:
		return tracer.branch >= 590 ? sizeof(struct uvm_unregister_channel_590)
		                            : sizeof(struct uvm_unregister_channel);
	case UVM_MAP_EXTERNAL_SPARSE:
	case UVM_UNMAP_EXTERNAL:
		return sizeof(struct uvm_map_external_sparse);
	case UVM_CREATE_EXTERNAL_RANGE:
	case UVM_FREE:
	case UVM_MAP_EXTERNAL_ALLOCATION:
		return 24;
	case UVM_REGISTER_GPU_VASPACE:
		return 32;
	case UVM_REGISTER_GPU:
		return 40;
	case UVM_UNREGISTER_GPU:
	case UVM_UNREGISTER_GPU_VASPACE:
		return 20;
	case UVM_INITIALIZE:
		return 16;
	case UVM_MM_INITIALIZE:
		return 8;
	default:
		return 0;
	}
}

/* The driver takes a class's own size whatever the caller says, and libcuda may say 0. */
static uint32_t alloc_bytes(uint32_t cls, uint32_t said)
{
	if (said)
		return said;
	if (cls == NV01_DEVICE_0)
		return sizeof(struct nv0080_alloc);
	if (cls == NV20_SUBDEVICE_0)
		return sizeof(struct nv2080_alloc);
	if (cls == KEPLER_CHANNEL_GROUP_A)
		return sizeof(struct nv_channel_group_alloc);
	if (cls == FERMI_CONTEXT_SHARE_A)
		return sizeof(struct nv_ctxshare_alloc);
	if (NV_CLASS_IS_GPFIFO(cls))
		return tracer.branch >= 570 ? 368 : 360;
	return 0;
}

/* Pointer and size of the parameter block of an allocation or control; NULL: there is none that can be read. */
static const void *params_of(uint32_t nr, uint32_t size, const void *arg, uint32_t *bytes)
{
	const struct nvos54_control *control = arg;
	const struct nvos21_alloc *short_form = arg;
	const struct nvos64_alloc *long_form = arg;
	uint64_t at = 0;

	*bytes = 0;
	if (nr == NV_ESC_RM_CONTROL && size == sizeof(*control)) {
		at = control->flags & NVOS54_FLAGS_FINN_SERIALIZED ? 0 : control->params;
		*bytes = control->paramsSize;
	} else if (nr == NV_ESC_RM_ALLOC && size == sizeof(*short_form)) {
		at = short_form->pAllocParms;
		*bytes = alloc_bytes(short_form->hClass, short_form->paramsSize);
	} else if (nr == NV_ESC_RM_ALLOC && size == sizeof(*long_form)) {
		at = long_form->flags & NVOS64_FLAGS_FINN_SERIALIZED ? 0 : long_form->pAllocParms;
		*bytes = alloc_bytes(long_form->hClass, long_form->paramsSize);
	}
	*bytes = !at ? 0 : *bytes < PARAMS ? *bytes : PARAMS;
	return *bytes ? (const void *)(uintptr_t)at : NULL;
}

/* An XFER wraps another escape; *nr, *size and the returned argument are the inner ones. */
static const void *unwrap(unsigned long request, const void *arg, uint32_t *nr, uint32_t *size)
{
	const struct nv_ioctl_xfer *xfer = arg;

	*nr = NV_IOC_NR(request);
	*size = NV_IOC_SIZE(request);
	if (*nr != NV_ESC_IOCTL_XFER_CMD || *size != sizeof(*xfer))
		return arg;
	*nr = xfer->cmd;
	*size = xfer->size;
	return (const void *)(uintptr_t)xfer->ptr;
}

/* Behind 24 bytes of head stand 32 attributes of 36 bytes, 256 from branch 570 on; then count, control descriptor, client,
 * memory, status. */
static uint32_t uvm_map_tail(void)
{
	return 24 + (tracer.branch >= 570 ? 256 : 32) * 36;
}

void seen_before(struct seen *seen, enum kind kind, unsigned long request, const void *arg)
{
	uint32_t nr, size;

	seen->bytes = 0;
	if (!arg)
		return;
	if (kind == UVM) {
		memcpy(seen->arg, arg, uvm_bytes(request));
		return;
	}
	const void *inner = unwrap(request, arg, &nr, &size);
	memcpy(seen->arg, inner, size < sizeof(seen->arg) ? size : sizeof(seen->arg));
	const void *params = params_of(nr, size, inner, &seen->bytes);
	if (params)
		memcpy(seen->params, params, seen->bytes);
}

static void add_rm(struct line *l, const struct call *call, const struct seen *seen)
{
	uint32_t nr, size, bytes;
	const void *arg = unwrap(call->request, call->arg, &nr, &size);
	const uint32_t *word = arg;

	add(l, ", \"node\": \"%s\", \"nr\": %u, \"size\": %u, \"xfer\": %s",
	    call->kind == CTL ? "ctl" : "gpu", nr, size,
	    NV_IOC_NR(call->request) == NV_ESC_IOCTL_XFER_CMD ? "true" : "false");
	if (!arg)
		return;
	add_hex(l, "arg", seen->arg, size < sizeof(seen->arg) ? size : (uint32_t)sizeof(seen->arg));
	add_hex(l, "arg_out", arg, size < sizeof(seen->arg) ? size : (uint32_t)sizeof(seen->arg));
	const void *params = params_of(nr, size, seen->arg, &bytes);
	if (nr == NV_ESC_RM_ALLOC)
		add(l,
		    ", \"op\": \"alloc\", \"client\": %u, \"parent\": %u, \"object\": %u, \"class\": %u, "
		    "\"status\": %u",
		    word[0], word[1], word[2], word[3], size == 48 ? word[10] : word[7]);
	else if (nr == NV_ESC_RM_CONTROL)
		add(l, ", \"op\": \"control\", \"client\": %u, \"object\": %u, \"cmd\": %u, \"status\": %u",
		    word[0], word[1], word[2], word[7]);
	else if (nr == NV_ESC_RM_FREE)
		add(l, ", \"op\": \"free\", \"client\": %u, \"object\": %u, \"status\": %u", word[0], word[2],
		    word[3]);
	if (!params)
		return;
	add_hex(l, "params", seen->params, bytes);
	if (memcmp(seen->params, params, bytes))
		add_hex(l, "params_out", params, bytes);
}

void log_call(const struct call *call, const struct seen *seen)
{
	struct line l;

	if (tracer.log < 0)
		return;
	begin(&l, call->kind == UVM ? "uvm" : "rm", call->fd, call->start_ns);
	add(&l, ", \"ns\": %llu, \"errno\": %d", (unsigned long long)call->ns, call->code ? call->error : 0);
	if (call->kind == UVM) {
		add(&l, ", \"request\": %lu", call->request);
		if (call->request == UVM_MAP_EXTERNAL_ALLOCATION && call->arg)
			add_hex(&l, "tail", (const uint8_t *)call->arg + uvm_map_tail(), 24);
		if (call->arg)
			add_hex(&l, "arg", seen->arg, uvm_bytes(call->request));
		if (call->arg)
			add_hex(&l, "arg_out", call->arg, uvm_bytes(call->request));
	} else {
		add_rm(&l, call, seen);
	}
	emit(&l);
}
