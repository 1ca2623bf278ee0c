/*
 * rm.c - the Resource Manager by raw ioctl: version, cards, an RM client of our own. All cold except rm_control.
 *
 * One root client per GPU and issuing thread: RM holds a client's write lock for a whole control, so that a shared
 * client would serialise GPUs even on a driver that would not (serverControl, resserv/src/rs_server.c).
 */
#include "internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VERSION_QUERY '2' /* answer with the version and check nothing (kernel-open/common/inc/nv-ioctl.h) */
#define GID_BINARY    2u  /* ctrl2080gpu.h, GET_GID_INFO_FLAGS_FORMAT: the 16 bytes that UVM uses */
#define CARDS         32u

static const struct nv_branch branches[] = {NV_BRANCH_TABLE};

static int call(const struct valve_os *os, int fd, uint32_t nr, void *argument, uint32_t bytes)
{
	int rc;

	/* The driver takes its power lock interruptibly before it does anything (nvidia_ioctl,
	 * kernel-open/nvidia/nv.c): EINTR means not done. */
	do {
		rc = os->ioctl(fd, NV_IOWR(nr, bytes), argument);
	} while (rc < 0 && errno == EINTR);
	return rc < 0 ? -errno : 0;
}

int rm_control(const struct valve_os *os, const struct rm_client *client, uint32_t h_object, uint32_t cmd,
               void *params, uint32_t bytes)
{
	struct nvos54_control control = {
	        .hClient = client->h_client,
	        .hObject = h_object,
	        .cmd = cmd,
	        .params = (uint64_t)(uintptr_t)params,
	        .paramsSize = bytes,
	};
	int rc = call(os, client->ctl, NV_ESC_RM_CONTROL, &control, sizeof control);

	return rc ? rc : (int)control.status;
}

static int alloc(const struct valve_os *os, struct rm_client *client, uint32_t parent, uint32_t class,
                 void *params, uint32_t bytes, uint32_t *handle)
{
	struct nvos21_alloc request = {
	        .hRoot = client->h_client,
	        .hObjectParent = parent,
	        .hClass = class,
	        .pAllocParms = (uint64_t)(uintptr_t)params,
	        .paramsSize = bytes,
	};
	int rc = call(os, client->ctl, NV_ESC_RM_ALLOC, &request, sizeof request);

	*handle = request.hObjectNew; /* 0 in: RM picks */
	return rc ? rc : (int)request.status;
}

int rm_read_version(const struct valve_os *os, char version[64])
{
	struct nv_ioctl_rm_api_version query = {.cmd = VERSION_QUERY};
	int fd = os->open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	int rc;

	version[0] = 0;
	if (fd < 0)
		return -errno;
	rc = call(os, fd, NV_ESC_CHECK_VERSION_STR, &query, sizeof query);
	close(fd);
	if (rc == 0) {
		memcpy(version, query.versionString, 64);
		version[63] = 0;
	}
	return rc;
}

/* The layout run that a version belongs to, or NULL for a driver that was not looked at. */
const struct nv_branch *rm_branch(const char *version)
{
	unsigned long number = strtoul(version, NULL, 10);

	if (number < NV_BRANCH_FIRST || number > NV_BRANCH_LAST)
		return NULL;
	for (size_t i = sizeof branches / sizeof *branches; i-- > 0;) {
		if (number >= branches[i].first)
			return &branches[i];
	}
	return NULL;
}

static int by_bus(const void *a, const void *b)
{
	const struct valve_gpu_info *x = a, *y = b;
	uint64_t left = (uint64_t)x->domain << 16 | (uint64_t)x->bus << 8 | x->slot;
	uint64_t right = (uint64_t)y->domain << 16 | (uint64_t)y->bus << 8 | y->slot;

	return left < right ? -1 : left > right;
}

/* All cards in NVML's order, which is that of the PCI bus. */
int rm_list_cards(const struct valve_os *os, struct valve_gpu_info *out, uint32_t max, uint32_t *count)
{
	struct nv_ioctl_card_info cards[CARDS];
	int fd = os->open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	int rc;

	*count = 0;
	if (fd < 0)
		return -errno;
	memset(cards, 0, sizeof cards);
	rc = call(os, fd, NV_ESC_CARD_INFO, cards, sizeof cards);
	if (rc == 0) {
		for (uint32_t i = 0; i < CARDS && *count < max; i++) {
			if (!cards[i].valid)
				continue;
			out[(*count)++] = (struct valve_gpu_info){
			        .minor = cards[i].minor_number,
			        .gpu_id = cards[i].gpu_id,
			        .device_instance = i,
			        .domain = cards[i].domain,
			        .bus = cards[i].bus,
			        .slot = cards[i].slot,
			};
		}
	}
	close(fd);
	qsort(out, *count, sizeof *out, by_bus);
	return rc;
}

