/* vmm.c - the calls that move memory under a reserved address, timed. cuMemMap needs offset 0 and an unmapped target, so
 * a remap is unmap, map, set access; what happens to them while the channels are off is one of the lab's questions. */
#include "gpu.h"

#include <stdio.h>
#include <string.h>

const char *const vmm_names[VMM_CALLS] = {"unmap", "map",     "access", "alloc",
                                          "free",  "reserve", "create", "release"};
struct vmm_pool vmm_pool;
enum { PINNED = 1, POSIX_FD = 1, DEVICE = 1, READ_WRITE = 3 };

CUresult vmm_do(enum vmm_call call, struct piece *p, uint64_t *ns)
{
	static const struct prop prop = {PINNED, POSIX_FD, DEVICE, 0, NULL, {0}};
	static const struct access access = {DEVICE, 0, READ_WRITE};
	uint64_t start = now_ns();
	CUresult code = CUDA_ERROR_INVALID_VALUE;

	if (call == VMM_UNMAP)
		code = gpu.cuMemUnmap(p->at, p->bytes);
	else if (call == VMM_MAP)
		code = gpu.cuMemMap(p->at, p->bytes, 0, p->handle, 0);
	else if (call == VMM_ACCESS)
		code = gpu.cuMemSetAccess(p->at, p->bytes, &access, 1);
	else if (call == VMM_ALLOC)
		code = gpu.cuMemAlloc_v2(&p->at, p->bytes);
	else if (call == VMM_FREE)
		code = gpu.cuMemFree_v2(p->at);
	else if (call == VMM_RESERVE)
		code = gpu.cuMemAddressReserve(&p->at, p->bytes, 0, 0, 0);
	else if (call == VMM_CREATE)
		code = gpu.cuMemCreate(&p->handle, p->bytes, &prop, 0);
	else if (call == VMM_RELEASE)
		code = gpu.cuMemRelease(p->handle);
	*ns = now_ns() - start;
	return code;
}

/* The halves of a slot differ, so that a mapping with an offset shows. */
unsigned vmm_pattern(unsigned slot)
{
	return slot == VMM_SLOTS ? 0 : 0xC4000000u + slot * 77777u;
}

static CUresult make_slot(struct piece *p, CUdeviceptr at, unsigned slot)
{
	size_t half = VMM_SLOT_BYTES / 8;
	uint64_t unused;

	*p = (struct piece){at, 0, VMM_SLOT_BYTES};
	TRY(vmm_do(VMM_CREATE, p, &unused));
	TRY(vmm_do(VMM_MAP, p, &unused));
	TRY(vmm_do(VMM_ACCESS, p, &unused));
	TRY(gpu.cuMemsetD32_v2(at, vmm_pattern(slot), half));
	return gpu.cuMemsetD32_v2(at + half * 4, vmm_pattern(slot) + (slot != VMM_SLOTS), half);
}

CUresult vmm_pool_make(void)
{
	struct piece range = {0, 0, (size_t)(VMM_SLOTS + 1) * VMM_SLOT_BYTES};

	TRY(vmm_do(VMM_RESERVE, &range, &(uint64_t){0}));
	for (unsigned i = 0; i <= VMM_SLOTS; i++)
		TRY(make_slot(&vmm_pool.slot[i], range.at + (CUdeviceptr)i * VMM_SLOT_BYTES, i));
	return gpu.cuCtxSynchronize();
}

struct cost {
	struct piece piece[VMM_PIECES];
	float us[VMM_CALLS][VMM_PIECES]; /* map, unmap and access of the remap to one quarantine handle */
	unsigned n[VMM_CALLS];
	double batch_us; /* one unmap of the whole range, many maps, one set access */
};

static CUresult timed(struct cost *cost, enum vmm_call call, struct piece *p)
{
	uint64_t ns;
	CUresult code = vmm_do(call, p, &ns);

	if (cost->n[call] < VMM_PIECES)
		cost->us[call][cost->n[call]++] = (float)((double)ns / 1e3);
	return code;
}

static CUresult remap(struct cost *cost, struct piece *p, CUmemGenericAllocationHandle handle)
{
	struct piece moved = {p->at, handle, p->bytes};

	TRY(timed(cost, VMM_UNMAP, &moved));
	TRY(timed(cost, VMM_MAP, &moved));
	return timed(cost, VMM_ACCESS, &moved);
}

static CUresult batch(struct cost *cost, struct piece *range, unsigned count)
{
	uint64_t start = now_ns(), unused;

	TRY(vmm_do(VMM_UNMAP, range, &unused));
	for (unsigned i = 0; i < count; i++)
		TRY(vmm_do(VMM_MAP, &cost->piece[i], &unused));
	TRY(vmm_do(VMM_ACCESS, range, &unused));
	cost->batch_us = (double)(now_ns() - start) / 1e3;
	return CUDA_SUCCESS;
}

static CUresult tear_down(struct cost *cost, struct piece *range, unsigned count)
{
	TRY(vmm_do(VMM_UNMAP, range, &(uint64_t){0}));
	for (unsigned i = 0; i < count; i++)
		TRY(timed(cost, VMM_RELEASE, &cost->piece[i]));
	return gpu.cuMemAddressFree(range->at, range->bytes);
}

static CUresult measure(struct cost *cost, struct piece *range, struct piece *quarantine, unsigned count)
{
	uint64_t unused;

	TRY(timed(cost, VMM_RESERVE, range));
	TRY(vmm_do(VMM_CREATE, quarantine, &unused));
	for (unsigned i = 0; i < count; i++) {
		struct piece *p = &cost->piece[i];
		*p = (struct piece){range->at + (CUdeviceptr)i * quarantine->bytes, 0, quarantine->bytes};
		TRY(timed(cost, VMM_CREATE, p));
		TRY(vmm_do(VMM_MAP, p, &unused));
		TRY(vmm_do(VMM_ACCESS, p, &unused));
	}
	for (unsigned i = 0; i < count; i++)
		TRY(remap(cost, &cost->piece[i], quarantine->handle));
	TRY(batch(cost, range, count));
	TRY(tear_down(cost, range, count));
	return vmm_do(VMM_RELEASE, quarantine, &unused);
}

/* Handles of `mib` over `total_mib`: create each, map it, then remap every place to one quarantine handle. */
int vmm_cost(unsigned mib, unsigned total_mib, char *answer, size_t room)
{
	static struct cost cost;
	struct piece range = {0, 0, (size_t)total_mib << 20}, quarantine = {0, 0, (size_t)mib << 20};
	unsigned count = total_mib / mib;

	memset(&cost, 0, sizeof(cost));
	if (!count || count > VMM_PIECES)
		return snprintf(answer, room, "{\"error\": -1, \"where\": \"1 to %d handles\"}", VMM_PIECES);
	CUresult code = measure(&cost, &range, &quarantine, count);
	int at = snprintf(answer, room, "{\"error\": %d, \"handles\": %u, \"batch_us\": %.1f", code, count,
	                  cost.batch_us);
	for (unsigned c = 0; c < VMM_CALLS; c++) {
		at += cost.n[c] ? snprintf(answer + at, room - (size_t)at, ", \"%s_us\": [", vmm_names[c])
		                : 0;
		for (unsigned i = 0; i < cost.n[c]; i++)
			at += snprintf(answer + at, room - (size_t)at, "%s%.1f", i ? "," : "",
			               (double)cost.us[c][i]);
		at += cost.n[c] ? snprintf(answer + at, room - (size_t)at, "]") : 0;
	}
	return at + snprintf(answer + at, room - (size_t)at, "}");
}
