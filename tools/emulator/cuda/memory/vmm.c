/*
 * vmm.c - physical handles: create, release, retain, export, import. Rules and refusals as in the facts on CUDA virtual
 * memory: sizes are whole granules, exporting must have been asked for at creation, importing
 * pairs with a release of its own.
 */
#include "vmm.h"
#include "rm.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define IMPORT_TYPE_RM_OBJECT 1u
#define HANDLE_TYPES_KNOWN    (CU_MEM_HANDLE_POSIX_FD)

HANDLE(handle_from, CUmemGenericAllocationHandle, struct vmm_handle, MAGIC_HANDLE)

struct vmm_handle *handle_new(struct device *dev, const CUmemAllocationProp *prop, uint64_t bytes,
                              uint32_t h_memory)
{
	struct vmm_handle *handle = cell_new();

	handle->magic = MAGIC_HANDLE;
	handle->dev = dev;
	handle->prop = *prop;
	handle->bytes = bytes;
	handle->h_memory = h_memory;
	handle->refs = 1;
	return handle;
}

/* False: there was nothing to give back. */
bool handle_drop(struct vmm_handle *handle, bool is_mapping)
{
	pthread_mutex_lock(&memory.lock);
	unsigned *count = is_mapping ? &handle->mappings : &handle->refs;
	bool had = *count > 0;
	*count -= had;
	bool is_last = had && !handle->refs && !handle->mappings;
	if (is_last)
		handle->magic = 0;
	pthread_mutex_unlock(&memory.lock);
	if (is_last) {
		rm_free(handle->dev->h_device, handle->h_memory);
		cell_free(handle);
	}
	return had;
}

/* Where the memory is asked for; host memory hangs off the first device, as everything in RM hangs off one. */
static CUresult check_prop(const CUmemAllocationProp *prop, struct device **dev, uint32_t *cls)
{
	REFUSE_IF(!prop || prop->type != CU_MEM_TYPE_PINNED ||
	                  (prop->requested_handles & ~HANDLE_TYPES_KNOWN),
	          CUDA_ERROR_INVALID_VALUE);
	if (prop->location.type == CU_MEM_LOCATION_DEVICE) {
		*cls = NV01_MEMORY_LOCAL_USER;
		*dev = device_at(prop->location.id);
		return *dev ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
	}
	REFUSE_IF(prop->location.type < CU_MEM_LOCATION_HOST || prop->location.type > 4,
	          CUDA_ERROR_INVALID_VALUE);
	*cls = NV01_MEMORY_SYSTEM;
	*dev = device_at(0);
	return CUDA_SUCCESS;
}

CUAPI(10020, cuMemGetAllocationGranularity, size_t *out, const CUmemAllocationProp *prop, int option)
{
	struct device *dev;
	uint32_t cls;

	TRY(driver_check());
	TRY(check_prop(prop, &dev, &cls));
	REFUSE_IF(!out || option < 0 || option > 1, CUDA_ERROR_INVALID_VALUE);
	*out = LARGE_PAGE;
	return CUDA_SUCCESS;
}

CUAPI(10020, cuMemCreate, CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *prop,
      unsigned long long flags)
{
	METERED(CREATE);
	struct device *dev;
	uint32_t cls, h_memory;

	TRY(driver_check());
	TRY(check_prop(prop, &dev, &cls));
	REFUSE_IF(!out || flags || !bytes || bytes % LARGE_PAGE, CUDA_ERROR_INVALID_VALUE);
	REFUSE_IF(memory_object_new(dev, cls, bytes, &h_memory), CUDA_ERROR_OUT_OF_MEMORY);
	*out = (uintptr_t)handle_new(dev, prop, bytes, h_memory);
	return CUDA_SUCCESS;
}

