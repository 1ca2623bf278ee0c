/*
 * nvrm.h - the NVIDIA Resource Manager (RM) and UVM ioctls that Valve reads or issues. Layouts only, no behaviour.
 *
 * Spelling follows the driver (NVOS21, hClient becomes root/client here only where C style asks for it); each group
 * names the file of NVIDIA/open-gpu-kernel-modules that it restates. S/ = src/common/sdk/nvidia/inc,
 * U/ = src/nvidia/arch/nvalloc/unix. Offsets hold for branches 535 to 595 on x86-64 unless a line says otherwise;
 * what differs between branches is at the end, as a difference from the parent.
 */
#ifndef VALVE_ABI_NVRM_H
#define VALVE_ABI_NVRM_H

#include <stddef.h>
#include <stdint.h>

/* Escape numbers: U/include/nv_escape.h, kernel-open/common/inc/nv-ioctl-numbers.h */
enum nv_escape {
	NV_ESC_RM_ALLOC_MEMORY = 0x27,
	NV_ESC_RM_FREE = 0x29,
	NV_ESC_RM_CONTROL = 0x2A,
	NV_ESC_RM_ALLOC = 0x2B,
	NV_ESC_RM_DUP_OBJECT = 0x34,
	NV_ESC_RM_SHARE = 0x35,
	NV_ESC_RM_IDLE_CHANNELS = 0x41,
	NV_ESC_RM_VID_HEAP_CONTROL = 0x4A,
	NV_ESC_RM_MAP_MEMORY = 0x4E,
	NV_ESC_RM_UNMAP_MEMORY = 0x4F,
	NV_ESC_CARD_INFO = 200,
	NV_ESC_REGISTER_FD = 201,
	NV_ESC_ALLOC_OS_EVENT = 206,
	NV_ESC_FREE_OS_EVENT = 207,
	NV_ESC_STATUS_CODE = 209,
	NV_ESC_CHECK_VERSION_STR = 210,
	NV_ESC_IOCTL_XFER_CMD = 211,
	NV_ESC_ATTACH_GPUS_TO_FD = 212,
	NV_ESC_QUERY_DEVICE_INTR = 213,
	NV_ESC_SYS_PARAMS = 214,
	NV_ESC_WAIT_OPEN_COMPLETE = 218,
};
#define NV_IOC_MAGIC         0x46u /* 'F' */
#define NV_IOWR(nr, size)    (0xC0000000u | ((uint32_t)(size) << 16) | (NV_IOC_MAGIC << 8) | (uint32_t)(nr))
#define NV_IOC_NR(request)   ((uint32_t)(request) & 0xFFu)
#define NV_IOC_TYPE(request) (((uint32_t)(request) >> 8) & 0xFFu)
#define NV_IOC_SIZE(request) (((uint32_t)(request) >> 16) & 0x3FFFu)
#define NV_XFER_MAX          16384u /* kernel-open/nvidia/nv.c: larger wrapped calls are refused */

/* Object classes: S/class/cl*.h */
enum nv_class {
	NV01_ROOT = 0x0,
	NV01_ROOT_NON_PRIV = 0x1,
	NV01_ROOT_CLIENT = 0x41, /* the kernel rewrites root classes to this one */
	NV01_MEMORY_SYSTEM = 0x3E,
	NV01_MEMORY_LOCAL_USER = 0x40,
	NV01_DEVICE_0 = 0x80,
	NV20_SUBDEVICE_0 = 0x2080,
	FERMI_CONTEXT_SHARE_A = 0x9067,
	FERMI_VASPACE_A = 0x90F1,
	MPS_COMPUTE = 0x900E,
	KEPLER_CHANNEL_GROUP_A = 0xA06C,
	HOPPER_CHANNEL_GPFIFO_A = 0xC86F,
	HOPPER_COMPUTE_A = 0xCBC0,
	HOPPER_DMA_COPY_A = 0xC8B5,
};
/* Every GPFIFO class ends in 0x6F (0x906F is an old control class), compute in 0xC0, copy in 0xB5. */
#define NV_CLASS_IS_GPFIFO(c)  ((c) > 0xFFFu && ((c) & 0xFFu) == 0x6Fu && (c) != 0x906Fu)
#define NV_CLASS_IS_COMPUTE(c) ((c) > 0xFFFu && ((c) & 0xFFu) == 0xC0u)
#define NV_CLASS_IS_COPY(c)    ((c) > 0xFFFu && ((c) & 0xFFu) == 0xB5u)

