/*
 * kvdriver.h - a driver's VMM in a few lines, strict where the real one is: what is mapped cannot be mapped again, what is
 * not cannot be unmapped or made accessible, memory lives while a reference or a mapping does. Calls fail at random when
 * `flaky` is set. For harnesses that link the shim's memory files.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "memory.h"

#define H       (2ull << 20)
#define BASE    0x100000000ull
#define SLOTS   65536u
#define HANDLES 65536u

static struct {
	pthread_mutex_t lock;
	uint32_t refs[HANDLES], mappings[HANDLES]; /* index: the handle */
	uint32_t at[SLOTS];                        /* handle mapped there, 0: none */
	bool access[SLOTS];
	uint64_t next_base, next_handle;
	uint32_t flaky; /* one call in so many fails; 0: none */
	uint64_t random, failures;
	uint32_t pending; /* queries of events that still say "not yet" */
} gpu = {.lock = PTHREAD_MUTEX_INITIALIZER, .next_base = BASE, .random = 1};

#define CHECK(condition)                                                                \
	do {                                                                            \
		if (!(condition)) {                                                     \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
			abort();                                                        \
		}                                                                       \
	} while (0)

static uint64_t draw(void)
{
	/* Threads may draw the same number; that is as random as any other. */
	uint64_t next = load_relaxed(&gpu.random) * 6364136223846793005ull + 1442695040888963407ull;

	store_relaxed(&gpu.random, next);
	return next >> 33;
}

static bool fails(void)
{
	bool so = gpu.flaky && draw() % gpu.flaky == 0;

	gpu.failures += so;
	return so;
}

static uint32_t index_of(CUdeviceptr address)
{
	CHECK(address >= BASE && address % H == 0 && (address - BASE) / H < SLOTS);
	return (uint32_t)((address - BASE) / H);
}

#define LOCKED(...)                          \
	CUresult result = CUDA_SUCCESS;      \
	pthread_mutex_lock(&gpu.lock);       \
	if (fails())                         \
		result = CUDA_ERROR_UNKNOWN; \
	else                                 \
		__VA_ARGS__                  \
	pthread_mutex_unlock(&gpu.lock);     \
	return result

static CUresult reserve(CUdeviceptr *out, size_t bytes, size_t a, CUdeviceptr b, uint64_t c)
{
	(void)a, (void)b, (void)c;
	LOCKED({
		CHECK(bytes % H == 0);
		*out = gpu.next_base;
		gpu.next_base += bytes;
		if (gpu.next_base > BASE + (SLOTS - 4096) * H)
			gpu.next_base = BASE; /* addresses come again; the harness holds few at a time */
	});
}

static CUresult give_address(CUdeviceptr at, size_t bytes)
{
	pthread_mutex_lock(&gpu.lock);
	for (uint32_t i = index_of(at); i < index_of(at) + bytes / H; i++)
		CHECK(!gpu.at[i]);
	pthread_mutex_unlock(&gpu.lock);
	return CUDA_SUCCESS;
}

static CUresult create(uint64_t *out, size_t bytes, const CUmemAllocationProp *prop, uint64_t flags)
{
	(void)flags;
	LOCKED({
		CHECK(bytes == H && prop->type == CU_MEM_TYPE_PINNED && !prop->location.id);
		*out = ++gpu.next_handle;
		CHECK(*out < HANDLES);
		gpu.refs[*out] = 1;
	});
}

static CUresult release(uint64_t handle)
{
	pthread_mutex_lock(&gpu.lock);
	CHECK(gpu.refs[handle]);
	gpu.refs[handle]--;
	pthread_mutex_unlock(&gpu.lock);
	return CUDA_SUCCESS;
}

static CUresult map(CUdeviceptr at, size_t bytes, size_t offset, uint64_t handle, uint64_t flags)
{
	LOCKED({
		uint32_t i = index_of(at);
		CHECK(bytes == H && !offset && !flags && gpu.refs[handle]);
		if (gpu.at[i]) {
			result = CUDA_ERROR_INVALID_VALUE;
		} else {
			gpu.at[i] = (uint32_t)handle;
			gpu.access[i] = false;
			gpu.mappings[handle]++;
		}
	});
}

/* Fails before it does anything, and then so for one that puts something back. */
static CUresult unmap(CUdeviceptr at, size_t bytes)
{
	LOCKED({
		CHECK(bytes && bytes % H == 0);
		for (uint32_t i = index_of(at); i < index_of(at) + bytes / H; i++) {
			CHECK(gpu.at[i]);
			gpu.mappings[gpu.at[i]]--;
			gpu.at[i] = 0;
		}
	});
}

static CUresult set_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *desc, size_t count)
{
	LOCKED({
		CHECK(count == 1 && desc->flags == CU_ACCESS_READWRITE && bytes && bytes % H == 0);
		for (uint32_t i = index_of(at); i < index_of(at) + bytes / H; i++) {
			CHECK(gpu.at[i]);
			gpu.access[i] = true;
		}
	});
}

/* A descriptor's number does not say which handle it stands for: the harness imports by its own table. */
static uint64_t shared_handle[1 << 16];

static CUresult export_handle(void *out, uint64_t handle, int type, uint64_t flags)
{
	int fd;

	LOCKED({
		CHECK(type == CU_MEM_HANDLE_POSIX_FD && !flags && gpu.refs[handle]);
		fd = eventfd(0, 0); /* the driver leaves that to its caller */
		CHECK(fd >= 0 && fd < 1 << 16);
		shared_handle[fd] = handle;
		*(int *)out = fd;
	});
}

