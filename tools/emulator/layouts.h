/*
 * layouts.h - driver structures that only the emulator needs: parameters of the
 * export controls and of UVM's mapping calls, and the size of every parameter block.
 * proto/abi/nvrm.h holds what the product reads. S/ and U/ as there; UVM from
 * kernel-open/nvidia-uvm/uvm_ioctl.h.
 */
#ifndef VALVE_EMU_LAYOUTS_H
#define VALVE_EMU_LAYOUTS_H

#include "nvrm.h"

/* S/nvstatuscodes.h: refusals that the product never tells apart */
enum nv_status_more {
	NV_ERR_ILLEGAL_ACTION = 0x16,
	NV_ERR_INSERT_DUPLICATE_NAME = 0x19,
	NV_ERR_INVALID_ADDRESS = 0x1E,
	NV_ERR_INVALID_CLASS = 0x22,
	NV_ERR_INVALID_DEVICE = 0x26,
	NV_ERR_OUT_OF_RANGE = 0x5B,
	NV_ERR_UVM_ADDRESS_IN_USE = 0x68,
};

/* S/nvos.h, S/nvlimits.h: which client may do what with an object */
enum { RS_SHARE_NONE = 0, RS_SHARE_ALL = 1, RS_SHARE_OS_TOKEN = 2, RS_SHARE_CLIENT = 3, RS_SHARE_PID = 4 };
#define RS_ACCESS_DUP_OBJECT 0x1u
struct rs_share_policy {
	uint32_t target, accessMask;
	uint16_t type;
	uint8_t action, pad0;
};
#define RS_SHARE_ACTION_REVOKE 0x1u
struct nvos57_share {
	uint32_t hClient, hObject;
	struct rs_share_policy policy;
	uint32_t status;
};

/* S/ctrl/ctrl0000/ctrl0000unix.h */
enum {
	NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD = 0x3d0b,
	NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECTS_FROM_FD = 0x3d0c,
	NV0000_EXPORT_OBJECTS_MAX = 512,
	NV0000_IMPORT_OBJECTS_MAX = 128,
};
struct nv0000_export_objects_to_fd {
	int32_t fd;
	uint32_t hDevice;
	uint16_t maxObjects; /* and the metadata: of the first call on a file */
	uint8_t metadata[64], pad0[2];
	uint32_t objects[NV0000_EXPORT_OBJECTS_MAX];
	uint16_t numObjects, index;
};
struct nv0000_import_objects_from_fd {
	int32_t fd;
	uint32_t hParent;
	uint32_t objects[NV0000_IMPORT_OBJECTS_MAX];
	uint8_t objectTypes[NV0000_IMPORT_OBJECTS_MAX]; /* 0 none, 1 the card's memory, 2 the system's */
	uint16_t numObjects, index;
};
struct nv0000_export_object_info {
	int32_t fd;
	uint32_t deviceInstance;
	uint16_t maxObjects;
	uint8_t metadata[64], pad0[2];
};
/* S/ctrl/ctrl0000/ctrl0000system.h; older branches lack driverBranch (776 bytes), both sizes are
 * answered */
struct nv0000_build_version_v2 {
	char driverVersionBuffer[256], versionBuffer[256], driverBranch[256], titleBuffer[256];
	uint32_t changelistNumber, officialChangelistNumber;
};
/* S/ctrl/ctrl2080/ctrl2080gr.h */
struct nv2080_ctxsw_preemption_mode {
	uint32_t flags, hChannel, gfxpPreemptMode, cilpPreemptMode;
	uint64_t routeFlags, routeChannel;
};
struct nv2080_ctxsw_modes {
	uint32_t hChannel, zcull, pm, smpc, cilpPreempt, gfxpPreempt; /* 0 WFI, 1 CTA, 2 CILP */
};
struct nva06c_preempt {
	uint8_t bWait, bManualTimeout, pad0[2];
	uint32_t timeoutUs;
};
struct nv2080_channel_group_info {
	uint32_t hClient, hChannelOrTsg, tsgId, numChannels, channelUniqueID[128], vasUniqueID[128],
	        veid[128];
};

struct uvm_initialize {
	uint64_t flags;
	uint32_t rmStatus, pad0;
};
struct uvm_mm_initialize {
	int32_t uvmFd;
	uint32_t rmStatus;
};
struct uvm_register_gpu {
	uint8_t gpuUuid[16], numaEnabled, pad0[3];
	int32_t numaNodeId, rmCtrlFd;
	uint32_t hClient, hSmcPartRef, rmStatus;
};
struct uvm_unregister_gpu { /* also UVM_UNREGISTER_GPU_VASPACE */
	uint8_t gpuUuid[16];
	uint32_t rmStatus;
};
struct uvm_register_gpu_vaspace {
	uint8_t gpuUuid[16];
	int32_t rmCtrlFd;
	uint32_t hClient, hVaSpace, rmStatus;
};
struct uvm_range { /* UVM_FREE and UVM_CREATE_EXTERNAL_RANGE */
	uint64_t base, length;
	uint32_t rmStatus, pad0;
};
struct uvm_unmap_external {
	uint64_t base, length;
	uint8_t gpuUuid[16];
	uint32_t rmStatus, pad0;
};
struct uvm_mapping_attributes {
	uint8_t gpuUuid[16];
	uint32_t mappingType, cachingType, formatType, elementBits, compressionType;
};
/* UVM_MAP_EXTERNAL_ALLOCATION: head, then 32 attributes (256 from 570 on), then the tail */
struct uvm_map_external_head {
	uint64_t base, length, offset;
};
struct uvm_map_external_tail {
	uint64_t gpuAttributesCount;
	int32_t rmCtrlFd;
	uint32_t hClient, hMemory, rmStatus;
};

