/*
 * helper.c - a thread inside the workload that makes one call a message and answers with its result and its time. The
 * watchdog is on the other end: a call that hangs while the channels are off is an answer, too.
 *
 *   vmm CALL SLOT QUARANTINE    read SLOT        sparse SLOT          offset SLOT HEXTAIL BRANCH
 *   where SLOT
 *   cost MIB TOTAL_MIB          export MIB       import MIB (with fd) calls N
 *   make stream|priority|module|context|graph    pointers    range    hole
 */
#include "helper.h"
#include "gpu.h"
#include "nvrm.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SCRATCH = 32 << 20, WORDS = VMM_SLOT_BYTES / 4 };
static struct {
	int listener;
	CUstream stream;
	CUdeviceptr out;
} helper;

static int put(char *answer, CUresult code, uint64_t ns)
{
	return snprintf(answer, LINE, "{\"error\": %d, \"us\": %.1f}", code, (double)ns / 1e3);
}

static struct piece *slot_of(unsigned slot)
{
	return &vmm_pool.slot[slot < VMM_SLOTS ? slot : 0];
}

static void do_vmm(const char *rest, char *answer)
{
	static struct piece spare = {0, 0, 2 << 20}; /* of reserve, create and release */
	char name[16] = "";
	unsigned slot = 0, quarantine = 0, call = 0;
	uint64_t ns = 0;

	sscanf(rest, "%15s %u %u", name, &slot, &quarantine);
	while (call < VMM_CALLS && strcmp(vmm_names[call], name))
		call++;
	struct piece p = *slot_of(slot);
	if (quarantine)
		p.handle = vmm_pool.slot[VMM_SLOTS].handle;
	if (call == VMM_ALLOC || call == VMM_FREE)
		p = (struct piece){vmm_pool.scratch, 0, SCRATCH}; /* too large for a cached block */
	if (call >= VMM_RESERVE)
		p = spare;
	CUresult code = call < VMM_CALLS ? vmm_do((enum vmm_call)call, &p, &ns) : CUDA_ERROR_INVALID_VALUE;
	if (call == VMM_ALLOC)
		vmm_pool.scratch = p.at;
	if (call >= VMM_RESERVE)
		spare = p;
	put(answer, code, ns);
}

/* By a kernel, so that a hole would be a fault on the GPU. Only while the channels are on. */
static CUresult sum_of(CUdeviceptr at, unsigned words, unsigned long long *sum)
{
	void *args[] = {&at, &words, &helper.out};

	TRY(gpu.cuMemsetD32Async(helper.out, 0, 2, helper.stream));
	TRY(gpu.cuLaunchKernel(gpu.sum, 1, 1, 1, THREADS, 1, 1, 0, helper.stream, args, NULL));
	TRY(gpu.cuStreamSynchronize(helper.stream));
	return gpu.cuMemcpyDtoH_v2(sum, helper.out, sizeof(*sum));
}

static unsigned long long expected_sum(unsigned slot)
{
	unsigned long long sum = 0, pattern = vmm_pattern(slot);

	for (unsigned long long i = 0; i < WORDS; i++)
		sum += (pattern + (slot != VMM_SLOTS && i >= WORDS / 2)) * (2 * (i & 0xffff) + 1);
	return sum;
}

static void do_read(const char *rest, char *answer)
{
	unsigned slot = (unsigned)atoi(rest);
	unsigned long long sum = 0;
	CUresult code = sum_of(slot_of(slot)->at, WORDS, &sum);

	snprintf(answer, LINE, "{\"error\": %d, \"own\": %s, \"zero\": %s}", code,
	         sum == expected_sum(slot) ? "true" : "false", sum == 0 ? "true" : "false");
}

/* libcuda may have opened the uvm node more than once; the file with an initialised space answers 0. On the emulated GPU
 * a node is a socket. */
static int on_uvm(unsigned long request, void *params, const uint32_t *status, double *us, int *tried)
{
	DIR *folder = opendir("/proc/self/fd");
	int last = ENODEV;

	for (struct dirent *e; folder && (e = readdir(folder));) {
		char link[300], to[64] = "";
		snprintf(link, sizeof(link), "/proc/self/fd/%s", e->d_name);
		if (readlink(link, to, sizeof(to) - 1) <= 0 ||
		    (strcmp(to, "/dev/nvidia-uvm") && strncmp(to, "socket:", 7)))
			continue;
		uint64_t start = now_ns();
		int failed = ioctl(atoi(e->d_name), request, params) ? errno : 0;
		*us = (double)(now_ns() - start) / 1e3;
		if (!strncmp(to, "socket:", 7) && failed)
			continue;
		last = failed;
		++*tried;
		if (!last && *status == NV_OK)
			break;
	}
	if (folder)
		closedir(folder);
	return last;
}

