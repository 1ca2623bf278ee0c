/* system.c - see nvml.h: the library itself, versions, and how a device is found. */
#include "nvml.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define BOARD_OR_RETURN(b)                       \
	const struct emu_board *b = board_get(); \
	if (!b)                                  \
	return NVML_UNINITIALIZED

NVML_CALL(nvmlInit_v2, void)
{
	return board_open();
}

NVML_CALL(nvmlInitWithFlags, unsigned flags)
{
	(void)flags;
	return board_open();
}

NVML_CALL(nvmlShutdown, void)
{
	if (!board_get())
		return NVML_UNINITIALIZED;
	board_close();
	return NVML_SUCCESS;
}

NVML_CALL(nvmlSystemGetDriverVersion, char *text, unsigned size)
{
	char version[64];
	BOARD_OR_RETURN(b);

	snprintf(version, sizeof version, b->driver[2] ? "%u.%u.%02u" : "%u.%02u", b->driver[0], b->driver[1],
	         b->driver[2]);
	return board_text(text, size, version);
}

NVML_CALL(nvmlSystemGetNVMLVersion, char *text, unsigned size)
{
	char version[64];
	BOARD_OR_RETURN(b);

	snprintf(version, sizeof version, "13.%u.%u", b->driver[0], b->driver[1]);
	return board_text(text, size, version);
}

NVML_CALL(nvmlSystemGetCudaDriverVersion_v2, int *version)
{
	if (!version)
		return NVML_INVALID_ARGUMENT;
	*version = 13000;
	return NVML_SUCCESS;
}

NVML_CALL(nvmlSystemGetCudaDriverVersion, int *version)
{
	return nvmlSystemGetCudaDriverVersion_v2(version);
}

NVML_CALL(nvmlSystemGetProcessName, unsigned pid, char *text, unsigned size)
{
	char path[64], name[4096] = "";
	FILE *f;

	snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
	f = fopen(path, "re");
	if (!f)
		return NVML_NOT_FOUND;
	(void)!fread(name, 1, sizeof name - 1, f); /* ends at the first argument's zero */
	fclose(f);
	return board_text(text, size, name);
}

NVML_CALL(nvmlDeviceGetCount_v2, unsigned *count)
{
	BOARD_OR_RETURN(b);

	if (!count)
		return NVML_INVALID_ARGUMENT;
	*count = b->gpus;
	return NVML_SUCCESS;
}

NVML_CALL(nvmlDeviceGetHandleByIndex_v2, unsigned index, nvml_device_t *device)
{
	BOARD_OR_RETURN(b);

	if (!device || index >= b->gpus)
		return NVML_INVALID_ARGUMENT;
	*device = &b->gpu[index];
	return board_check(*device);
}

NVML_CALL(nvmlDeviceGetHandleByUUID, const char *uuid, nvml_device_t *device)
{
	char text[64];
	BOARD_OR_RETURN(b);

	for (unsigned i = 0; uuid && device && i < b->gpus; i++) {
		board_uuid(&b->gpu[i], text, sizeof text);
		if (strcmp(uuid, text) == 0)
			return nvmlDeviceGetHandleByIndex_v2(i, device);
	}
	return uuid && device ? NVML_NOT_FOUND : NVML_INVALID_ARGUMENT;
}

NVML_CALL(nvmlDeviceGetHandleByPciBusId_v2, const char *bus_id, nvml_device_t *device)
{
	struct nvml_pci pci;
	BOARD_OR_RETURN(b);

	for (unsigned i = 0; bus_id && device && i < b->gpus; i++) {
		board_pci(&b->gpu[i], &pci);
		if (strcasecmp(bus_id, pci.bus_id) == 0 || strcasecmp(bus_id, pci.legacy_bus_id) == 0)
			return nvmlDeviceGetHandleByIndex_v2(i, device);
	}
	return bus_id && device ? NVML_NOT_FOUND : NVML_INVALID_ARGUMENT;
}

/* A program that watches for faults, such as NVIDIA's device plugin, goes on without. */
NVML_CALL(nvmlEventSetCreate, void **set)
{
	return set ? NVML_NOT_SUPPORTED : NVML_INVALID_ARGUMENT;
}

__attribute__((visibility("default"))) const char *nvmlErrorString(nvml_return_t code);
const char *nvmlErrorString(nvml_return_t code)
{
	static const char *const texts[] = {
	        [NVML_SUCCESS] = "Success",
	        [NVML_UNINITIALIZED] = "Uninitialized",
	        [NVML_INVALID_ARGUMENT] = "Invalid Argument",
	        [NVML_NOT_SUPPORTED] = "Not Supported",
	        [NVML_NOT_FOUND] = "Not Found",
	        [NVML_INSUFFICIENT_SIZE] = "Insufficient Size",
	        [NVML_DRIVER_NOT_LOADED] = "Driver Not Loaded",
	        [NVML_GPU_IS_LOST] = "GPU is lost",
	};
	bool is_known = code >= 0 && (size_t)code < sizeof(texts) / sizeof(texts[0]) && texts[code];

	return is_known ? texts[code] : "Unknown Error";
}
