/* device.c - which GPUs there are and what they say about themselves. An emulated H100 unless the board says else. */
#include "memory.h"
#include "rm.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct device *device_at(CUdevice dev)
{
	return dev >= 0 && dev < emu.devices ? &emu.device[dev] : NULL;
}

CUresult device_of(CUdevice handle, struct device **out)
{
	TRY(driver_check());
	*out = device_at(handle);
	return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

/* Fills what the RM knows; false when this process may not have the card (its node cannot be opened). */
static bool open_device(struct device *dev, const struct nv_ioctl_card_info *card)
{
	char path[32];
	struct nv_ioctl_register_fd link = {emu.ctl};
	struct nv0000_gpu_id_info id = {.gpuId = card->gpu_id};
	struct nv0080_alloc device = {.hClientShare = emu.h_client};
	struct nv2080_alloc subdevice = {0};
	struct nv2080_gpu_gid_info gid = {.flags = 2};

	snprintf(path, sizeof(path), "/dev/nvidia%u", card->minor_number);
	dev->fd = open(path, O_RDWR | O_CLOEXEC);
	if (dev->fd < 0)
		return false;
	rm_escape(dev->fd, NV_ESC_REGISTER_FD, &link, sizeof(link));
	dev->minor = card->minor_number;
	dev->gpu_id = card->gpu_id;
	dev->domain = card->domain;
	dev->bus = card->bus;
	dev->slot = card->slot;
	if (rm_control(emu.h_client, NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2, &id, sizeof(id)))
		return false;
	dev->instance = id.deviceInstance;
	device.deviceId = id.deviceInstance;
	dev->h_device = rm_new_handle();
	dev->h_subdevice = rm_new_handle();
	if (rm_alloc(RM_NVOS21, emu.h_client, dev->h_device, NV01_DEVICE_0, &device, sizeof(device)) ||
	    rm_alloc(RM_NVOS64, dev->h_device, dev->h_subdevice, NV20_SUBDEVICE_0, &subdevice,
	             sizeof(subdevice)) ||
	    rm_control(dev->h_subdevice, NV2080_CTRL_CMD_GPU_GET_GID_INFO, &gid, sizeof(gid)))
		return false;
	memcpy(dev->uuid, gid.data, sizeof(dev->uuid));
	for (uint32_t i = 0; i < emu.board->gpus; i++)
		if (!memcmp(emu.board->gpu[i].uuid, dev->uuid, sizeof(dev->uuid)))
			dev->board = &emu.board->gpu[i];
	return dev->board != NULL;
}

/* CUDA_VISIBLE_DEVICES by index or "GPU-<uuid prefix>"; the list ends at the first entry that names no card. */
static bool is_named(const char *entry, size_t length, unsigned index, const uint8_t *uuid)
{
	char text[48];
	char *end;

	if (length > 4 && !strncmp(entry, "GPU-", 4)) {
		int n = snprintf(text, sizeof(text), "GPU-");
		for (int i = 0; i < 16; i++)
			n += snprintf(text + n, sizeof(text) - (size_t)n, "%s%02x",
			              i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
		return length <= strlen(text) && !strncmp(entry, text, length);
	}
	return strtoul(entry, &end, 10) == index && end != entry;
}

static void select_visible(const struct device *all, unsigned count)
{
	const char *list = getenv("CUDA_VISIBLE_DEVICES");

	if (!list) {
		memcpy(emu.device, all, count * sizeof(*all));
		emu.devices = (int)count;
	}
	while (list && *list && emu.devices < MAX_DEVICES) {
		size_t length = strcspn(list, ",");
		unsigned i = 0;
		while (i < count && !is_named(list, length, i, all[i].uuid))
			i++;
		if (i == count)
			break;
		emu.device[emu.devices++] = all[i];
		list += length + (list[length] == ',');
	}
	for (int i = 0; i < emu.devices; i++)
		emu.device[i].ordinal = i;
}

CUresult devices_open(void)
{
	struct nv_ioctl_card_info cards[32] = {0};
	struct device all[MAX_DEVICES] = {0};
	unsigned count = 0;

	REFUSE_IF(rm_escape(emu.ctl, NV_ESC_CARD_INFO, cards, sizeof(cards)), CUDA_ERROR_NO_DEVICE);
	for (unsigned i = 0; i < 32 && count < MAX_DEVICES; i++)
		if (cards[i].valid && open_device(&all[count], &cards[i]))
			count++;
	select_visible(all, count);
	return emu.devices ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

#define DEVICE_OR_RETURN(dev, handle, out)       \
	struct device *dev;                      \
	TRY(driver_check());                     \
	if (!(out))                              \
		return CUDA_ERROR_INVALID_VALUE; \
	TRY(device_of(handle, &dev))

CUAPI(2000, cuDeviceGet, CUdevice *out, int ordinal)
{
	DEVICE_OR_RETURN(dev, ordinal, out);
	*out = dev->ordinal;
	return CUDA_SUCCESS;
}

CUAPI(2000, cuDeviceGetCount, int *out)
{
	TRY(driver_check());
	REFUSE_IF(!out, CUDA_ERROR_INVALID_VALUE);
	*out = emu.devices;
	return CUDA_SUCCESS;
}

CUAPI(2000, cuDeviceGetName, char *out, int length, CUdevice handle)
{
	DEVICE_OR_RETURN(dev, handle, out);
	REFUSE_IF(length <= 0, CUDA_ERROR_INVALID_VALUE);
	snprintf(out, (size_t)length, "%s", dev->board->name);
	return CUDA_SUCCESS;
}

CUAPI(11040, cuDeviceGetUuid_v2, CUuuid *out, CUdevice handle)
{
	DEVICE_OR_RETURN(dev, handle, out);
	memcpy(out->bytes, dev->uuid, sizeof(out->bytes));
	return CUDA_SUCCESS;
}

CUAPI(9020, cuDeviceGetUuid, CUuuid *out, CUdevice handle)
{
	return cuDeviceGetUuid_v2(out, handle);
}

CUAPI(3020, cuDeviceTotalMem_v2, size_t *out, CUdevice handle)
{
	DEVICE_OR_RETURN(dev, handle, out);
	*out = dev->board->total_bytes;
	return CUDA_SUCCESS;
}

CUAPI(4010, cuDeviceGetPCIBusId, char *out, int length, CUdevice handle)
{
	DEVICE_OR_RETURN(dev, handle, out);
	REFUSE_IF(length < 13, CUDA_ERROR_INVALID_VALUE);
	snprintf(out, (size_t)length, "%04X:%02X:%02X.0", dev->domain, dev->bus, dev->slot);
	return CUDA_SUCCESS;
}

CUAPI(4010, cuDeviceGetByPCIBusId, CUdevice *out, const char *text)
{
	unsigned domain = 0, bus = 0, slot = 0;

	TRY(driver_check());
	REFUSE_IF(!out || !text, CUDA_ERROR_INVALID_VALUE);
	REFUSE_IF(sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3, CUDA_ERROR_INVALID_VALUE);
	for (int i = 0; i < emu.devices; i++) {
		const struct device *dev = &emu.device[i];
		if (dev->domain == domain && dev->bus == bus && dev->slot == slot) {
			*out = i;
			return CUDA_SUCCESS;
		}
	}
	return CUDA_ERROR_INVALID_DEVICE;
}

CUAPI(4000, cuDeviceCanAccessPeer, int *out, CUdevice handle, CUdevice peer)
{
	DEVICE_OR_RETURN(dev, handle, out);
	REFUSE_IF(!device_at(peer), CUDA_ERROR_INVALID_DEVICE);
	*out = dev->ordinal != peer;
	return CUDA_SUCCESS;
}

CUAPI(8000, cuDeviceGetP2PAttribute, int *out, int attribute, CUdevice handle, CUdevice peer)
{
	DEVICE_OR_RETURN(dev, handle, out);
	REFUSE_IF(!device_at(peer) || dev->ordinal == peer, CUDA_ERROR_INVALID_DEVICE);
	*out = attribute == 2; /* access supported; no rank, no native atomics, no array access */
	return CUDA_SUCCESS;
}

/* An H100's numbers by CUdevice_attribute; what is not listed is 0. */
static const struct {
	int id, value;
} attributes[] = {
        {1, 1024},        {2, 1024},    {3, 1024},     {4, 64},    {5, 2147483647},  {6, 65535},
        {7, 65535},       {8, 49152},   {9, 65536},    {10, 32},   {11, 2147483647}, {12, 65536},
        {13, 1980000},    {14, 512},    {15, 1},       {16, 132},  {19, 1},          {31, 1},
        {32, 1},          {35, 0},      {36, 2619000}, {37, 5120}, {38, 52428800},   {39, 2048},
        {40, 3},          {41, 1},      {75, 9},       {76, 0},    {78, 1},          {79, 1},
        {80, 1},          {81, 233472}, {82, 65536},   {83, 0},    {87, 2},          {90, 1},
        {91, 1},          {92, 1},      {93, 1},       {94, 1},    {95, 1},          {97, 232448},
        {98, 1},          {99, 1},      {102, 1},      {103, 1},   {106, 32},        {108, 32768000},
        {109, 134213632}, {111, 1024},  {115, 1},      {119, 1},   {120, 1},         {122, 1},
        {123, 1},         {124, 1},     {126, 4},      {131, -1},  {134, 0},
};

CUAPI(2000, cuDeviceGetAttribute, int *out, int attribute, CUdevice handle)
{
	DEVICE_OR_RETURN(dev, handle, out);
	REFUSE_IF(attribute <= 0 || attribute > 200, CUDA_ERROR_INVALID_VALUE);
	*out = 0;
	if (attribute == 33)
		*out = (int)dev->bus;
	if (attribute == 34)
		*out = (int)dev->slot;
	if (attribute == 50)
		*out = (int)dev->domain;
	for (size_t i = 0; i < sizeof(attributes) / sizeof(attributes[0]); i++)
		if (attributes[i].id == attribute)
			*out = attributes[i].value;
	return CUDA_SUCCESS;
}

CUAPI(2000, cuDeviceComputeCapability, int *major, int *minor, CUdevice handle)
{
	CUresult result = cuDeviceGetAttribute(major, 75, handle);

	return result ? result : cuDeviceGetAttribute(minor, 76, handle);
}