static void do_sparse(const char *rest, char *answer)
{
	const struct piece *p = slot_of((unsigned)atoi(rest));
	struct uvm_map_external_sparse params = {.base = p->at, .length = p->bytes, .rmStatus = ~0u};
	CUuuid uuid;
	double us = 0;
	int tried = 0;

	if (gpu.cuDeviceGetUuid_v2(&uuid, 0)) {
		put(answer, failure.code, 0);
		return;
	}
	memcpy(params.gpuUuid, uuid.bytes, sizeof(params.gpuUuid));
	int error = on_uvm(UVM_MAP_EXTERNAL_SPARSE, &params, &params.rmStatus, &us, &tried);
	snprintf(answer, LINE, "{\"errno\": %d, \"status\": %u, \"us\": %.1f, \"files\": %d}", error,
	         params.rmStatus, us, tried);
}

static void do_where(const char *rest, char *answer)
{
	const struct piece *p = slot_of((unsigned)atoi(rest));
	CUuuid uuid = {{0}};
	CUresult code = gpu.cuDeviceGetUuid_v2(&uuid, 0);
	int at = snprintf(answer, LINE, "{\"error\": %d, \"base\": %llu, \"bytes\": %zu, \"uuid\": \"", code,
	                  p->at, p->bytes);

	for (unsigned i = 0; i < sizeof(uuid.bytes); i++)
		at += snprintf(answer + at, LINE - (size_t)at, "%02x", (unsigned char)uuid.bytes[i]);
	snprintf(answer + at, LINE - (size_t)at, "\"}");
}

/*
 * Map the second half of a slot's handle over its first half, in place: what the public API cannot do. The tail is that of
 * libcuda's own UVM_MAP_EXTERNAL_ALLOCATION for this handle, as the tracer saw it; before it stand 32 attributes, 256 from
 * branch 570 on (kernel-open/nvidia-uvm/uvm_ioctl.h).
 */
static void do_offset(const char *rest, char *answer)
{
	enum { HEAD = 24, ATTRIBUTE = 36, TAIL = 24, STATUS = 20 };
	static uint8_t params[HEAD + 256 * ATTRIBUTE + TAIL];
	unsigned slot = 0, branch = 580;
	char hex[2 * TAIL + 1] = "";
	CUuuid uuid;
	double us = 0;
	int tried = 0;

	sscanf(rest, "%u %48s %u", &slot, hex, &branch);
	const struct piece *p = slot_of(slot);
	uint8_t *tail = params + HEAD + (branch >= 570 ? 256 : 32) * ATTRIBUTE;
	uint64_t head[3] = {p->at, p->bytes / 2, p->bytes / 2};
	memset(params, 0, sizeof(params));
	memcpy(params, head, sizeof(head));
	if (!gpu.cuDeviceGetUuid_v2(&uuid, 0))
		memcpy(params + HEAD, uuid.bytes, sizeof(uuid.bytes));
	from_hex(hex, tail, TAIL);
	memset(tail + STATUS, 0xff, sizeof(uint32_t));
	int error = on_uvm(UVM_MAP_EXTERNAL_ALLOCATION, params, (const uint32_t *)(void *)(tail + STATUS),
	                   &us, &tried);
	uint32_t status;
	memcpy(&status, tail + STATUS, sizeof(status));
	unsigned first = 0;
	CUresult code = gpu.cuMemcpyDtoH_v2(&first, p->at, sizeof(first));
	snprintf(answer, LINE, "{\"errno\": %d, \"status\": %u, \"us\": %.1f, \"moved\": %s, \"error\": %d}",
	         error, status, us, first == vmm_pattern(slot) + 1 ? "true" : "false", code);
}

static void do_cost(const char *rest, char *answer)
{
	unsigned mib = 2, total = 64;

	sscanf(rest, "%u %u", &mib, &total);
	vmm_cost(mib, total, answer, LINE);
}

