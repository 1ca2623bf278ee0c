/* pointer.c - questions about addresses. A range reserved for mappings answers per mapping, other memory per allocation. */
#include "vmm.h"

enum attribute {
	ATTRIBUTE_CONTEXT = 1,
	ATTRIBUTE_MEMORY_TYPE = 2,
	ATTRIBUTE_DEVICE_POINTER = 3,
	ATTRIBUTE_HOST_POINTER = 4,
	ATTRIBUTE_SYNC_MEMOPS = 6,
	ATTRIBUTE_BUFFER_ID = 7,
	ATTRIBUTE_IS_MANAGED = 8,
	ATTRIBUTE_DEVICE_ORDINAL = 9,
	ATTRIBUTE_IS_LEGACY_IPC = 10,
	ATTRIBUTE_RANGE_START = 11,
	ATTRIBUTE_RANGE_SIZE = 12,
	ATTRIBUTE_MAPPED = 13,
	ATTRIBUTE_HANDLE_TYPES = 14,
	ATTRIBUTE_RDMA = 15,
	ATTRIBUTE_ACCESS = 16,
	ATTRIBUTE_POOL = 17,
	ATTRIBUTE_LAST = 21,
};

/* A copy, so that no thread looks at a range that goes away. */
static bool look_up(uint64_t address, struct range *out)
{
	LOCKED(&memory.lock);
	const struct range *range = book_find(&memory.ranges, address);
	if (!range)
		range = book_find(&memory.mappings, address);
	if (range)
		*out = *range;
	return range != NULL;
}

static bool is_host(const struct range *range)
{
	return range->kind == RANGE_HOST || range->kind == RANGE_REGISTERED;
}

static int access_of(const struct range *range)
{
	return range->kind == RANGE_MAPPING ? range->access[range->dev->ordinal] : CU_ACCESS_READWRITE;
}

static CUresult put(void *data, size_t bytes, uint64_t value)
{
	memcpy(data, &value, bytes); /* little-endian, as every machine a GPU driver runs on */
	return CUDA_SUCCESS;
}

static CUresult answer(void *data, int attribute, uint64_t address, const struct range *range)
{
	switch (attribute) {
	case ATTRIBUTE_CONTEXT:
		return range->ctx ? put(data, 8, (uintptr_t)range->ctx) : put(data, 8, 0);
	case ATTRIBUTE_MEMORY_TYPE:
		return put(data, 4, is_host(range) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
	case ATTRIBUTE_DEVICE_POINTER:
		return put(data, 8, address);
	case ATTRIBUTE_HOST_POINTER:
		return is_host(range) ? put(data, 8, address) : CUDA_ERROR_INVALID_VALUE;
	case ATTRIBUTE_BUFFER_ID:
		return put(data, 8, range->id);
	case ATTRIBUTE_SYNC_MEMOPS:
	case ATTRIBUTE_IS_MANAGED:
		return put(data, 4, 0);
	case ATTRIBUTE_DEVICE_ORDINAL:
		return put(data, 4, (uint64_t)range->dev->ordinal);
	case ATTRIBUTE_IS_LEGACY_IPC:
		return put(data, 1, 0); /* no legacy IPC on the emulator */
	case ATTRIBUTE_RANGE_START:
		return put(data, 8, range->base);
	case ATTRIBUTE_RANGE_SIZE:
		return put(data, 8, range->bytes);
	case ATTRIBUTE_MAPPED:
		return put(data, 1, 1);
	case ATTRIBUTE_HANDLE_TYPES:
		return put(data, 8, range->handle ? (uint64_t)range->handle->prop.requested_handles : 0);
	case ATTRIBUTE_RDMA:
		return put(data, 1, !range->handle || range->handle->prop.rdma_capable);
	case ATTRIBUTE_ACCESS:
		return put(data, 4, (uint64_t)access_of(range));
	case ATTRIBUTE_POOL:
		return put(data, 8, (uintptr_t)range->pool);
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}

CUAPI(4000, cuPointerGetAttribute, void *data, int attribute, CUdeviceptr address)
{
	struct range range;

	TRY(driver_check());
	REFUSE_IF(!data || attribute <= 0 || attribute > ATTRIBUTE_LAST || !look_up(address, &range),
	          CUDA_ERROR_INVALID_VALUE);
	return answer(data, attribute, address, &range);
}

/* An address that is not CUDA's is no error here: the answers are zeros. */
CUAPI(7000, cuPointerGetAttributes, unsigned count, const int *attributes, void **data, CUdeviceptr address)
{
	static const uint8_t wide[ATTRIBUTE_LAST + 1] = {
	        [1] = 8,  [3] = 8,  [4] = 8,  [7] = 8,  [11] = 8, [12] = 8,
	        [14] = 8, [17] = 8, [10] = 1, [13] = 1, [15] = 1};
	struct range range;

	TRY(driver_check());
	REFUSE_IF(!count || !attributes || !data, CUDA_ERROR_INVALID_VALUE);
	bool is_known = look_up(address, &range);
	for (unsigned i = 0; i < count; i++) {
		int attribute = attributes[i];
		REFUSE_IF(attribute <= 0 || attribute > ATTRIBUTE_LAST, CUDA_ERROR_INVALID_VALUE);
		if (!is_known || answer(data[i], attribute, address, &range))
			put(data[i], wide[attribute] ? wide[attribute] : 4,
			    attribute == ATTRIBUTE_DEVICE_ORDINAL ? (uint64_t)-2 : 0);
	}
	return CUDA_SUCCESS;
}

CUAPI(6000, cuPointerSetAttribute, const void *value, int attribute, CUdeviceptr address)
{
	struct range range;

	TRY(driver_check());
	return value && attribute == ATTRIBUTE_SYNC_MEMOPS && look_up(address, &range)
	               ? CUDA_SUCCESS
	               : CUDA_ERROR_INVALID_VALUE;
}

CUAPI(3020, cuMemGetAddressRange_v2, CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
	struct range range;

	TRY(driver_check());
	REFUSE_IF(!look_up(address, &range), CUDA_ERROR_NOT_FOUND);
	if (base)
		*base = range.base;
	if (bytes)
		*bytes = range.bytes;
	return CUDA_SUCCESS;
}