_Static_assert(sizeof(struct nvos57_share) == 24, "share");
_Static_assert(sizeof(struct nv0000_export_object_info) == 76, "export info");
_Static_assert(sizeof(struct nv0000_export_objects_to_fd) == 2128, "export array");
_Static_assert(sizeof(struct nv0000_import_objects_from_fd) == 652, "import array");
_Static_assert(sizeof(struct nv2080_channel_group_info) == 1552, "group info");
_Static_assert(sizeof(struct uvm_register_gpu) == 40, "register gpu");
_Static_assert(sizeof(struct uvm_unregister_gpu) == 20, "unregister gpu");
_Static_assert(sizeof(struct uvm_register_gpu_vaspace) == 32, "vaspace");
_Static_assert(sizeof(struct uvm_unmap_external) == 40, "unmap");
_Static_assert(sizeof(struct uvm_mapping_attributes) == 36, "attributes");

/* From 590 there is no GPU UUID before the handles (proto/abi/nvrm.h). */
static inline uint32_t uvm_unregister_at(uint32_t branch)
{
	return branch >= 590 ? 0 : (uint32_t)offsetof(struct uvm_unregister_channel, hClient);
}

static inline uint32_t uvm_max_gpus(uint32_t branch)
{
	return branch >= 570 ? 256 : 32;
}

static inline uint32_t uvm_map_tail_at(uint32_t branch)
{
	return (uint32_t)(sizeof(struct uvm_map_external_head) +
	                  uvm_max_gpus(branch) * sizeof(struct uvm_mapping_attributes));
}

#define UVM_MAP_BYTES_MAX                                                                     \
	(sizeof(struct uvm_map_external_head) + 256 * sizeof(struct uvm_mapping_attributes) + \
	 sizeof(struct uvm_map_external_tail))

/* Bytes behind an allocation's parameter pointer: the class decides, not the caller's paramsSize. 0
 * = none known. */
static inline uint32_t nv_class_params(uint32_t cls, uint32_t branch)
{
	switch (cls) {
	case NV01_DEVICE_0:
		return sizeof(struct nv0080_alloc);
	case NV20_SUBDEVICE_0:
		return sizeof(struct nv2080_alloc);
	case KEPLER_CHANNEL_GROUP_A:
		return sizeof(struct nv_channel_group_alloc);
	case FERMI_CONTEXT_SHARE_A:
		return sizeof(struct nv_ctxshare_alloc);
	case NV01_MEMORY_SYSTEM:
	case NV01_MEMORY_LOCAL_USER:
		return branch >= 545 ? sizeof(struct nv_memory_alloc) : 120;
	default:
		if (NV_CLASS_IS_GPFIFO(cls))
			return branch >= 570 ? 368 : 360;
		return 0;
	}
}

/* Bytes of a UVM ioctl's argument; the request number does not carry them. 0 = unknown request. */
static inline uint32_t uvm_arg_size(uint32_t request, uint32_t branch)
{
	switch (request) {
	case UVM_INITIALIZE:
		return sizeof(struct uvm_initialize);
	case UVM_DEINITIALIZE:
		return 0;
	case UVM_MM_INITIALIZE:
		return sizeof(struct uvm_mm_initialize);
	case UVM_REGISTER_GPU:
		return sizeof(struct uvm_register_gpu);
	case UVM_UNREGISTER_GPU:
	case UVM_UNREGISTER_GPU_VASPACE:
		return sizeof(struct uvm_unregister_gpu);
	case UVM_REGISTER_GPU_VASPACE:
		return sizeof(struct uvm_register_gpu_vaspace);
	case UVM_REGISTER_CHANNEL:
		return sizeof(struct uvm_register_channel);
	case UVM_UNREGISTER_CHANNEL:
		return uvm_unregister_at(branch) + (uint32_t)sizeof(struct uvm_unregister_channel_590);
	case UVM_CREATE_EXTERNAL_RANGE:
	case UVM_FREE:
		return sizeof(struct uvm_range);
	case UVM_UNMAP_EXTERNAL:
		return sizeof(struct uvm_unmap_external);
	case UVM_MAP_EXTERNAL_SPARSE:
		return sizeof(struct uvm_map_external_sparse);
	case UVM_MAP_EXTERNAL_ALLOCATION:
		return uvm_map_tail_at(branch) + (uint32_t)sizeof(struct uvm_map_external_tail);
	default:
		return 0;
	}
}

#endif
