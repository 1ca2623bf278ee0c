/* vmm.h - physical memory handles of the VMM calls. */
#ifndef EMU_CUDA_VMM_H
#define EMU_CUDA_VMM_H

#include "memory.h"

#define MAGIC_HANDLE 0x484e444cu

/* Lives until it is released as often as it was given out and its last mapping is gone. */
struct vmm_handle {
	uint32_t magic;
	struct device *dev;
	CUmemAllocationProp prop;
	uint64_t bytes;
	uint32_t h_memory;
	unsigned refs, mappings;
};

struct vmm_handle *handle_from(CUmemGenericAllocationHandle value);
struct vmm_handle *handle_new(struct device *dev, const CUmemAllocationProp *prop, uint64_t bytes,
                              uint32_t h_memory);
bool handle_drop(struct vmm_handle *handle,
                 bool is_mapping); /* one reference or one mapping less; false: none left */

#endif
