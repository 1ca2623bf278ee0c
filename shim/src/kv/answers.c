/*
 * answers.c - questions about addresses in KV ranges. An engine allocated one piece of memory and must be told of one,
 * whatever is mapped where; and what leaves the process (a dma-buf, a registration with a NIC) pins its memory, because
 * a device that holds physical addresses would go on writing to them after they were given to another process.
 */
#include "memory.h"

#include <string.h>

#define CALL(entry, ...) (((valve_call)(entry)->target)(__VA_ARGS__))

#define MEMORY_TYPE_DEVICE 2u
#define ACCESS_READWRITE   3u

enum attribute { /* CU_POINTER_ATTRIBUTE_ */
	         CONTEXT = 1,
	         MEMORY_TYPE = 2,
	         DEVICE_POINTER = 3,
	         P2P_TOKENS = 5,
	         SYNC_MEMOPS = 6,
	         BUFFER_ID = 7,
	         IS_MANAGED = 8,
	         DEVICE_ORDINAL = 9,
	         IS_LEGACY_IPC = 10,
	         RANGE_START = 11,
	         RANGE_SIZE = 12,
	         MAPPED = 13,
	         HANDLE_TYPES = 14,
	         ACCESS = 16,
	         POOL = 17,
	         MAPPING_SIZE = 18,
	         MAPPING_BASE = 19,
};

/* ---- pins ---- */

/* Slots of [address, address + bytes). `pin` false takes the marks off again. */
static void mark(struct valve_range *range, uint64_t address, uint64_t bytes, bool pin)
{
	uint64_t first = (address - range->base) / range->handle_bytes;
	uint64_t last = (address - range->base + bytes - 1) / range->handle_bytes;

	for (uint64_t i = first; i <= last && i < range->slots; i++)
		range->pinned[i] = pin;
}

static void pin(struct valve_range *range, uint64_t address, uint64_t bytes)
{
	mark(range, address, bytes, true);
	valve_announce_pin(range, address - range->base, bytes);
}

static bool may_leave(const struct valve_range *range, uint64_t address, uint64_t bytes)
{
	if (valve_announce_may_leave(range, address - range->base, bytes))
		return true;
	valve_say("KV memory that was taken back cannot be exported or registered");
	return false;
}

/* What registers memory with a NIC through the kernel announces itself by one of two attributes. */
static bool pin_all(uint64_t address)
{
	struct valve_range *range = valve_range_containing(address);
	bool may;

	if (!range)
		return true;
	may = may_leave(range, range->base, range->bytes);
	if (may)
		pin(range, range->base, range->bytes);
	valve_unlock(&range->lock);
	return may;
}

CUresult valve_on_cuMemGetHandleForAddressRange(uintptr_t out, uintptr_t address, uintptr_t bytes,
                                                uintptr_t type, uintptr_t flags, uintptr_t a5,
                                                struct valve_entry *entry)
{
	/* Held across the call: no order may take the memory between the export and the pin. */
	struct valve_range *range = bytes ? valve_range_containing(address) : NULL;
	bool may = !range || may_leave(range, address, bytes);
	CUresult result = may ? CALL(entry, out, address, bytes, type, flags, a5) : CUDA_ERROR_NOT_SUPPORTED;

	if (range && result == CUDA_SUCCESS)
		pin(range, address, bytes);
	if (range)
		valve_unlock(&range->lock);
	return result;
}

CUresult valve_on_cuMemRetainAllocationHandle(uintptr_t out, uintptr_t address, uintptr_t a2, uintptr_t a3,
                                              uintptr_t a4, uintptr_t a5, struct valve_entry *entry)
{
	struct valve_range *range = valve_range_containing(address);
	bool may = !range || may_leave(range, address, 1);
	CUresult result = may ? CALL(entry, out, address, a2, a3, a4, a5) : CUDA_ERROR_NOT_SUPPORTED;

	if (range && result == CUDA_SUCCESS)
		pin(range, address, 1);
	if (range)
		valve_unlock(&range->lock);
	return result;
}

CUresult valve_on_cuPointerSetAttribute(uintptr_t value, uintptr_t attribute, uintptr_t address, uintptr_t a3,
                                        uintptr_t a4, uintptr_t a5, struct valve_entry *entry)
{
	if ((int)attribute == SYNC_MEMOPS && !pin_all(address))
		return CUDA_ERROR_NOT_SUPPORTED;
	return CALL(entry, value, attribute, address, a3, a4, a5);
}

CUresult valve_on_cuIpcGetMemHandle(uintptr_t out, uintptr_t address, uintptr_t a2, uintptr_t a3,
                                    uintptr_t a4, uintptr_t a5, struct valve_entry *entry)
{
	struct valve_range_view range;

	if (!valve_range_look(address, &range))
		return CALL(entry, out, address, a2, a3, a4, a5);
	valve_say(
	        "cuIpcGetMemHandle on KV memory is not supported: the memory may move. Allocate memory that "
	        "other processes map outside the bracket, or set the size rule higher");
	return CUDA_ERROR_NOT_SUPPORTED;
}

/* ---- attributes ---- */

static bool put(void *data, size_t bytes, uint64_t value)
{
	memcpy(data, &value, bytes);
	return true;
}