/* Engine ids: S/class/cl2080_notification.h */
enum nv_engine { NV_ENGINE_NULL = 0, NV_ENGINE_GR0 = 1, NV_ENGINE_GR7 = 8, NV_ENGINE_COPY0 = 9 };
#define NV_ENGINE_IS_GR(e) ((e) >= 1u && (e) <= 8u)

/* Control ids: S/ctrl/ */
enum nv_ctrl {
	NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION_V2 = 0x13e,
	NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2 = 0x205,
	NV0000_CTRL_CMD_GPU_GET_PROBED_IDS = 0x214,
	NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD = 0x3d05,
	NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD = 0x3d06,
	NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO = 0x3d08,
	NV2080_CTRL_CMD_GPU_GET_GID_INFO = 0x2080014a,
	NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS = 0x2080110b,
	NV2080_CTRL_CMD_FIFO_GET_CHANNEL_GROUP_UNIQUE_ID_INFO = 0x20801123, /* 570 and later */
	NV2080_CTRL_CMD_FIFO_QUERY_CHANNEL_UNIQUE_ID = 0x20801124,          /* 570 and later */
	NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE = 0x20801210,
	NV2080_CTRL_CMD_FB_GET_INFO_V2 = 0x20801303,
	NV2080_CTRL_CMD_GR_GET_CTXSW_MODES = 0x20801235,
	NVA06C_CTRL_CMD_GPFIFO_SCHEDULE = 0xa06c0101,
	NVA06C_CTRL_CMD_BIND = 0xa06c0102,
	NVA06C_CTRL_CMD_SET_TIMESLICE = 0xa06c0103,
	NVA06C_CTRL_CMD_GET_TIMESLICE = 0xa06c0104,
	NVA06C_CTRL_CMD_PREEMPT = 0xa06c0105,
	NVA06F_CTRL_CMD_GPFIFO_SCHEDULE = 0xa06f0103,
	NVA06F_CTRL_CMD_BIND = 0xa06f0104,
	NVA06F_CTRL_CMD_STOP_CHANNEL = 0xa06f0112,
	NVC36F_CTRL_CMD_GPFIFO_GET_WORK_SUBMIT_TOKEN = 0xc36f0108,
};

/* Status words: S/nvstatuscodes.h */
enum nv_status {
	NV_OK = 0,
	NV_ERR_GPU_IS_LOST = 0x0F,
	NV_ERR_INSUFFICIENT_PERMISSIONS = 0x1B,
	NV_ERR_INVALID_ARGUMENT = 0x1F,
	NV_ERR_INVALID_CHANNEL = 0x21,
	NV_ERR_INVALID_CLIENT = 0x23,
	NV_ERR_INVALID_LOCK_STATE = 0x2F,
	NV_ERR_INVALID_OBJECT = 0x31,
	NV_ERR_INVALID_OBJECT_HANDLE = 0x33,
	NV_ERR_INVALID_OBJECT_PARENT = 0x36,
	NV_ERR_INVALID_PARAM_STRUCT = 0x3A,
	NV_ERR_INVALID_STATE = 0x40,
	NV_ERR_NO_MEMORY = 0x51,
	NV_ERR_NOT_SUPPORTED = 0x56,
	NV_ERR_OBJECT_NOT_FOUND = 0x57,
	NV_ERR_TIMEOUT = 0x65,
};
/* What a call names is no longer there, as opposed to one that could not be switched. */
#define NV_STATUS_IS_STALE(status)                                                        \
	((status) == NV_ERR_INVALID_CHANNEL || (status) == NV_ERR_INVALID_CLIENT ||       \
	 (status) == NV_ERR_INVALID_OBJECT || (status) == NV_ERR_INVALID_OBJECT_HANDLE || \
	 (status) == NV_ERR_OBJECT_NOT_FOUND)