static int open_objects(const struct valve_os *os, struct valve_gpu_info *info, struct rm_client *client)
{
	struct nv0000_gpu_id_info id = {.gpuId = info->gpu_id};
	struct nv0080_alloc device = {0};
	struct nv2080_alloc subdevice = {0};
	struct nv2080_gpu_gid_info gid = {.flags = GID_BINARY};
	int rc = alloc(os, client, 0, NV01_ROOT_CLIENT, NULL, 0, &client->h_client);

	if (rc)
		return rc;
	rc = rm_control(os, client, client->h_client, NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2, &id, sizeof id);
	if (rc)
		return rc;
	info->device_instance = id.deviceInstance;
	device.deviceId = id.deviceInstance;
	device.hClientShare = client->h_client; /* 0 would attach us to the global address space */
	rc = alloc(os, client, client->h_client, NV01_DEVICE_0, &device, sizeof device, &client->h_device);
	if (rc)
		return rc;
	rc = alloc(os, client, client->h_device, NV20_SUBDEVICE_0, &subdevice, sizeof subdevice,
	           &client->h_subdevice);
	if (rc)
		return rc;
	if (rm_control(os, client, client->h_subdevice, NV2080_CTRL_CMD_GPU_GET_GID_INFO, &gid, sizeof gid) ==
	    0)
		memcpy(info->uuid, gid.data,
		       sizeof info->uuid); /* else all zero: device_instance still names it */
	return 0;
}

/* Do these still mean something to the driver? A control that needs nothing but them, and changes nothing. */
bool rm_speaks(const struct valve_os *os, int fd, uint32_t h_client, uint32_t h_subdevice)
{
	struct nv2080_gpu_gid_info gid = {.flags = GID_BINARY};
	struct rm_client as = {.ctl = fd, .h_client = h_client};

	return fd >= 0 &&
	       rm_control(os, &as, h_subdevice, NV2080_CTRL_CMD_GPU_GET_GID_INFO, &gid, sizeof gid) == 0;
}

/* The node of the GPU must stay open beside the client: RM gives a device only to a process that has it open, else
 * 0x1B (deviceConstruct, gpu/device.c), and an open node keeps the device instance from changing. */
int rm_open(const struct valve_os *os, struct valve_gpu_info *info, struct rm_client *out)
{
	struct rm_client client = {.ctl = -1, .node = -1};
	char path[32];
	int rc;

	*out = client;
	snprintf(path, sizeof path, "/dev/nvidia%u", info->minor);
	client.ctl = os->open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	client.node = os->open(path, O_RDWR | O_CLOEXEC);
	rc = client.ctl < 0 || client.node < 0 ? -errno : open_objects(os, info, &client);
	if (rc) {
		rm_close(os, &client);
		return rc;
	}
	*out = client;
	return 0;
}

void rm_close(const struct valve_os *os, struct rm_client *client)
{
	struct nvos00_free request = {.hRoot = client->h_client, .hObjectOld = client->h_client};

	if (client->ctl >= 0 && client->h_client)
		call(os, client->ctl, NV_ESC_RM_FREE, &request, sizeof request);
	if (client->node >= 0)
		close(client->node);
	if (client->ctl >= 0)
		close(client->ctl);
	*client = (struct rm_client){.ctl = -1, .node = -1};
}

/* Disable or enable (lists->bDisable) up to 64 channels, in the name of a client and on its subdevice of their GPU. */
int rm_switch(const struct valve_os *os, int fd, uint32_t h_client, uint32_t h_subdevice,
              struct nv2080_fifo_disable_channels *lists)
{
	struct rm_client as = {.ctl = fd, .h_client = h_client};

	return rm_control(os, &as, h_subdevice, NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS, lists, sizeof *lists);
}

/* Set the time slice of a channel group, and ask for it: only what the driver says counts. The call takes the API lock to
 * write and all GPU locks, and puts the group off for a moment: at registration only. */
int rm_slice(const struct valve_os *os, int fd, uint32_t h_client, uint32_t h_tsg, uint32_t us)
{
	struct rm_client as = {.ctl = fd, .h_client = h_client};
	struct nva06c_timeslice slice = {.timesliceUs = us};
	int rc = rm_control(os, &as, h_tsg, NVA06C_CTRL_CMD_SET_TIMESLICE, &slice, sizeof slice);

	slice.timesliceUs = 0;
	if (rc == 0)
		rc = rm_control(os, &as, h_tsg, NVA06C_CTRL_CMD_GET_TIMESLICE, &slice, sizeof slice);
	return rc ? rc : slice.timesliceUs == us ? 0 : -ERANGE;
}

/* The driver's own number of a channel, also of a foreign one: the control resolves foreign pairs without asking
 * (kernel_fifo_ctrl.c, QueryChannelUniqueId). It takes the API lock in write mode: at registration only. */
int rm_unique_id(const struct valve_os *os, const struct rm_client *client, uint32_t h_client,
                 uint32_t h_channel, uint32_t *cid)
{
	struct nv2080_fifo_channel_unique_id query;
	int rc;

	memset(&query, 0, sizeof query);
	query.hClients[0] = h_client;
	query.hChannels[0] = h_channel;
	query.numChannels = 1;
	rc = rm_control(os, client, client->h_subdevice, NV2080_CTRL_CMD_FIFO_QUERY_CHANNEL_UNIQUE_ID, &query,
	                sizeof query);
	*cid = query.channelUniqueIDs[0];
	return rc;
}

/* A channel that is no longer there, as opposed to one that could not be switched. ENOTTY and EBADF: the passed fd
 * was taken away because its process ended. */
bool rm_is_stale(int status)
{
	return status == -ENOTTY || status == -EBADF || NV_STATUS_IS_STALE(status);
}