/* false: the driver's answer for that very address is right, if there may be one (P2P tokens). */
static bool answer(void *data, int attribute, uint64_t address, const struct valve_range_view *range)
{
	switch ((enum attribute)attribute) {
	case CONTEXT:
		return put(data, 8, (uintptr_t)range->context);
	case MEMORY_TYPE:
		return put(data, 4, MEMORY_TYPE_DEVICE);
	case DEVICE_POINTER:
		return put(data, 8, address);
	case BUFFER_ID: /* unique in the process, and the same for the range's whole life */
		return put(data, 8, 1ull << 62 | range->id);
	case DEVICE_ORDINAL:
		return put(data, 4, (uint64_t)range->device);
	case RANGE_START:
	case MAPPING_BASE:
		return put(data, 8, range->base);
	case RANGE_SIZE:
	case MAPPING_SIZE:
		return put(data, 8, range->bytes);
	case ACCESS:
		return put(data, 4, ACCESS_READWRITE);
	case MAPPED:
		return put(data, 1, 1);
	case IS_LEGACY_IPC:
		return put(data, 1, 0);
	case IS_MANAGED:
		return put(data, 4, 0);
	case HANDLE_TYPES: /* only valved may have its handles */
	case POOL:
		return put(data, 8, 0);
	case P2P_TOKENS: /* of zeros: they cannot be used */
		return !pin_all(address) && put(data, 8, 0) && put((char *)data + 8, 4, 0);
	default:
		return false;
	}
}

CUresult valve_on_cuPointerGetAttribute(uintptr_t data, uintptr_t attribute, uintptr_t address, uintptr_t a3,
                                        uintptr_t a4, uintptr_t a5, struct valve_entry *entry)
{
	struct valve_range_view range;

	if (data && valve_range_look(address, &range) &&
	    answer((void *)data, (int)attribute, address, &range))
		return CUDA_SUCCESS;
	return CALL(entry, data, attribute, address, a3, a4, a5);
}

CUresult valve_on_cuPointerGetAttributes(uintptr_t count, uintptr_t attributes, uintptr_t data,
                                         uintptr_t address, uintptr_t a4, uintptr_t a5,
                                         struct valve_entry *entry)
{
	CUresult result = CALL(entry, count, attributes, data, address, a4, a5);
	struct valve_range_view range;

	if (result != CUDA_SUCCESS || !valve_range_look(address, &range))
		return result;
	for (uint32_t i = 0; i < (uint32_t)count; i++)
		answer(((void **)data)[i], ((const int *)attributes)[i], address, &range);
	return result;
}

CUresult valve_on_cuMemGetAddressRange(uintptr_t base, uintptr_t bytes, uintptr_t address, uintptr_t a3,
                                       uintptr_t a4, uintptr_t a5, struct valve_entry *entry)
{
	struct valve_range_view range;

	if (!valve_range_look(address, &range))
		return CALL(entry, base, bytes, address, a3, a4, a5);
	if (base)
		*(CUdeviceptr *)base = range.base;
	if (bytes)
		*(size_t *)bytes = range.bytes;
	return CUDA_SUCCESS;
}

/* ---- how much is free ---- */

static const volatile struct valve_kv_free *told_of(CUdevice device)
{
	CUresult (*get_uuid)(CUuuid *, CUdevice);
	CUuuid uuid;

	get_uuid = (CUresult(*)(CUuuid *, CUdevice))valve_real_symbol("cuDeviceGetUuid");
	return get_uuid && !get_uuid(&uuid, device) ? valve_kv_free_of((const uint8_t *)&uuid) : NULL;
}

static uint64_t less(uint64_t bytes, uint64_t off)
{
	return bytes > off ? bytes - off : 0;
}

/*
 * An offline engine sizes itself by this: what the driver has, which knows of the process's ordinary memory, and the free
 * handles of valved's pool; less what it has reserved and is not backed yet, and less what is kept for online services,
 * also while there is no valved. The card looks smaller by that. valved before 0.2 tells one figure for all devices.
 */
static void correct(size_t *available, size_t *total, CUdevice device)
{
	bool is_linked = load_acquire(&valve_shim.state) == VALVE_STATE_LINKED;
	const volatile struct valve_kv_free *told = told_of(device);
	uint64_t keep = told ? load_relaxed(&told->keep_bytes) : 0;
	uint64_t budget = load_relaxed(&VALVE_CONTROL->kv_budget_bytes);

	if (available && is_linked && (valve_shim.daemon_features & VALVE_FEATURE_KV_FREE))
		*available = less(*available + (told ? load_acquire(&told->bytes) : 0),
		                  valve_ranges_bare_bytes(device) + keep);
	else if (available && is_linked && budget)
		*available = less(budget, valve_ranges_bytes(device));
	else if (available)
		*available = less(*available, keep);
	if (total)
		*total = less(*total, keep);
}

CUresult valve_on_cuMemGetInfo(uintptr_t available, uintptr_t total, uintptr_t a2, uintptr_t a3, uintptr_t a4,
                               uintptr_t a5, struct valve_entry *entry)
{
	CUresult result = CALL(entry, available, total, a2, a3, a4, a5);
	CUresult (*get_device)(CUdevice *);
	CUdevice device = 0;

	if (result != CUDA_SUCCESS || load_relaxed(&valve_shim.role) != VALVE_ROLE_OFFLINE ||
	    load_acquire(&valve_shim.state) == VALVE_STATE_OFF)
		return result;
	get_device = (CUresult(*)(CUdevice *))valve_real_symbol("cuCtxGetDevice");
	if (get_device && !get_device(&device))
		correct((size_t *)available, (size_t *)total, device);
	return result;
}
