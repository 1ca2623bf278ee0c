/* rm.h - the driver calls libcuda makes, as functions. Each returns the RM status word; NV_OK is 0. */
#ifndef EMU_CUDA_RM_H
#define EMU_CUDA_RM_H

#include "core.h"
#include "layouts.h"

enum rm_form { RM_NVOS21, RM_NVOS64 }; /* both forms of RM_ALLOC are in use; a reader must know both */

uint32_t rm_alloc(enum rm_form form, uint32_t parent, uint32_t handle, uint32_t cls, void *params,
                  uint32_t size);
uint32_t rm_alloc_root(uint32_t *h_client);
uint32_t rm_free(uint32_t parent, uint32_t handle);
uint32_t rm_control(uint32_t object, uint32_t cmd, void *params, uint32_t size);
int rm_escape(int fd, uint32_t nr, void *argument, uint32_t size); /* 0, or -1 with errno */
uint32_t rm_new_handle(void); /* 0x5c0000xx: the same in every process, as the real library's */

int rm_object_file(
        uint32_t h_memory); /* a new fd of the file behind a memory object; -1 when there is none */

uint32_t uvm_open(void);
uint32_t uvm_register_gpu(struct device *dev);
uint32_t uvm_register_vaspace(struct device *dev, uint32_t h_vaspace);
uint32_t uvm_unregister_vaspace(struct device *dev);
uint32_t uvm_register_channel(struct device *dev, uint32_t h_channel, uint64_t base, uint64_t length);
uint32_t uvm_unregister_channel(struct device *dev, uint32_t h_channel);
uint32_t uvm_create_range(uint64_t base, uint64_t length);
uint32_t uvm_free_range(uint64_t base);
uint32_t uvm_map(struct device *dev, uint64_t base, uint64_t length, uint64_t offset, uint32_t h_memory);
uint32_t uvm_unmap(struct device *dev, uint64_t base, uint64_t length);

#endif
