/*
 * vmm.c - what an order does to the slots of a range, by the public VMM calls. A mapping cannot be replaced in place, so
 * each change is unmap + map + set access; unmap and set access take any number of neighbours at once, so entries of
 * neighbouring slots are handled as one run. `done` only ever falls while an order is carried out, and what was begun
 * beyond it is put back, so it is exact: no handle and no descriptor is kept for an entry that was not done.
 */
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static uint64_t address_of(const struct valve_range *range, uint32_t slot)
{
	return range->base + (uint64_t)slot * range->handle_bytes;
}

static void set_slots(struct valve_range *range, uint32_t first, uint32_t count, enum valve_kv_slot to)
{
	memset(&range->slot[first], (int)to, count);
}

/* ---- runs of neighbouring slots ---- */

static CUresult unmap(struct valve_range *range, uint32_t first, uint32_t count)
{
	CUresult result =
	        valve_cu.cuMemUnmap(address_of(range, first), (uint64_t)count * range->handle_bytes);

	if (!result)
		set_slots(range, first, count, SLOT_HOLE);
	return result;
}

static CUresult map(struct valve_range *range, uint32_t slot, uint64_t handle)
{
	CUresult result = valve_cu.cuMemMap(address_of(range, slot), range->handle_bytes, 0, handle, 0);

	if (!result)
		range->slot[slot] = SLOT_BARE;
	return result;
}

static CUresult grant(struct valve_range *range, uint32_t first, uint32_t count, enum valve_kv_slot to)
{
	const CUmemAccessDesc access = {{CU_MEM_LOCATION_DEVICE, range->place->device}, CU_ACCESS_READWRITE};
	CUresult result = valve_cu.cuMemSetAccess(address_of(range, first),
	                                          (uint64_t)count * range->handle_bytes, &access, 1);

	if (!result)
		set_slots(range, first, count, to);
	return result;
}

/* The zero page into a run of holes, all or none. A try that failed may have left it in some, without access. */
static CUresult alias(struct valve_range *range, uint32_t first, uint32_t count)
{
	CUresult result = CUDA_SUCCESS;
	uint32_t mapped = 0;

	while (!result && mapped < count) {
		if (range->slot[first + mapped] == SLOT_HOLE)
			result = map(range, first + mapped, range->place->zero);
		mapped += !result;
	}
	if (!result)
		result = grant(range, first, count, SLOT_ZERO);
	if (result && mapped)
		unmap(range, first, mapped);
	return result;
}

CUresult valve_vmm_fill(struct valve_range *range)
{
	for (uint32_t first = 0, count; first < range->slots; first += count ? count : 1) {
		CUresult result;

		for (count = 0; first + count < range->slots && range->slot[first + count] == SLOT_HOLE;)
			count++;
		result = count ? alias(range, first, count) : CUDA_SUCCESS;
		if (result)
			return result;
	}
	return CUDA_SUCCESS;
}

void valve_vmm_empty(struct valve_range *range)
{
	for (uint32_t first = 0, count; first < range->slots; first += count ? count : 1) {
		for (count = 0; first + count < range->slots && range->slot[first + count] != SLOT_HOLE;)
			count++;
		if (count)
			unmap(range, first, count);
	}
}

void valve_vmm_settle(struct valve_range *range)
{
	for (uint32_t first = 0, count; first < range->slots; first += count ? count : 1) {
		for (count = 0; first + count < range->slots && range->slot[first + count] == SLOT_SPARSE;)
			count++;
		if (count && !unmap(range, first, count))
			alias(range, first, count);
	}
}

/* ---- orders ---- */

static void cut(struct valve_outcome *out, uint32_t at, int err, CUresult result)
{
	if (at >= out->done && out->status)
		return;
	out->done = at;
	out->status = (uint32_t)(result == CUDA_ERROR_OUT_OF_MEMORY ? ENOMEM : err);
	out->cu_result = result;
}

static int objection(const struct valve_range *range, uint16_t op, uint32_t slot)
{
	if (slot >= range->slots)
		return EINVAL;
	if (op == VALVE_KV_BACK)
		return range->slot[slot] == SLOT_BACKED ? EEXIST : 0;
	return range->pinned[slot] ? EBUSY : 0;
}

/* How many entries from i on are neighbours in the same state, with the same flags as far as `mask` goes. */
static uint32_t run_length(const struct valve_range *range, const struct valve_kv_order *order, uint32_t i,
                           uint32_t end, uint32_t mask)
{
	const struct valve_kv_entry *first = &order->entry[i];
	uint32_t n = 1;

	while (i + n < end && first[n].slot == first->slot + n &&
	       range->slot[first[n].slot] == range->slot[first->slot] &&
	       !((first[n].flags ^ first->flags) & mask))
		n++;
	return n;
}

