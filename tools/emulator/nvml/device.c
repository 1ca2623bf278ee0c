/* device.c - see nvml.h: one card's identity, memory, load and processes. */
#include "nvml.h"
#include <stdio.h>
#include <string.h>

#define DEVICE_CALL(name, ...) NVML_CALL(name, nvml_device_t device, __VA_ARGS__)
/* Each call checks the handle first, and then that there is a place for the result. */
#define CHECK(result)                                        \
	do {                                                 \
		nvml_return_t checked = board_check(device); \
		if (checked)                                 \
			return checked;                      \
		if (!(result))                               \
			return NVML_INVALID_ARGUMENT;        \
	} while (0)

#define ANSWER(name, type, value)    \
	DEVICE_CALL(name, type *out) \
	{                            \
		CHECK(out);          \
		*out = (value);      \
		return NVML_SUCCESS; \
	}
#define ANSWER_TWO(name, type, first, second)        \
	DEVICE_CALL(name, type *one, type *other)    \
	{                                            \
		CHECK(one != NULL && other != NULL); \
		*one = (first);                      \
		*other = (second);                   \
		return NVML_SUCCESS;                 \
	}
ANSWER(nvmlDeviceGetIndex, unsigned, board_index(device))
ANSWER(nvmlDeviceGetMinorNumber, unsigned, device->minor)
ANSWER(nvmlDeviceGetComputeMode, unsigned, board_get()->compute_mode)
ANSWER(nvmlDeviceGetPersistenceMode, unsigned, 1)
ANSWER(nvmlDeviceGetArchitecture, unsigned, 9) /* Hopper */
ANSWER_TWO(nvmlDeviceGetMigMode, unsigned, board_get()->mig, board_get()->mig)
ANSWER_TWO(nvmlDeviceGetGspFirmwareMode, unsigned, board_get()->gsp, 1)
ANSWER_TWO(nvmlDeviceGetCudaComputeCapability, int, 9, 0)

DEVICE_CALL(nvmlDeviceGetName, char *text, unsigned size)
{
	CHECK(text);
	return board_text(text, size, device->name);
}

DEVICE_CALL(nvmlDeviceGetUUID, char *text, unsigned size)
{
	char uuid[64];

	CHECK(text);
	board_uuid(device, uuid, sizeof uuid);
	return board_text(text, size, uuid);
}

DEVICE_CALL(nvmlDeviceGetPciInfo_v3, struct nvml_pci *pci)
{
	CHECK(pci);
	board_pci(device, pci);
	return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetMemoryInfo, struct nvml_memory *memory)
{
	CHECK(memory);
	memory->total = device->total_bytes;
	memory->used = __atomic_load_n(&device->used_bytes, __ATOMIC_RELAXED);
	memory->free = memory->total - memory->used;
	return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetMemoryInfo_v2, struct nvml_memory_v2 *memory)
{
	struct nvml_memory plain;

	CHECK(memory);
	nvmlDeviceGetMemoryInfo(device, &plain);
	memory->total = plain.total;
	memory->reserved = 0;
	memory->free = plain.free;
	memory->used = plain.used;
	return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetUtilizationRates, struct nvml_utilization *rates)
{
	CHECK(rates);
	rates->gpu = board_utilization(device);
	rates->memory = 0;
	return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetComputeRunningProcesses_v3, unsigned *count, struct nvml_process *list)
{
	unsigned room, n;

	CHECK(count);
	room = list ? *count : 0;
	n = board_processes(device, list, room);
	*count = n;
	return n > room ? NVML_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetComputeRunningProcesses_v2, unsigned *count, struct nvml_process *list)
{
	return nvmlDeviceGetComputeRunningProcesses_v3(device, count, list);
}

DEVICE_CALL(nvmlDeviceGetGraphicsRunningProcesses_v3, unsigned *count, struct nvml_process *list)
{
	CHECK(count);
	(void)list;
	*count = 0;
	return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetGspFirmwareVersion, char *text)
{
	const struct emu_board *b = board_get();

	CHECK(text);
	snprintf(text, 32, "%u.%u.%02u", b->driver[0], b->driver[1], b->driver[2]);
	return NVML_SUCCESS;
}

/* Sensors that tools ask for on every line they print: a clear "not supported" keeps the line. */
#define NO_SENSOR(name)                    \
	DEVICE_CALL(name, void *out)       \
	{                                  \
		CHECK(out);                \
		return NVML_NOT_SUPPORTED; \
	}
NO_SENSOR(nvmlDeviceGetPowerUsage)
NO_SENSOR(nvmlDeviceGetEnforcedPowerLimit)
NO_SENSOR(nvmlDeviceGetFanSpeed)
NO_SENSOR(nvmlDeviceGetPerformanceState)

DEVICE_CALL(nvmlDeviceGetTemperature, int sensor, unsigned *celsius)
{
	CHECK(celsius);
	(void)sensor;
	return NVML_NOT_SUPPORTED;
}

/* Cards behind one bridge, without NVLink. */
DEVICE_CALL(nvmlDeviceGetTopologyCommonAncestor, nvml_device_t other, unsigned *level)
{
	CHECK(level);
	if (board_check(other))
		return board_check(other);
	*level = other == device ? 0 : 30;
	return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetNvLinkState, unsigned link, unsigned *active)
{
	CHECK(active);
	(void)link;
	return NVML_NOT_SUPPORTED;
}