/* S/nvos.h */
struct nvos00_free {
	uint32_t hRoot, hObjectParent, hObjectOld, status;
};
struct nvos21_alloc {
	uint32_t hRoot, hObjectParent, hObjectNew, hClass; /* hObjectNew 0: RM picks, written back */
	uint64_t pAllocParms;
	uint32_t paramsSize, status;
};
struct nvos64_alloc {
	uint32_t hRoot, hObjectParent, hObjectNew, hClass;
	uint64_t pAllocParms, pRightsRequested;
	uint32_t paramsSize, flags, status, pad; /* flags bit 0: parameters are FINN-serialised */
};
struct nvos54_control {
	uint32_t hClient, hObject, cmd, flags; /* flags bit 2 (value 4): FINN-serialised */
	uint64_t params;
	uint32_t paramsSize, status;
};
struct nvos55_dup {
	uint32_t hClient, hParent, hObject, hClientSrc, hObjectSrc, flags, status;
};
/* NVOS32_PARAMETERS, of function ALLOC_SIZE, as far as it is read */
struct nvos32_alloc_size {
	uint32_t hRoot, hObjectParent, function, hVASpace, ivcHeapNumber, status;
	uint64_t total, free;
	uint32_t owner, hMemory, type, flags, attr, format, comprCovg, zcullCovg, partitionStride, width,
	        height, pad0;
	uint64_t size;
};
#define NVOS32_FUNCTION_ALLOC_SIZE  2u
#define NVOS32_ALLOC_FLAGS_VIRTUAL  0x00080000u /* addresses, no memory */
#define NVOS32_ATTR_IS_SYSTEM(attr) (((attr) >> 25 & 3u) == 1u || ((attr) >> 25 & 3u) == 2u)
/* 120 bytes in 535, numaNode was added in 545 */
struct nv_memory_alloc {
	uint32_t owner, type, flags, width, height;
	int32_t pitch;
	uint32_t attr, attr2, format, comprCovg, zcullCovg, pad0;
	uint64_t rangeLo, rangeHi, size, alignment, offset, limit, address;
	uint32_t ctagOffset, hVASpace, internalflags, tag;
	int32_t numaNode;
	uint32_t pad1;
};
#define NVOS64_FLAGS_FINN_SERIALIZED 0x1u
#define NVOS54_FLAGS_FINN_SERIALIZED 0x4u

/* kernel-open/common/inc/nv-ioctl.h */
struct nv_ioctl_xfer {
	uint32_t cmd, size;
	uint64_t ptr;
};
struct nv_ioctl_register_fd {
	int32_t ctl_fd;
};
struct nv_ioctl_rm_api_version {
	uint32_t cmd, reply;
	char versionString[64];
};
struct nv_ioctl_card_info {
	uint8_t valid, pad0[3];
	uint32_t domain;
	uint8_t bus, slot, function, pad1;
	uint16_t vendor_id, device_id;
	uint32_t gpu_id;
	uint16_t interrupt_line, pad2;
	uint64_t reg_address, reg_size, fb_address, fb_size;
	uint32_t minor_number;
	uint8_t dev_name[10], pad3[2];
};

/* S/class/cl0080.h, cl2080.h, cla06c.h, cl9067.h, S/alloc/alloc_channel.h */
struct nv0080_alloc {
	uint32_t deviceId, hClientShare, hTargetClient, hTargetDevice, flags, pad0;
	uint64_t vaSpaceSize, vaStartInternal, vaLimitInternal;
	uint32_t vaMode, pad1;
};
struct nv2080_alloc {
	uint32_t subDeviceId;
};
struct nv_channel_group_alloc {
	uint32_t hObjectError, hObjectEccError, hVASpace, engineType;
	uint8_t bIsCallingContextVgpuPlugin, pad0[3];
};
struct nv_ctxshare_alloc {
	uint32_t hVASpace, flags, subctxId;
};
/* 360 bytes up to 550, 368 from 570; the fields below stand at the same place in both. */
struct nv_channel_alloc {
	uint32_t hObjectError, hObjectBuffer;
	uint64_t gpFifoOffset;
	uint32_t gpFifoEntries, flags, hContextShare, hVASpace;
	uint32_t hUserdMemory[8];
	uint64_t userdOffset[8];
	uint32_t engineType, cid, subDeviceId;
	uint8_t rest[228];
};

