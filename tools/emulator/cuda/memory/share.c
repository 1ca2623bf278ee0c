/*
 * share.c - the other ways by which memory leaves a process. Legacy IPC is refused: for ranges of cuMemMap as on the card,
 * for the rest because the emulator has none. A range can be handed to a device driver as a file (dma-buf on the card;
 * here the file behind the memory), as long as one allocation or one mapping holds all of it.
 */
#include "rm.h"
#include "vmm.h"

#define DMA_BUF_HANDLE 1
#define HOST_PAGE      4096u

CUAPI(4010, cuIpcGetMemHandle, void *out, CUdeviceptr address)
{
	TRY(driver_check());
	const struct range *range = range_at(address, false);
	return out && range && range->kind == RANGE_DEVICE ? CUDA_ERROR_NOT_SUPPORTED
	                                                   : CUDA_ERROR_INVALID_VALUE;
}

CUAPI(11000, cuIpcOpenMemHandle_v2, CUdeviceptr *out, CUuuid low, CUuuid second, CUuuid third, CUuuid high,
      unsigned flags)
{
	(void)low, (void)second, (void)third, (void)high,
	        (void)flags; /* 64 bytes by value travel on the stack */
	return out ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
}

CUAPI(4010, cuIpcCloseMemHandle, CUdeviceptr address)
{
	(void)address;
	return CUDA_ERROR_INVALID_VALUE; /* nothing was ever opened */
}

/* The memory object that holds the whole range, or 0. */
static uint32_t object_of(uint64_t address, uint64_t bytes)
{
	LOCKED(&memory.lock);
	const struct range *mapping = book_find(&memory.mappings, address);
	const struct range *area = book_find(&memory.areas, address);
	if (mapping)
		return address + bytes <= mapping->base + mapping->bytes ? mapping->handle->h_memory : 0;
	return area && address + bytes <= area->base + area->bytes ? area->h_memory : 0;
}

CUAPI(11070, cuMemGetHandleForAddressRange, void *out, CUdeviceptr address, size_t bytes, int type,
      unsigned long long flags)
{
	TRY(driver_check());
	REFUSE_IF(!out || !bytes || address % HOST_PAGE || bytes % HOST_PAGE || type != DMA_BUF_HANDLE ||
	                  flags > 1,
	          CUDA_ERROR_INVALID_VALUE);
	uint32_t h_memory = object_of(address, bytes);
	int fd = h_memory ? rm_object_file(h_memory) : -1;
	REFUSE_IF(fd < 0, CUDA_ERROR_INVALID_VALUE);
	*(int *)out = fd;
	return CUDA_SUCCESS;
}
