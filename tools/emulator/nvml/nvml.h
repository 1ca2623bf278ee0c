/*
 * nvml.h - the part of NVIDIA's management library that node tools ask for, over the emulated board. Types restate
 * nvml.h of the CUDA toolkit as nvidia-ml-py declares them. board.c knows where figures come from, system.c and
 * device.c answer the calls. What is not here is not exported: nvidia-ml-py then says "function not found".
 */
#ifndef VALVE_EMU_NVML_H
#define VALVE_EMU_NVML_H

#include "../emu.h"
#include <stdbool.h>
#include <stddef.h>

/* Declares and opens the definition of an exported call. */
#define NVML_CALL(name, ...)                                                    \
	__attribute__((visibility("default"))) nvml_return_t name(__VA_ARGS__); \
	nvml_return_t name(__VA_ARGS__)

enum nvml_return {
	NVML_SUCCESS = 0,
	NVML_UNINITIALIZED = 1,
	NVML_INVALID_ARGUMENT = 2,
	NVML_NOT_SUPPORTED = 3,
	NVML_NOT_FOUND = 6,
	NVML_INSUFFICIENT_SIZE = 7,
	NVML_DRIVER_NOT_LOADED = 9,
	NVML_GPU_IS_LOST = 15,
	NVML_UNKNOWN = 999,
};
typedef int nvml_return_t;
typedef const struct emu_gpu *nvml_device_t;

struct nvml_memory {
	unsigned long long total, free, used;
};
struct nvml_memory_v2 {
	unsigned version;
	unsigned long long total, reserved, free, used;
};
struct nvml_utilization {
	unsigned gpu, memory; /* percent */
};
struct nvml_process {
	unsigned pid;
	unsigned long long used_bytes;
	unsigned gpu_instance, compute_instance; /* ~0: no MIG */
};
struct nvml_pci {
	char legacy_bus_id[16];
	unsigned domain, bus, device, pci_device_id, subsystem_id;
	char bus_id[32];
};
_Static_assert(sizeof(struct nvml_process) == 24, "process");
_Static_assert(sizeof(struct nvml_pci) == 68, "pci");

/* board.c */
nvml_return_t board_open(void);
void board_close(void);
const struct emu_board *board_get(void); /* NULL before nvmlInit */
nvml_return_t board_check(nvml_device_t device);
unsigned board_index(nvml_device_t device);
unsigned board_utilization(nvml_device_t device);
/* Fills up to room entries and returns how many there are. */
unsigned board_processes(nvml_device_t device, struct nvml_process *out, unsigned room);
nvml_return_t board_text(char *out, unsigned size, const char *text); /* an answer in words */
void board_uuid(nvml_device_t device, char *text, size_t size);       /* "GPU-..." */
void board_pci(nvml_device_t device, struct nvml_pci *out);

#endif