/* S/ctrl/ctrl0000/ctrl0000gpu.h */
struct nv0000_gpu_id_info {
	uint32_t gpuId, gpuFlags, deviceInstance, subDeviceInstance, sliStatus, boardId, gpuInstance;
	int32_t numaId;
};
/* S/ctrl/ctrl2080/ctrl2080gpu.h: GID as SHA-1 binary (flags 2) is the 16-byte UUID that UVM uses */
struct nv2080_gpu_gid_info {
	uint32_t index, flags, length;
	uint8_t data[256];
};
/* S/ctrl/ctrl2080/ctrl2080fb.h: the list has as many entries as NV_FB_INFO_TABLE says, whatever `count` is */
#define NV2080_FB_INFO_INDEX_HEAP_FREE 0x16u /* KiB that are free on the card */
#define NV2080_FB_INFO_MAX             128u
struct nv2080_fb_get_info {
	uint32_t count;
	struct {
		uint32_t index, data;
	} entry[NV2080_FB_INFO_MAX];
};
/* S/ctrl/ctrl2080/ctrl2080fifo.h: same layout 515 to 595 */
#define NV2080_DISABLE_CHANNELS_MAX 64u
struct nv2080_fifo_disable_channels {
	uint8_t bDisable, pad0[3];
	uint32_t numChannels;
	uint8_t bOnlyDisableScheduling, bRewindGpPut, pad1[6]; /* rewind drops queued work: never set it */
	uint64_t pRunlistPreemptEvent; /* non-zero is refused without kernel privilege */
	uint32_t hClientList[NV2080_DISABLE_CHANNELS_MAX];
	uint32_t hChannelList[NV2080_DISABLE_CHANNELS_MAX];
};
struct nv2080_fifo_channel_unique_id {
	uint32_t hClients[128], hChannels[128], numChannels, channelUniqueIDs[128];
};
/* S/ctrl/ctrla06c/ctrla06cgpfifo.h: 2 bytes up to 570, 3 from 580 */
struct nva06c_gpfifo_schedule {
	uint8_t bEnable, bSkipSubmit, bSkipEnable;
};
struct nva06c_timeslice {
	uint64_t timesliceUs;
};
struct nva06c_bind {
	uint32_t engineType;
};
struct nv0000_export_object_to_fd {
	uint32_t type, hDevice, hParent, hObject; /* type 1: an RM object */
	int32_t fd;
	uint32_t flags;
};
struct nv0000_import_object_from_fd {
	int32_t fd;
	uint32_t type, hDevice, hParent, hObject;
};

/* kernel-open/nvidia-uvm/uvm_ioctl.h (MIT): raw numbers, no _IOC encoding */
enum uvm_ioctl {
	UVM_REGISTER_GPU_VASPACE = 25,
	UVM_UNREGISTER_GPU_VASPACE = 26,
	UVM_REGISTER_CHANNEL = 27,
	UVM_UNREGISTER_CHANNEL = 28,
	UVM_MAP_EXTERNAL_ALLOCATION = 33,
	UVM_FREE = 34,
	UVM_REGISTER_GPU = 37,
	UVM_UNREGISTER_GPU = 38,
	UVM_UNMAP_EXTERNAL = 66,
	UVM_CREATE_EXTERNAL_RANGE = 73,
	UVM_MAP_EXTERNAL_SPARSE = 74,
	UVM_MM_INITIALIZE = 75,
	UVM_INITIALIZE = 0x30000001,
	UVM_DEINITIALIZE = 0x30000002,
};
struct uvm_register_channel {
	uint8_t gpuUuid[16];
	int32_t rmCtrlFd;
	uint32_t hClient, hChannel, pad0;
	uint64_t base, length;
	uint32_t rmStatus, pad1;
};
struct uvm_unregister_channel {
	uint8_t gpuUuid[16];
	uint32_t hClient, hChannel, rmStatus;
};
/* From 590 the UUID is gone and the handles stand first (NV_BRANCH_TABLE, unregister_at). */
struct uvm_unregister_channel_590 {
	uint32_t hClient, hChannel, rmStatus;
};
struct uvm_map_external_sparse {
	uint64_t base, length;
	uint8_t gpuUuid[16];
	uint32_t rmStatus, pad0;
};

/* Differences between branches, each from its parent. A branch not listed here is unknown: observe, never issue. */
struct nv_branch {
	uint32_t first;             /* first branch of the run */
	uint32_t channel_params;    /* sizeof NV_CHANNEL_ALLOC_PARAMS */
	uint32_t engine_at, cid_at; /* offsets in it */
	uint32_t schedule_params;   /* sizeof NVA06C_CTRL_GPFIFO_SCHEDULE_PARAMS */
	uint32_t has_unique_id;     /* 0x20801124 exists */
	uint32_t unregister_at;     /* offset of hClient in UVM_UNREGISTER_CHANNEL_PARAMS */
};
/* clang-format off */
#define NV_BRANCH_TABLE               \
	{535, 360, 128, 132, 2, 0, 16}, \
	{570, 368, 128, 132, 2, 1, 16}, \
	{580, 368, 128, 132, 3, 1, 16}, \
	{590, 368, 128, 132, 3, 1, 0},  \
	{610, 0, 136, 140, 3, 1, 0}
