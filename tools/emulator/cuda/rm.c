/*
 * rm.c - RM and UVM ioctls. open and ioctl are called through libc's symbols on purpose: that is how the real library
 * reaches the kernel and where the shim and the emulated nodes listen (facts: interposition of ioctl by preload).
 */
#include "rm.h"
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define HANDLE_BASE 0x5c000001u
#define FAILED      0xffffu /* the ioctl itself failed; no status came back */

static int issue(int fd, unsigned long request, void *argument)
{
	int result;

	do
		result = ioctl(fd, request, argument);
	while (result < 0 && errno == EINTR);
	return result;
}

int rm_escape(int fd, uint32_t nr, void *argument, uint32_t size)
{
	if (!setting(SETTING_xfer))
		return issue(fd, NV_IOWR(nr, size), argument);
	struct nv_ioctl_xfer wrapped = {.cmd = nr, .size = size, .ptr = (uintptr_t)argument};
	return issue(fd, NV_IOWR(NV_ESC_IOCTL_XFER_CMD, sizeof(wrapped)), &wrapped);
}

uint32_t rm_new_handle(void)
{
	static uint32_t next = HANDLE_BASE;

	return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
}

uint32_t rm_alloc(enum rm_form form, uint32_t parent, uint32_t handle, uint32_t cls, void *params,
                  uint32_t size)
{
	if (form == RM_NVOS21) {
		struct nvos21_alloc a = {emu.h_client, parent, handle, cls, (uintptr_t)params, size, 0};
		return rm_escape(emu.ctl, NV_ESC_RM_ALLOC, &a, sizeof(a)) ? FAILED : a.status;
	}
	struct nvos64_alloc a = {
	        .hRoot = emu.h_client,
	        .hObjectParent = parent,
	        .hObjectNew = handle,
	        .hClass = cls,
	        .pAllocParms = (uintptr_t)params,
	        .paramsSize = size,
	};
	return rm_escape(emu.ctl, NV_ESC_RM_ALLOC, &a, sizeof(a)) ? FAILED : a.status;
}

uint32_t rm_alloc_root(uint32_t *h_client)
{
	struct nvos21_alloc a = {.hClass = NV01_ROOT_CLIENT};

	if (rm_escape(emu.ctl, NV_ESC_RM_ALLOC, &a, sizeof(a)))
		return FAILED;
	*h_client = a.hObjectNew;
	return a.status;
}

uint32_t rm_free(uint32_t parent, uint32_t handle)
{
	struct nvos00_free f = {emu.h_client, parent, handle, 0};

	return rm_escape(emu.ctl, NV_ESC_RM_FREE, &f, sizeof(f)) ? FAILED : f.status;
}

uint32_t rm_control(uint32_t object, uint32_t cmd, void *params, uint32_t size)
{
	struct nvos54_control c = {emu.h_client, object, cmd, 0, (uintptr_t)params, size, 0};

	return rm_escape(emu.ctl, NV_ESC_RM_CONTROL, &c, sizeof(c)) ? FAILED : c.status;
}

int rm_object_file(uint32_t h_memory)
{
	struct sockaddr_un name = {0};
	socklen_t length = sizeof(name) - 1;
	unsigned nonce, kind, minor;
	unsigned long long file;
	char path[96];

	if (getsockname(emu.ctl, (struct sockaddr *)&name, &length) ||
	    sscanf(name.sun_path + 1, EMU_NAME_FORMAT, &nonce, &kind, &minor, &file) != 4)
		return -1;
	snprintf(path, sizeof(path), "/dev/nvidia-emu-mem/%llu/%u/%u", file, emu.h_client, h_memory);
	return open(path, O_RDWR | O_CLOEXEC);
}

/* UVM requests are bare numbers; every struct has a status word of its own. */
static uint32_t uvm(unsigned long request, void *params, uint32_t *status)
{
	return issue(emu.uvm, request, params) ? FAILED : *status;
}

uint32_t uvm_open(void)
{
	struct uvm_initialize init = {0};

	emu.uvm = open("/dev/nvidia-uvm", O_RDWR | O_CLOEXEC);
	if (emu.uvm < 0)
		return FAILED;
	return uvm(UVM_INITIALIZE, &init, &init.rmStatus);
}

