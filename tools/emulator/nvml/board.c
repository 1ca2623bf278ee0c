/* board.c - see nvml.h. The board is the server's memory, so most questions are answered without asking it. */
#include "../guards.h"
#include "nvml.h"
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const struct emu_board *board;
static unsigned users; /* nvmlInit counts, like the real one */

/* Utilisation is the share of time that channels executed since the last look, at least SPAN_NS ago. */
enum { SPAN_NS = 20000000 };
static struct {
	uint64_t at_ns, busy_ns;
	unsigned percent;
} last[EMU_GPUS];

nvml_return_t board_open(void)
{
	void *at = MAP_FAILED;
	int fd;

	LOCKED(&lock);
	if (!board) {
		fd = open("/dev/nvidia-emu-board", O_RDONLY | O_CLOEXEC);
		if (fd >= 0) {
			at = mmap(NULL, sizeof *board, PROT_READ, MAP_SHARED, fd, 0);
			close(fd);
		}
		board = at == MAP_FAILED ? NULL : at;
	}
	users += board != NULL;
	return board ? NVML_SUCCESS : NVML_DRIVER_NOT_LOADED;
}

/* The mapping stays: handles that a program kept must not point nowhere. */
void board_close(void)
{
	LOCKED(&lock);
	users -= users > 0;
}

const struct emu_board *board_get(void)
{
	return __atomic_load_n(&users, __ATOMIC_ACQUIRE) ? board : NULL;
}

unsigned board_index(nvml_device_t device)
{
	return (unsigned)(device - board->gpu);
}

nvml_return_t board_check(nvml_device_t device)
{
	if (!board_get())
		return NVML_UNINITIALIZED;
	if (device < board->gpu || device >= board->gpu + board->gpus)
		return NVML_INVALID_ARGUMENT;
	return __atomic_load_n(&device->lost, __ATOMIC_SEQ_CST) ? NVML_GPU_IS_LOST : NVML_SUCCESS;
}

static uint64_t newer(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}

/* A channel accounts when it leaves the engine; the stretch it is in right now is added here. */
static uint64_t busy_until(nvml_device_t device, uint64_t now)
{
	uint64_t sum = __atomic_load_n(&device->busy_ns, __ATOMIC_RELAXED), since;

	for (unsigned i = 0; i < EMU_CHANNELS; i++) {
		const struct emu_channel *c = &board->channel[i];

		if (!__atomic_load_n(&c->cid, __ATOMIC_ACQUIRE) || c->gpu != board_index(device))
			continue;
		sum += __atomic_load_n(&c->busy_ns, __ATOMIC_RELAXED);
		since = newer(__atomic_load_n(&c->granted_ns, __ATOMIC_RELAXED),
		              __atomic_load_n(&c->stopped_ns, __ATOMIC_RELAXED));
		if (__atomic_load_n(&c->active, __ATOMIC_ACQUIRE) && now > since)
			sum += now - since;
	}
	return sum;
}

static void look(nvml_device_t device, uint64_t now)
{
	unsigned i = board_index(device);
	uint64_t busy_ns = busy_until(device, now), span_ns = now - last[i].at_ns, used_ns;

	used_ns = busy_ns > last[i].busy_ns ? busy_ns - last[i].busy_ns : 0;
	last[i].percent = used_ns >= span_ns ? 100 : (unsigned)(used_ns * 100 / span_ns);
	last[i].at_ns = now;
	last[i].busy_ns = busy_ns;
}

unsigned board_utilization(nvml_device_t device)
{
	struct timespec span = {0, SPAN_NS};
	unsigned i = board_index(device);

	LOCKED(&lock);
	if (!last[i].at_ns) { /* a program that asks once must not be told about all time */
		look(device, now_ns());
		nanosleep(&span, NULL);
	}
	if (now_ns() - last[i].at_ns >= SPAN_NS)
		look(device, now_ns());
	return last[i].percent;
}

unsigned board_processes(nvml_device_t device, struct nvml_process *out, unsigned room)
{
	int fd = open("/dev/nvidia-emu-procs", O_RDONLY | O_CLOEXEC);
	FILE *lines = fd < 0 ? NULL : fdopen(fd, "r");
	unsigned long long bytes;
	unsigned gpu, pid, n = 0;

	while (lines && fscanf(lines, "%u %u %llu", &gpu, &pid, &bytes) == 3) {
		if (gpu != board_index(device))
			continue;
		if (n < room)
			out[n] = (struct nvml_process){pid, bytes, ~0u, ~0u};
		n++;
	}
	if (lines)
		fclose(lines);
	return n;
}

void board_uuid(nvml_device_t device, char *text, size_t size)
{
	const uint8_t *u = device->uuid;

	snprintf(text, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0],
	         u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14],
	         u[15]);
}

void board_pci(nvml_device_t device, struct nvml_pci *out)
{
	uint32_t id = device->gpu_id;

	*out = (struct nvml_pci){.domain = id >> 16,
	                         .bus = id >> 8 & 0xFF,
	                         .device = id & 0xFF,
	                         .pci_device_id = 0x233010de,
	                         .subsystem_id = 0x16c110de};
	snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", out->domain, out->bus, out->device);
	snprintf(out->legacy_bus_id, sizeof out->legacy_bus_id, "%04X:%02X:%02X.0", out->domain & 0xFFFF,
	         out->bus, out->device);
}

nvml_return_t board_text(char *out, unsigned size, const char *text)
{
	if (!out)
		return NVML_INVALID_ARGUMENT;
	if (strlen(text) >= size)
		return NVML_INSUFFICIENT_SIZE;
	memcpy(out, text, strlen(text) + 1);
	return NVML_SUCCESS;
}