static CUresult import_handle(uint64_t *out, void *os_handle, int type)
{
	(void)type;
	LOCKED({
		uint64_t handle = shared_handle[(intptr_t)os_handle & 0xffff];
		if (!handle) {
			result = CUDA_ERROR_INVALID_VALUE;
		} else {
			gpu.refs[handle]++;
			*out = handle;
		}
	});
}

static CUresult retain(uint64_t *out, void *at)
{
	LOCKED({
		uint32_t i = index_of((CUdeviceptr)(uintptr_t)at);
		if (!gpu.at[i]) {
			result = CUDA_ERROR_INVALID_VALUE;
		} else {
			*out = gpu.at[i];
			gpu.refs[*out]++;
		}
	});
}

static CUresult fill(CUdeviceptr at, unsigned value, size_t count, CUstream stream)
{
	(void)stream;
	LOCKED({
		CHECK(!value && count % (H / 4) == 0);
		for (uint32_t i = index_of(at); i < index_of(at) + count / (H / 4); i++)
			CHECK(gpu.at[i] && gpu.access[i]);
		gpu.pending = (uint32_t)(draw() % 4);
	});
}

static CUresult query_event(CUevent event)
{
	CUresult result = CUDA_SUCCESS;

	(void)event;
	pthread_mutex_lock(&gpu.lock);
	if (gpu.pending) {
		gpu.pending--;
		result = CUDA_ERROR_NOT_READY;
	}
	pthread_mutex_unlock(&gpu.lock);
	return result;
}

static CUresult get_context(CUcontext *out)
{
	*out = (CUcontext)(uintptr_t)0x77;
	return CUDA_SUCCESS;
}

static CUresult get_device(CUdevice *out)
{
	*out = 0;
	return CUDA_SUCCESS;
}

static CUresult granularity(size_t *out, const CUmemAllocationProp *prop, int option)
{
	(void)prop, (void)option;
	*out = H;
	return CUDA_SUCCESS;
}

static CUresult make_pointer(void **out)
{
	*out = (void *)(uintptr_t)0x99;
	return CUDA_SUCCESS;
}

static CUresult exchange_mode(int *mode)
{
	*mode = 0;
	return CUDA_SUCCESS;
}

static CUresult fine(void)
{
	return CUDA_SUCCESS;
}

void *valve_real_symbol(const char *name)
{
	static const struct {
		const char *name;
		void *call;
	} calls[] = {{"cuMemAddressReserve", (void *)(uintptr_t)reserve},
	             {"cuMemAddressFree", (void *)(uintptr_t)give_address},
	             {"cuMemCreate", (void *)(uintptr_t)create},
	             {"cuMemRelease", (void *)(uintptr_t)release},
	             {"cuMemMap", (void *)(uintptr_t)map},
	             {"cuMemUnmap", (void *)(uintptr_t)unmap},
	             {"cuMemSetAccess", (void *)(uintptr_t)set_access},
	             {"cuMemExportToShareableHandle", (void *)(uintptr_t)export_handle},
	             {"cuMemImportFromShareableHandle", (void *)(uintptr_t)import_handle},
	             {"cuMemRetainAllocationHandle", (void *)(uintptr_t)retain},
	             {"cuMemsetD32Async", (void *)(uintptr_t)fill},
	             {"cuEventQuery", (void *)(uintptr_t)query_event},
	             {"cuCtxGetCurrent", (void *)(uintptr_t)get_context},
	             {"cuCtxGetDevice", (void *)(uintptr_t)get_device},
	             {"cuMemGetAllocationGranularity", (void *)(uintptr_t)granularity},
	             {"cuStreamCreate", (void *)(uintptr_t)make_pointer},
	             {"cuEventCreate", (void *)(uintptr_t)make_pointer},
	             {"cuThreadExchangeStreamCaptureMode", (void *)(uintptr_t)exchange_mode}};

	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
		if (!strcmp(name, calls[i].name))
			return calls[i].call;
	return (void *)(uintptr_t)fine;
}

/* What the shim believes of a range is what is so. */
static inline void compare(const struct valve_range *range)
{
	for (uint32_t i = 0; i < range->slots; i++) {
		uint32_t at = index_of(range->base) + i, handle = gpu.at[at];

		switch ((enum valve_kv_slot)range->slot[i]) {
		case SLOT_HOLE:
			CHECK(!handle);
			break;
		case SLOT_ZERO:
			CHECK(handle == range->place->zero && gpu.access[at]);
			break;
		case SLOT_BACKED:
		case SLOT_CLEARING:
			CHECK(handle && handle != range->place->zero && gpu.access[at]);
			break;
		case SLOT_SPARSE: /* the driver still thinks that the old handle is there */
			CHECK(handle);
			break;
		case SLOT_BARE: /* the driver refused access, and then to unmap it */
			CHECK(handle && !gpu.access[at]);
		}
	}
}

/* Nobody holds a handle but the zero page: memory lives by its mappings (and by descriptors, which are not counted). */
static inline void no_references(uint64_t zero)
{
	for (uint64_t i = 1; i <= gpu.next_handle; i++)
		CHECK(gpu.refs[i] == (i == zero));
}
