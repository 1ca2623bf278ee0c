/*
 * vmm_map.c - reservations, mappings and access. A reservation is one external range of UVM; cuMemMap only writes in the
 * books, cuMemSetAccess is what maps pages, cuMemUnmap what removes them. A mapping cannot be replaced in place, cut, or
 * made at an offset, and comes without access: so remapping is unmap + map + set access, with a hole in between.
 */
#include "capture.h"
#include "rm.h"
#include "vmm.h"

static bool is_granular(uint64_t address, uint64_t bytes)
{
	return bytes && address % LARGE_PAGE == 0 && bytes % LARGE_PAGE == 0 && address + bytes > address;
}

CUAPI(10020, cuMemAddressReserve, CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr wanted,
      unsigned long long flags)
{
	METERED(RESERVE);

	TRY(driver_check());
	if (alignment < LARGE_PAGE)
		alignment = LARGE_PAGE;
	REFUSE_IF(!out || flags || !bytes || bytes % LARGE_PAGE || alignment & (alignment - 1),
	          CUDA_ERROR_INVALID_VALUE);
	struct range *area = area_take(RANGE_RESERVED, bytes, alignment, wanted);
	REFUSE_IF(!area, CUDA_ERROR_OUT_OF_MEMORY);
	sleep_model_ns(emu.board->reserve_ns);
	if (uvm_create_range(area->base, area->bytes)) {
		area_give(area);
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	*out = area->base;
	return CUDA_SUCCESS;
}

static struct range *reservation(uint64_t address, uint64_t bytes)
{
	struct range *area = book_find(&memory.areas, address);

	if (!area || area->kind != RANGE_RESERVED || address + bytes > area->base + area->bytes)
		return NULL;
	return area;
}

CUAPI(10020, cuMemAddressFree, CUdeviceptr address, size_t bytes)
{
	METERED(RESERVE);

	TRY(driver_check());
	pthread_mutex_lock(&memory.lock);
	struct range *area = reservation(address, bytes);
	if (area && (area->base != address || area->bytes != bytes ||
	             book_overlaps(&memory.mappings, address, bytes)))
		area = NULL;
	pthread_mutex_unlock(&memory.lock);
	REFUSE_IF(!area, CUDA_ERROR_INVALID_VALUE);
	uvm_free_range(address);
	area_give(area);
	return CUDA_SUCCESS;
}

CUAPI(10020, cuMemMap, CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle value,
      unsigned long long flags)
{
	METERED(MAP);
	struct vmm_handle *handle = handle_from(value);

	TRY(driver_check());
	API_LOCKED;
	REFUSE_IF(!handle || offset || flags || !is_granular(address, bytes) || bytes > handle->bytes,
	          CUDA_ERROR_INVALID_VALUE);
	CUresult result = CUDA_SUCCESS;
	struct range *mapping = cell_new();
	*mapping = (struct range){
	        .base = address, .bytes = bytes, .kind = RANGE_MAPPING, .dev = handle->dev, .handle = handle};
	pthread_mutex_lock(&memory.lock);
	if (!reservation(address, bytes)) {
		result = CUDA_ERROR_INVALID_VALUE;
	} else if (book_overlaps(&memory.mappings, address, bytes)) {
		result = CUDA_ERROR_ALREADY_MAPPED;
	} else {
		handle->mappings++;
		mapping->id = ++memory.next_id;
		book_add(&memory.mappings, mapping);
	}
	pthread_mutex_unlock(&memory.lock);
	if (result)
		cell_free(mapping);
	else
		sleep_model_ns(emu.board->book_ns);
	return result;
}

/* Whether whole mappings exactly cover the range. */
static bool is_covered(uint64_t address, uint64_t bytes)
{
	uint64_t at = address;

	LOCKED(&memory.lock);
	for (unsigned i = book_index(&memory.mappings, address); at < address + bytes; i++) {
		if (i == memory.mappings.count || memory.mappings.at[i]->base != at)
			break;
		at += memory.mappings.at[i]->bytes;
	}
	return at == address + bytes;
}

static bool has_access(const struct range *mapping)
{
	for (int i = 0; i < emu.devices; i++)
		if (mapping->access[i])
			return true;
	return false;
}

static void wait_for_contexts(void)
{
	struct dependencies all = {0};

	pthread_mutex_lock(&emu.lock);
	for (struct context *ctx = emu.contexts; ctx; ctx = ctx->next)
		context_work_locked(ctx, &all);
	pthread_mutex_unlock(&emu.lock);
	deps_wait(&all);
}

/* The next mapping to go, out of the book; NULL when none begins in the range any more. */
static struct range *take_first(uint64_t address, uint64_t bytes)
{
	LOCKED(&memory.lock);
	unsigned i = book_index(&memory.mappings, address);
	struct range *mapping = i < memory.mappings.count ? memory.mappings.at[i] : NULL;
	if (!mapping || mapping->base >= address + bytes)
		return NULL;
	book_remove(&memory.mappings, mapping);
	return mapping;
}

CUAPI(10020, cuMemUnmap, CUdeviceptr address, size_t bytes)
{
	METERED(UNMAP);

	TRY(driver_check());
	TRY(capture_forbids_unsafe());
	API_LOCKED;
	REFUSE_IF(!is_granular(address, bytes) || !is_covered(address, bytes), CUDA_ERROR_INVALID_VALUE);
	if (setting(SETTING_unmap_waits))
		wait_for_contexts();
	for (struct range *mapping; (mapping = take_first(address, bytes));) {
		if (has_access(mapping))
			uvm_unmap(mapping->dev, mapping->base, mapping->bytes);
		handle_drop(mapping->handle, true);
		cell_free(mapping);
	}
	return CUDA_SUCCESS;
}

static CUresult check_descs(const CUmemAccessDesc *descs, size_t count)
{
	REFUSE_IF(!descs || !count, CUDA_ERROR_INVALID_VALUE);
	for (size_t i = 0; i < count; i++) {
		int flags = descs[i].flags;
		REFUSE_IF(flags != CU_ACCESS_NONE && flags != CU_ACCESS_READ && flags != CU_ACCESS_READWRITE,
		          CUDA_ERROR_INVALID_VALUE);
		REFUSE_IF(descs[i].location.type == CU_MEM_LOCATION_DEVICE &&
		                  !device_at(descs[i].location.id),
		          CUDA_ERROR_INVALID_DEVICE);
	}
	return CUDA_SUCCESS;
}

static void set_access(struct range *mapping, int device, int flags)
{
	LOCKED(&memory.lock); /* a query about an address reads it */
	mapping->access[device] = flags;
}

/* One UVM call per mapping and GPU whose access changes. */
static CUresult grant(struct range *mapping, const CUmemAccessDesc *desc)
{
	uint32_t status = NV_OK;

	if (desc->location.type != CU_MEM_LOCATION_DEVICE)
		return CUDA_SUCCESS;
	struct device *dev = device_at(desc->location.id);
	int before = mapping->access[dev->ordinal];
	if (before == desc->flags)
		return CUDA_SUCCESS;
	set_access(mapping, dev->ordinal, desc->flags);
	if (desc->flags && !before)
		status = uvm_map(dev, mapping->base, mapping->bytes, 0, mapping->handle->h_memory);
	else if (!desc->flags && !has_access(mapping))
		status = uvm_unmap(dev, mapping->base, mapping->bytes);
	if (status)
		set_access(mapping, dev->ordinal, before);
	return status ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

CUAPI(10020, cuMemSetAccess, CUdeviceptr address, size_t bytes, const CUmemAccessDesc *descs, size_t count)
{
	METERED(ACCESS);

	TRY(driver_check());
	TRY(check_descs(descs, count));
	API_LOCKED;
	REFUSE_IF(!is_granular(address, bytes) || !is_covered(address, bytes), CUDA_ERROR_INVALID_VALUE);
	for (uint64_t at = address; at < address + bytes;) {
		pthread_mutex_lock(&memory.lock);
		struct range *mapping = book_find(&memory.mappings, at);
		pthread_mutex_unlock(&memory.lock);
		if (!mapping) /* unmapped by another thread meanwhile */
			return CUDA_ERROR_INVALID_VALUE;
		for (size_t i = 0; i < count; i++)
			TRY(grant(mapping, &descs[i]));
		at += mapping->bytes;
	}
	return CUDA_SUCCESS;
}

CUAPI(10020, cuMemGetAccess, unsigned long long *out, const CUmemLocation *location, CUdeviceptr address)
{
	TRY(driver_check());
	REFUSE_IF(!out || !location || location->type != CU_MEM_LOCATION_DEVICE || !device_at(location->id),
	          CUDA_ERROR_INVALID_VALUE);
	LOCKED(&memory.lock);
	const struct range *mapping = book_find(&memory.mappings, address);
	*out = mapping ? (unsigned long long)mapping->access[location->id] : 0;
	return mapping ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