static void quarantine(struct valve_range *range, const struct valve_kv_order *order,
                       struct valve_outcome *out)
{
	for (uint32_t i = 0, n; i < out->done; i += n) {
		uint32_t slot = order->entry[i].slot;
		bool is_mapped = range->slot[slot] != SLOT_HOLE && range->slot[slot] != SLOT_ZERO;
		CUresult result = CUDA_SUCCESS;

		n = run_length(range, order, i, out->done, 0);
		if (is_mapped)
			result = unmap(range, slot, n);
		if (result) {
			cut(out, i, EIO, result);
		} else if (range->slot[slot] == SLOT_HOLE) {
			result = alias(range, slot, n);
			if (result)
				result = alias(range, slot, n);
			if (result) /* no page to show, but the handles are given up all the same */
				cut(out, i + n, EIO, result);
		}
	}
}

/* What valved makes sparse is gone, whatever we think of it, pinned or not; a hole has nothing that could go. */
static void hear(struct valve_range *range, const struct valve_kv_order *order, struct valve_outcome *out)
{
	for (uint32_t i = 0; i < out->done; i++)
		if (order->entry[i].slot >= range->slots)
			cut(out, i, EINVAL, CUDA_SUCCESS);
		else if (range->slot[order->entry[i].slot] != SLOT_HOLE)
			range->slot[order->entry[i].slot] = SLOT_SPARSE;
}

static void unback(struct valve_range *range, const struct valve_kv_order *order, struct valve_outcome *out)
{
	for (uint32_t i = 0, n; i < out->done; i += n) {
		uint32_t slot = order->entry[i].slot;
		CUresult result = CUDA_SUCCESS;

		n = run_length(range, order, i, out->done, 0);
		if (range->slot[slot] != SLOT_HOLE)
			result = unmap(range, slot, n);
		if (result)
			cut(out, i, EIO, result);
	}
}

/* What a BACK order takes along from step to step. */
struct backing {
	uint32_t taken;    /* handles we hold, of entries 0.. */
	uint32_t mapped;   /* entries 0.. whose slot we filled */
	uint64_t had_page; /* one bit per entry: the zero page was there */
	uint64_t handle[VALVE_KV_ENTRIES];
};
_Static_assert(VALVE_KV_ENTRIES <= 64, "had_page");

/* The descriptor does not outlive an exec: what the application starts would keep the memory. */
static CUresult export_handle(uint64_t handle, int *fd)
{
	CUresult result = valve_cu.cuMemExportToShareableHandle(fd, handle, CU_MEM_HANDLE_POSIX_FD, 0);

	if (result)
		*fd = -1;
	else
		syscall(SYS_fcntl, *fd, F_SETFD, FD_CLOEXEC);
	return result;
}

static CUresult create(struct valve_range *range, uint64_t *handle, int *fd)
{
	const CUmemAllocationProp prop = {.type = CU_MEM_TYPE_PINNED,
	                                  .requested_handles = CU_MEM_HANDLE_POSIX_FD,
	                                  .location = {CU_MEM_LOCATION_DEVICE, range->place->device}};
	CUresult result = valve_cu.cuMemCreate(handle, range->handle_bytes, &prop, 0);

	if (result)
		return result;
	result = export_handle(*handle, fd);
	if (result)
		valve_cu.cuMemRelease(*handle);
	return result;
}

static void take_handles(struct valve_range *range, const struct valve_kv_order *order,
                         struct backing *backing, struct valve_outcome *out)
{
	uint32_t passed = 0;

	for (uint32_t i = 0; i < out->done; i++) {
		CUresult result;
		int fd = -1;

		if (order->entry[i].flags & VALVE_KV_CREATE) {
			result = create(range, &backing->handle[i], &fd);
			if (!result)
				out->made.at[out->made.count++] = fd;
		} else {
			void *shared = (void *)(intptr_t)order->fds.at[passed++];

			result = valve_cu.cuMemImportFromShareableHandle(&backing->handle[i], shared,
			                                                 CU_MEM_HANDLE_POSIX_FD);
		}
		if (result)
			cut(out, i, EIO, result);
		else
			backing->taken = i + 1;
	}
}

static void map_handles(struct valve_range *range, const struct valve_kv_order *order,
                        struct backing *backing, struct valve_outcome *out)
{
	CUresult result;