static CUresult map_whole(struct piece *p)
{
	uint64_t unused;

	TRY(vmm_do(VMM_RESERVE, p, &unused));
	TRY(vmm_do(VMM_MAP, p, &unused));
	return vmm_do(VMM_ACCESS, p, &unused);
}

/* The descriptor leaves with the answer; the handle stays with this process until it ends. */
static int do_export(const char *rest, char *answer)
{
	struct piece p = {0, 0, (size_t)atoi(rest) << 20};
	uint64_t unused;
	int fd = -1;
	CUresult code = vmm_do(VMM_CREATE, &p, &unused);

	if (!code)
		code = map_whole(&p);
	if (!code)
		code = gpu.cuMemsetD32_v2(p.at, 0xA5C3A5C3u, p.bytes / 4);
	if (!code)
		code = gpu.cuMemExportToShareableHandle(&fd, p.handle, 1, 0);
	put(answer, code, 0);
	return fd;
}

static void do_import(const char *rest, char *answer, int fd)
{
	struct piece p = {0, 0, (size_t)atoi(rest) << 20};
	unsigned word = 0, wrong = 0;
	CUresult code = gpu.cuMemImportFromShareableHandle(&p.handle, (void *)(intptr_t)fd, 1);

	if (!code)
		code = map_whole(&p);
	for (size_t at = 0; at < p.bytes && !code; at += p.bytes / 16) {
		code = gpu.cuMemcpyDtoH_v2(&word, p.at + at, sizeof(word));
		wrong += word != 0xA5C3A5C3u;
	}
	if (fd >= 0)
		close(fd);
	snprintf(answer, LINE, "{\"error\": %d, \"wrong\": %u}", code, wrong);
}