CUAPI(10020, cuMemRelease, CUmemGenericAllocationHandle value)
{
	METERED(RELEASE);
	struct vmm_handle *handle = handle_from(value);

	TRY(driver_check());
	return handle && handle_drop(handle, false) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUAPI(11000, cuMemRetainAllocationHandle, CUmemGenericAllocationHandle *out, void *address)
{
	TRY(driver_check());
	REFUSE_IF(!out, CUDA_ERROR_INVALID_VALUE);
	LOCKED(&memory.lock);
	const struct range *mapping = book_find(&memory.mappings, (uintptr_t)address);
	if (mapping) {
		mapping->handle->refs++;
		*out = (uintptr_t)mapping->handle;
	}
	return mapping ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUAPI(10020, cuMemGetAllocationPropertiesFromHandle, CUmemAllocationProp *out,
      CUmemGenericAllocationHandle value)
{
	const struct vmm_handle *handle = handle_from(value);

	REFUSE_IF(!out || !handle, CUDA_ERROR_INVALID_VALUE);
	*out = handle->prop;
	return CUDA_SUCCESS;
}

/* An export is a control file of its own that holds the memory until its last close. */
CUAPI(10020, cuMemExportToShareableHandle, void *out, CUmemGenericAllocationHandle value, int type,
      unsigned long long flags)
{
	METERED(EXPORT);
	const struct vmm_handle *handle = handle_from(value);

	TRY(driver_check());
	if (!out || !handle || flags || type != CU_MEM_HANDLE_POSIX_FD ||
	    !(handle->prop.requested_handles & CU_MEM_HANDLE_POSIX_FD))
		return CUDA_ERROR_INVALID_VALUE;
	int fd = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	REFUSE_IF(fd < 0, CUDA_ERROR_OPERATING_SYSTEM);
	struct nv0000_export_object_to_fd p = {
	        .type = IMPORT_TYPE_RM_OBJECT,
	        .hDevice = handle->dev->h_device,
	        .hParent = handle->dev->h_device,
	        .hObject = handle->h_memory,
	        .fd = fd,
	};
	if (rm_control(emu.h_client, NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD, &p, sizeof(p))) {
		close(fd);
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	*(int *)out = fd;
	return CUDA_SUCCESS;
}

/* How large an imported object is: the file behind it knows. */
static uint64_t object_bytes(uint32_t h_memory)
{
	struct stat info = {0};
	int fd = rm_object_file(h_memory);

	if (fd < 0)
		return 0;
	if (fstat(fd, &info))
		info.st_size = 0;
	close(fd);
	return (uint64_t)info.st_size;
}

CUAPI(10020, cuMemImportFromShareableHandle, CUmemGenericAllocationHandle *out, void *os_handle, int type)
{
	METERED(IMPORT);
	int fd = (int)(intptr_t)os_handle;
	struct nv0000_export_object_info info = {.fd = fd};
	struct device *dev = device_at(0);

	TRY(driver_check());
	REFUSE_IF(!out || type != CU_MEM_HANDLE_POSIX_FD || fd < 0, CUDA_ERROR_INVALID_VALUE);
	REFUSE_IF(
	        rm_control(emu.h_client, NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO, &info, sizeof(info)),
	        CUDA_ERROR_INVALID_VALUE);
	for (int i = 0; i < emu.devices; i++)
		if (emu.device[i].instance == info.deviceInstance)
			dev = &emu.device[i];
	struct nv0000_import_object_from_fd p = {
	        .fd = fd,
	        .type = IMPORT_TYPE_RM_OBJECT,
	        .hDevice = dev->h_device,
	        .hParent = dev->h_device,
	        .hObject = rm_new_handle(),
	};
	REFUSE_IF(rm_control(emu.h_client, NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD, &p, sizeof(p)),
	          CUDA_ERROR_INVALID_VALUE);
	CUmemAllocationProp prop = {
	        .type = CU_MEM_TYPE_PINNED,
	        .requested_handles = CU_MEM_HANDLE_POSIX_FD,
	        .location = {CU_MEM_LOCATION_DEVICE, dev->ordinal},
	};
	*out = (uintptr_t)handle_new(dev, &prop, object_bytes(p.hObject), p.hObject);
	return CUDA_SUCCESS;
}