	for (uint32_t i = 0, n; i < out->done; i += n) {
		uint32_t slot = order->entry[i].slot;

		bool is_page = range->slot[slot] == SLOT_ZERO || range->slot[slot] == SLOT_SPARSE;

		n = run_length(range, order, i, out->done, 0);
		if (range->slot[slot] == SLOT_HOLE)
			continue;
		result = unmap(range, slot, n);
		if (result)
			cut(out, i, EIO, result);
		else if (is_page)
			backing->had_page |= (n == 64 ? ~0ull : (1ull << n) - 1) << i;
	}
	for (uint32_t i = 0; i < out->done; i++) {
		result = map(range, order->entry[i].slot, backing->handle[i]);
		if (result)
			cut(out, i, EIO, result);
		else
			backing->mapped = i + 1;
	}
	for (uint32_t i = 0, n; i < out->done; i += n) {
		n = run_length(range, order, i, out->done, 0);
		result = grant(range, order->entry[i].slot, n, SLOT_BACKED);
		if (result)
			cut(out, i, EIO, result);
	}
}

static void clear_slots(struct valve_range *range, const struct valve_kv_order *order,
                        struct valve_outcome *out)
{
	for (uint32_t i = 0, n; i < out->done; i += n) {
		uint32_t slot = order->entry[i].slot;
		CUresult result;

		n = run_length(range, order, i, out->done, VALVE_KV_ZERO);
		if (!(order->entry[i].flags & VALVE_KV_ZERO))
			continue;
		result = valve_cu.cuMemsetD32Async(address_of(range, slot), 0, n * range->handle_bytes / 4,
		                                   range->place->stream);
		if (result) {
			cut(out, i, EIO, result);
			return;
		}
		set_slots(range, slot, n, SLOT_CLEARING);
		out->zeroing = true;
	}
}

/* Descriptors of entries that were not done go; the others are in the order of their entries. */
static void trim_made(const struct valve_kv_order *order, struct valve_outcome *out)
{
	uint32_t keep = 0;

	for (uint32_t i = 0; i < out->done; i++)
		keep += (order->entry[i].flags & VALVE_KV_CREATE) != 0;
	while (out->made.count > keep)
		syscall(SYS_close, out->made.at[--out->made.count]);
}

/* One entry is undone: what was there before is there again. */
static void put_back(struct valve_range *range, uint32_t slot, bool had_page)
{
	if (range->slot[slot] != SLOT_HOLE)
		unmap(range, slot, 1);
	if (had_page && range->slot[slot] == SLOT_HOLE)
		alias(range, slot, 1);
}

static void back(struct valve_range *range, const struct valve_kv_order *order, struct valve_outcome *out)
{
	struct backing backing = {0};

	take_handles(range, order, &backing, out);
	map_handles(range, order, &backing, out);
	clear_slots(range, order, out);
	for (uint32_t i = out->done; i < order->count; i++)
		if (i < backing.mapped || (backing.had_page >> i & 1))
			put_back(range, order->entry[i].slot, backing.had_page >> i & 1);
	for (uint32_t i = 0; i < out->done; i++)
		range->handle[order->entry[i].slot] = order->entry[i].handle;
	for (uint32_t i = 0; i < backing.taken; i++)
		valve_cu.cuMemRelease(backing.handle[i]); /* the mapping holds the memory from here on */
	trim_made(order, out);
}

void valve_vmm_carry_out(struct valve_range *range, struct valve_kv_order *order, struct valve_outcome *out)
{
	out->done = order->count;
	if (order->how == VALVE_KV_OUTSIDE) {
		hear(range, order, out);
		return;
	}
	for (uint32_t i = 0; i < out->done; i++) {
		int err = objection(range, order->op, order->entry[i].slot);

		if (err)
			cut(out, i, err, CUDA_SUCCESS);
	}
	if (order->op == VALVE_KV_BACK)
		back(range, order, out);
	else if (order->op == VALVE_KV_QUARANTINE)
		quarantine(range, order, out);
	else
		unback(range, order, out);
}

/* A slot that is still being zeroed: nothing may be done with it before. */
bool valve_vmm_must_wait(const struct valve_range *range, const struct valve_kv_order *order)
{
	if (!load_relaxed(&range->clearing))
		return false;
	for (uint32_t i = 0; i < order->count; i++)
		if (order->entry[i].slot < range->slots && range->slot[order->entry[i].slot] == SLOT_CLEARING)
			return true;
	return false;
}

/* The memset of an order is over. If no valved will hear of it (keep is false), it is undone and free then. */
void valve_vmm_cleared(struct valve_range *range, const struct valve_kv_order *order, uint32_t done,
                       bool keep)
{
	for (uint32_t i = 0; i < done; i++) {
		uint32_t slot = order->entry[i].slot;

		if (range->slot[slot] == SLOT_CLEARING)
			range->slot[slot] = SLOT_BACKED;
		if (!keep)
			put_back(range, slot, range->flags & VALVE_KV_ELASTIC);
	}
}

int valve_vmm_export(const struct valve_range *range, uint32_t slot)
{
	uint64_t handle;
	int fd = -1;

	if (valve_cu.cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)address_of(range, slot)))
		return -1;
	export_handle(handle, &fd);
	valve_cu.cuMemRelease(handle);
	return fd;
}