/* clang-format on */
/* From which branch on, and NV2080_CTRL_FB_INFO_MAX_LIST_SIZE there */
#define NV_FB_INFO_TABLE                       \
	{535, 0x36}, {550, 0x37}, {570, 0x39}, \
	{                                      \
		580, 0x80                      \
	}
#define NV_BRANCH_FIRST 535u /* older: old lock rules, untested */
#define NV_BRANCH_LAST  595u /* newer: unknown */

#define NV_SIZE(type, n)      _Static_assert(sizeof(struct type) == (n), #type)
#define NV_AT(type, field, n) _Static_assert(offsetof(struct type, field) == (n), #type "." #field)
NV_SIZE(nvos00_free, 16);
NV_SIZE(nvos21_alloc, 32);
NV_SIZE(nvos64_alloc, 48);
NV_SIZE(nvos54_control, 32);
NV_SIZE(nvos32_alloc_size, 96);
NV_SIZE(nv_memory_alloc, 128);
NV_SIZE(nv2080_fb_get_info, 1028);
NV_SIZE(nvos55_dup, 28);
NV_SIZE(nv_ioctl_xfer, 16);
NV_SIZE(nv_ioctl_rm_api_version, 72);
NV_SIZE(nv_ioctl_card_info, 72);
NV_SIZE(nv0080_alloc, 56);
NV_SIZE(nv_channel_group_alloc, 20);
NV_SIZE(nv_ctxshare_alloc, 12);
NV_SIZE(nv_channel_alloc, 368);
NV_SIZE(nv0000_gpu_id_info, 32);
NV_SIZE(nv2080_gpu_gid_info, 268);
NV_SIZE(nv2080_fifo_disable_channels, 536);
NV_SIZE(nv2080_fifo_channel_unique_id, 1540);
NV_SIZE(nva06c_gpfifo_schedule, 3);
NV_SIZE(nv0000_export_object_to_fd, 24);
NV_SIZE(nv0000_import_object_from_fd, 20);
NV_SIZE(uvm_register_channel, 56);
NV_SIZE(uvm_unregister_channel, 28);
NV_SIZE(uvm_unregister_channel_590, 12);
NV_SIZE(uvm_map_external_sparse, 40);
NV_AT(nvos21_alloc, pAllocParms, 16);
NV_AT(nvos21_alloc, status, 28);
NV_AT(nvos64_alloc, flags, 36);
NV_AT(nvos64_alloc, status, 40);
NV_AT(nvos32_alloc_size, status, 20);
NV_AT(nvos32_alloc_size, attr, 56);
NV_AT(nvos32_alloc_size, size, 88);
NV_AT(nv_memory_alloc, size, 64);
NV_AT(nvos54_control, params, 16);
NV_AT(nvos54_control, status, 28);
NV_AT(nvos55_dup, status, 24);
NV_AT(nv_ioctl_card_info, gpu_id, 16);
NV_AT(nv_ioctl_card_info, minor_number, 56);
NV_AT(nv0080_alloc, vaMode, 48);
NV_AT(nv_channel_group_alloc, engineType, 12);
NV_AT(nv_channel_alloc, hUserdMemory, 32);
NV_AT(nv_channel_alloc, userdOffset, 64);
NV_AT(nv_channel_alloc, engineType, 128);
NV_AT(nv_channel_alloc, cid, 132);
NV_AT(nv2080_fifo_disable_channels, bOnlyDisableScheduling, 8);
NV_AT(nv2080_fifo_disable_channels, pRunlistPreemptEvent, 16);
NV_AT(nv2080_fifo_disable_channels, hClientList, 24);
NV_AT(nv2080_fifo_disable_channels, hChannelList, 280);
NV_AT(nv2080_fifo_channel_unique_id, channelUniqueIDs, 1028);
NV_AT(uvm_register_channel, hClient, 20);
NV_AT(uvm_register_channel, rmStatus, 48);
NV_AT(uvm_unregister_channel, rmStatus, 24);
#undef NV_SIZE
#undef NV_AT

#endif