static CUresult make_graph(void)
{
	unsigned words = 16, seed = 1;
	void *args[] = {&helper.out, &words, &seed};
	CUgraphExec exec;
	CUgraph graph;

	TRY(gpu.cuStreamBeginCapture_v2(helper.stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	TRY(gpu.cuLaunchKernel(gpu.fill, 1, 1, 1, THREADS, 1, 1, 0, helper.stream, args, NULL));
	TRY(gpu.cuStreamEndCapture(helper.stream, &graph));
	return gpu.cuGraphInstantiateWithFlags(&exec, graph, 0);
}

static void do_make(const char *rest, char *answer)
{
	uint64_t start = now_ns();
	CUresult code = CUDA_ERROR_INVALID_VALUE;
	int least = 0, greatest = 0;
	CUcontext context;
	CUstream stream;
	CUmodule module;

	if (!strcmp(rest, "stream"))
		code = gpu.cuStreamCreateWithPriority(&stream, 1, 0);
	else if (!strcmp(rest, "priority"))
		code = gpu.cuCtxGetStreamPriorityRange(&least, &greatest)
		               ? CUDA_ERROR_UNKNOWN
		               : gpu.cuStreamCreateWithPriority(&stream, 1, greatest);
	else if (!strcmp(rest, "module"))
		code = gpu.cuModuleLoadData(&module, gpu.image);
	else if (!strcmp(rest, "graph"))
		code = make_graph();
	else if (!strcmp(rest, "context"))
		code = gpu.cuCtxCreate_v2(&context, 0, 0);
	if (!code && !strcmp(rest, "context"))
		gpu.cuCtxSetCurrent(gpu.context); /* creating one made it current */
	put(answer, code, now_ns() - start);
}

/* Does the driver's look-up by name return what the library exports? */
static void do_pointers(const char *rest, char *answer)
{
	typedef CUresult look_up(const char *name, void **out, int version, uint64_t flags, int *status);
	static const char *const names[] = {"cuLaunchKernel", "cuGraphLaunch", "cuMemcpyHtoD", "cuMemAlloc",
	                                    "cuMemFree"};
	static const char *const symbols[] = {"cuLaunchKernel", "cuGraphLaunch", "cuMemcpyHtoD_v2",
	                                      "cuMemAlloc_v2", "cuMemFree_v2"};
	unsigned equal = 0, found = 0, count = sizeof(names) / sizeof(names[0]);
	look_up *get;

	(void)rest;
	*(void **)&get = dlsym(gpu.library, "cuGetProcAddress_v2");
	for (unsigned i = 0; get && i < count; i++) {
		void *at = NULL;
		found += !get(names[i], &at, 12000, 0, NULL) && at;
		equal += at && at == dlsym(gpu.library, symbols[i]);
	}
	snprintf(answer, LINE, "{\"error\": %d, \"asked\": %u, \"found\": %u, \"equal\": %u}", get ? 0 : -1,
	         count, found, equal);
}

/* What frameworks ask about memory they were given: must keep making sense for a range of many handles. */
static void do_range(const char *rest, char *answer)
{
	enum { TYPE = 2, POINTER = 3, LEGACY_IPC = 10, RANGE_START = 11, RANGE_SIZE = 12 };
	CUdeviceptr base = 0, at = vmm_pool.slot[1].at + 4096;
	size_t bytes = 0, range_bytes = 0;
	unsigned type = 0, legacy = 0;
	char ipc[64];
	CUresult a = gpu.cuMemGetAddressRange_v2(&base, &bytes, at);
	CUresult b = gpu.cuPointerGetAttribute(&type, TYPE, at);
	CUresult c = gpu.cuPointerGetAttribute(&legacy, LEGACY_IPC, at);
	CUresult d = gpu.cuIpcGetMemHandle(ipc, vmm_pool.slot[1].at);
	CUresult e = gpu.cuPointerGetAttribute(&range_bytes, RANGE_SIZE, at);

	(void)rest;
	snprintf(answer, LINE,
	         "{\"range\": %d, \"per_mapping\": %s, \"bytes\": %zu, \"type\": %d, \"memory_type\": %u, "
	         "\"legacy\": %d, "
	         "\"legacy_capable\": %u, \"ipc\": %d, \"range_size\": %d, \"range_bytes\": %zu}",
	         a, base == vmm_pool.slot[1].at ? "true" : "false", bytes, b, type, c, legacy, d, e,
	         range_bytes);
}

/* A kernel reads an address that nothing backs. Ends this context; what else it ends is the question. */
static void do_hole(const char *rest, char *answer)
{
	unsigned long long sum = 0;
	uint64_t unused;
	CUresult code = vmm_do(VMM_UNMAP, slot_of(0), &unused);

	(void)rest;
	put(answer, code ? code : sum_of(slot_of(0)->at, WORDS, &sum), 0);
}

static void do_calls(const char *rest, char *answer)
{
	call_costs((unsigned)atoi(rest), helper.stream, helper.out, answer, LINE);
}

static const struct command {
	const char *name;
	void (*run)(const char *rest, char *answer);
} commands[] = {
        {"vmm", do_vmm},   {"read", do_read},   {"sparse", do_sparse},     {"offset", do_offset},
        {"cost", do_cost}, {"calls", do_calls}, {"pointers", do_pointers}, {"range", do_range},
        {"hole", do_hole}, {"make", do_make},   {"where", do_where},
};

static void obey(int s, const char *text, int fd)
{
	static char answer[LINE];
	size_t word = strcspn(text, " ");
	const char *rest = text + word + (text[word] == ' ');
	int out = -1;

	snprintf(answer, LINE, "{\"error\": -1, \"where\": \"unknown command\"}");
	if (word == 6 && !strncmp(text, "export", word))
		out = do_export(rest, answer);
	if (word == 6 && !strncmp(text, "import", word))
		do_import(rest, answer, fd);
	for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
		if (strlen(commands[i].name) == word && !strncmp(commands[i].name, text, word))
			commands[i].run(rest, answer);
	sock_send(s, answer, out);
	if (out >= 0)
		close(out);
}

static void *serve(void *unused)
{
	static char text[LINE];

	(void)unused;
	gpu.cuCtxSetCurrent(gpu.context); /* access grants need a context that is current in this thread */
	for (;;) {
		int s = accept4(helper.listener, NULL, NULL, SOCK_CLOEXEC), fd;
		while (s >= 0 && !sock_receive(s, text, &fd, -1))
			obey(s, text, fd);
		if (s >= 0)
			close(s);
		else
			sleep_us(10000);
	}
	return NULL;
}

int helper_start(const char *sock)
{
	pthread_t thread;
	CUresult code = vmm_pool_make();

	if (!code)
		code = gpu.cuStreamCreateWithPriority(&helper.stream, 1, 0);
	if (!code)
		code = gpu.cuMemAlloc_v2(&helper.out, 4096);
	if (gpu_check(code, "helper"))
		return -1;
	helper.listener = sock_listen(sock);
	if (helper.listener < 0 || pthread_create(&thread, NULL, serve, NULL))
		return -1;
	pthread_detach(thread);
	return 0;
}
