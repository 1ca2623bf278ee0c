/* system.c - see nvml.h: the library itself, versions, and how a device is found. */
#include "nvml.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* Prototypes of the exported names, so that each definition is checked against one. */
#define DECLARE(name, ...) NVML_API nvml_return_t name(__VA_ARGS__);
DECLARE(nvmlInit_v2, void)
DECLARE(nvmlInitWithFlags, unsigned flags)
DECLARE(nvmlShutdown, void)
DECLARE(nvmlSystemGetDriverVersion, char *text, unsigned size)
DECLARE(nvmlSystemGetNVMLVersion, char *text, unsigned size)
DECLARE(nvmlSystemGetCudaDriverVersion, int *version)
DECLARE(nvmlSystemGetCudaDriverVersion_v2, int *version)
DECLARE(nvmlSystemGetProcessName, unsigned pid, char *text, unsigned size)
DECLARE(nvmlDeviceGetCount_v2, unsigned *count)
DECLARE(nvmlDeviceGetHandleByIndex_v2, unsigned index, nvml_device_t *device)
DECLARE(nvmlDeviceGetHandleByUUID, const char *uuid, nvml_device_t *device)
DECLARE(nvmlDeviceGetHandleByPciBusId_v2, const char *bus_id, nvml_device_t *device)
DECLARE(nvmlEventSetCreate, void **set)
NVML_API const char *nvmlErrorString(nvml_return_t code);

static nvml_return_t copy_text(char *out, unsigned size, const char *text)
{
	if (!out)
		return NVML_INVALID_ARGUMENT;
	if (strlen(text) >= size)
		return NVML_INSUFFICIENT_SIZE;
	memcpy(out, text, strlen(text) + 1);
	return NVML_SUCCESS;
}

nvml_return_t nvmlInit_v2(void)
{
	return board_open();
}

nvml_return_t nvmlInitWithFlags(unsigned flags)
{
	(void)flags;
	return board_open();
}

nvml_return_t nvmlShutdown(void)
{
	if (!board_get())
		return NVML_UNINITIALIZED;
	board_close();
	return NVML_SUCCESS;
}

nvml_return_t nvmlSystemGetDriverVersion(char *text, unsigned size)
{
	const struct emu_board *b = board_get();
	char version[64];

	if (!b)
		return NVML_UNINITIALIZED;
	snprintf(version, sizeof version, b->driver[2] ? "%u.%u.%02u" : "%u.%02u", b->driver[0], b->driver[1],
	         b->driver[2]);
	return copy_text(text, size, version);
}

nvml_return_t nvmlSystemGetNVMLVersion(char *text, unsigned size)
{
	const struct emu_board *b = board_get();
	char version[64];

	if (!b)
		return NVML_UNINITIALIZED;
	snprintf(version, sizeof version, "13.%u.%u", b->driver[0], b->driver[1]);
	return copy_text(text, size, version);
}

nvml_return_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	if (!version)
		return NVML_INVALID_ARGUMENT;
	*version = 13000;
	return NVML_SUCCESS;
}

nvml_return_t nvmlSystemGetCudaDriverVersion(int *version)
{
	return nvmlSystemGetCudaDriverVersion_v2(version);
}

nvml_return_t nvmlSystemGetProcessName(unsigned pid, char *text, unsigned size)
{
	char path[64], name[4096] = "";
	FILE *f;

	snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
	f = fopen(path, "re");
	if (!f)
		return NVML_NOT_FOUND;
	(void)!fread(name, 1, sizeof name - 1, f); /* ends at the first argument's zero */
	fclose(f);
	return copy_text(text, size, name);
}

nvml_return_t nvmlDeviceGetCount_v2(unsigned *count)
{
	const struct emu_board *b = board_get();

	if (!b)
		return NVML_UNINITIALIZED;
	if (!count)
		return NVML_INVALID_ARGUMENT;
	*count = b->gpus;
	return NVML_SUCCESS;
}

nvml_return_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvml_device_t *device)
{
	const struct emu_board *b = board_get();

	if (!b)
		return NVML_UNINITIALIZED;
	if (!device || index >= b->gpus)
		return NVML_INVALID_ARGUMENT;
	*device = &b->gpu[index];
	return board_check(*device);
}

nvml_return_t nvmlDeviceGetHandleByUUID(const char *uuid, nvml_device_t *device)
{
	const struct emu_board *b = board_get();
	char text[64];

	if (!b)
		return NVML_UNINITIALIZED;
	for (unsigned i = 0; uuid && device && i < b->gpus; i++) {
		board_uuid(&b->gpu[i], text, sizeof text);
		if (strcmp(uuid, text) == 0)
			return nvmlDeviceGetHandleByIndex_v2(i, device);
	}
	return uuid && device ? NVML_NOT_FOUND : NVML_INVALID_ARGUMENT;
}

nvml_return_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvml_device_t *device)
{
	const struct emu_board *b = board_get();
	struct nvml_pci pci;

	if (!b)
		return NVML_UNINITIALIZED;
	for (unsigned i = 0; bus_id && device && i < b->gpus; i++) {
		board_pci(&b->gpu[i], &pci);
		if (strcasecmp(bus_id, pci.bus_id) == 0 || strcasecmp(bus_id, pci.legacy_bus_id) == 0)
			return nvmlDeviceGetHandleByIndex_v2(i, device);
	}
	return bus_id && device ? NVML_NOT_FOUND : NVML_INVALID_ARGUMENT;
}

/* Who watches for faults, as NVIDIA's device plugin does, goes on without. */
nvml_return_t nvmlEventSetCreate(void **set)
{
	return set ? NVML_NOT_SUPPORTED : NVML_INVALID_ARGUMENT;
}

const char *nvmlErrorString(nvml_return_t code)
{
	switch (code) {
	case NVML_SUCCESS:
		return "Success";
	case NVML_UNINITIALIZED:
		return "Uninitialized";
	case NVML_INVALID_ARGUMENT:
		return "Invalid Argument";
	case NVML_NOT_SUPPORTED:
		return "Not Supported";
	case NVML_NOT_FOUND:
		return "Not Found";
	case NVML_INSUFFICIENT_SIZE:
		return "Insufficient Size";
	case NVML_DRIVER_NOT_LOADED:
		return "Driver Not Loaded";
	case NVML_GPU_IS_LOST:
		return "GPU is lost";
	default:
		return "Unknown Error";
	}
}