uint32_t uvm_register_gpu(struct device *dev)
{
	struct uvm_register_gpu p = {.numaNodeId = -1, .rmCtrlFd = emu.ctl, .hClient = emu.h_client};

	memcpy(p.gpuUuid, dev->uuid, sizeof(p.gpuUuid));
	return uvm(UVM_REGISTER_GPU, &p, &p.rmStatus);
}

uint32_t uvm_register_vaspace(struct device *dev, uint32_t h_vaspace)
{
	struct uvm_register_gpu_vaspace p = {
	        .rmCtrlFd = emu.ctl, .hClient = emu.h_client, .hVaSpace = h_vaspace};

	memcpy(p.gpuUuid, dev->uuid, sizeof(p.gpuUuid));
	return uvm(UVM_REGISTER_GPU_VASPACE, &p, &p.rmStatus);
}

uint32_t uvm_unregister_vaspace(struct device *dev)
{
	struct uvm_unregister_gpu p = {0};

	memcpy(p.gpuUuid, dev->uuid, sizeof(p.gpuUuid));
	return uvm(UVM_UNREGISTER_GPU_VASPACE, &p, &p.rmStatus);
}

uint32_t uvm_register_channel(struct device *dev, uint32_t h_channel, uint64_t base, uint64_t length)
{
	struct uvm_register_channel p = {
	        .rmCtrlFd = emu.ctl,
	        .hClient = emu.h_client,
	        .hChannel = h_channel,
	        .base = base,
	        .length = length,
	};

	memcpy(p.gpuUuid, dev->uuid, sizeof(p.gpuUuid));
	return uvm(UVM_REGISTER_CHANNEL, &p, &p.rmStatus);
}

uint32_t uvm_unregister_channel(struct device *dev, uint32_t h_channel)
{
	struct uvm_unregister_channel old = {.hClient = emu.h_client, .hChannel = h_channel};
	struct uvm_unregister_channel_590 now = {.hClient = emu.h_client, .hChannel = h_channel};

	if (!uvm_unregister_at(emu.board->driver[0]))
		return uvm(UVM_UNREGISTER_CHANNEL, &now, &now.rmStatus);
	memcpy(old.gpuUuid, dev->uuid, sizeof(old.gpuUuid));
	return uvm(UVM_UNREGISTER_CHANNEL, &old, &old.rmStatus);
}

uint32_t uvm_create_range(uint64_t base, uint64_t length)
{
	struct uvm_range p = {.base = base, .length = length};

	return uvm(UVM_CREATE_EXTERNAL_RANGE, &p, &p.rmStatus);
}

uint32_t uvm_free_range(uint64_t base)
{
	struct uvm_range p = {.base = base};

	return uvm(UVM_FREE, &p, &p.rmStatus);
}

/* The array of per-GPU attributes grew from 32 to 256 entries at branch 570; the tail moves with it. */
uint32_t uvm_map(struct device *dev, uint64_t base, uint64_t length, uint64_t offset, uint32_t h_memory)
{
	uint32_t branch = emu.board->driver[0];
	uint32_t tail_at = uvm_map_tail_at(branch);
	_Alignas(8) uint8_t bytes[UVM_MAP_BYTES_MAX] = {0}; /* not malloc's: cells.c says why */

	struct uvm_map_external_head *head = (void *)bytes;
	struct uvm_mapping_attributes *attributes = (void *)(bytes + sizeof(*head));
	struct uvm_map_external_tail *tail = (void *)(bytes + tail_at);
	*head = (struct uvm_map_external_head){base, length, offset};
	memcpy(attributes->gpuUuid, dev->uuid, sizeof(attributes->gpuUuid));
	*tail = (struct uvm_map_external_tail){1, emu.ctl, emu.h_client, h_memory, 0};
	return uvm(UVM_MAP_EXTERNAL_ALLOCATION, bytes, &tail->rmStatus);
}

uint32_t uvm_unmap(struct device *dev, uint64_t base, uint64_t length)
{
	struct uvm_unmap_external p = {.base = base, .length = length};

	memcpy(p.gpuUuid, dev->uuid, sizeof(p.gpuUuid));
	return uvm(UVM_UNMAP_EXTERNAL, &p, &p.rmStatus);
}
