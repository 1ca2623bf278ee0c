/* fake_rm.c - see fake_rm.h. A file is a memfd; its number names it, as the struct file does in the driver. */
#include "fake_rm.h"

#include "nvrm.h"
#include "words.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

enum { OBJECTS = 16384, CLIENT_BASE = 0xC1D00000 };

struct object {
	uint32_t h_client, handle, class, gpu, cid, off;
	ino_t file;           /* clients: the file that owns them */
	uint32_t is_workload; /* clients: made by fake_client */
};

struct fake_rules fake_rules;
struct fake_counts fake_counts;
static struct object objects[OBJECTS];
static uint32_t object_count, next_client, next_handle, next_cid;
static const uint32_t *watched;
static void (*hook)(int point);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void fake_reset(void)
{
	memset(objects, 0, sizeof objects);
	memset(&fake_counts, 0, sizeof fake_counts);
	memset(&fake_rules, 0, sizeof fake_rules);
	snprintf(fake_rules.version, sizeof fake_rules.version, "580.159.04");
	fake_rules.gpus = 2;
	object_count = 0;
	next_client = CLIENT_BASE;
	next_handle = 0xCAF00000;
	next_cid = 100;
	watched = NULL;
	hook = NULL;
}

static struct object *find(uint32_t h_client, uint32_t handle)
{
	for (uint32_t i = 0; i < object_count; i++) {
		if (objects[i].handle == handle && objects[i].h_client == h_client && handle)
			return &objects[i];
	}
	return NULL;
}

static struct object *put(uint32_t h_client, uint32_t handle, uint32_t class, uint32_t gpu)
{
	struct object *object = NULL;

	for (uint32_t i = 0; i < object_count && !object; i++)
		object = objects[i].handle ? NULL : &objects[i];
	if (!object && object_count == OBJECTS)
		abort();
	if (!object)
		object = &objects[object_count++];
	*object = (struct object){.h_client = h_client, .handle = handle, .class = class, .gpu = gpu};
	return object;
}

static ino_t file_of(int fd)
{
	struct stat st;

	return fstat(fd, &st) == 0 ? st.st_ino : 0;
}

static int fake_open(const char *path, int flags)
{
	unsigned minor;

	(void)flags;
	if (sscanf(path, "/dev/nvidia%u", &minor) == 1 && minor >= fake_rules.gpus) {
		errno = ENOENT;
		return -1;
	}
	__atomic_add_fetch(&fake_counts.open_files, 1, __ATOMIC_RELAXED);
	return memfd_create(path, MFD_CLOEXEC);
}

static uint32_t alloc(int fd, struct nvos21_alloc *request)
{
	struct object *parent;

	if (request->hClass == NV01_ROOT_CLIENT) {
		request->hObjectNew = next_client++;
		put(request->hObjectNew, request->hObjectNew, request->hClass, 0)->file = file_of(fd);
		fake_counts.clients++;
		return NV_OK;
	}
	if (request->hClass == NV01_DEVICE_0 && fake_rules.fail_clients)
		return fake_rules.fail_clients;
	parent = find(request->hRoot, request->hRoot);
	if (!parent || parent->file != file_of(fd))
		return NV_ERR_INVALID_CLIENT;
	parent = find(request->hRoot, request->hObjectParent);
	if (!parent)
		return NV_ERR_INVALID_OBJECT_PARENT;
	request->hObjectNew = next_handle++;
	put(request->hRoot, request->hObjectNew, request->hClass,
	    request->hClass == NV01_DEVICE_0
	            ? ((struct nv0080_alloc *)(uintptr_t)request->pAllocParms)->deviceId
	            : parent->gpu);
	return NV_OK;
}

static void remove_client(uint32_t h_client)
{
	for (uint32_t i = 0; i < object_count; i++) {
		if (objects[i].h_client == h_client)
			objects[i] = (struct object){0};
	}
	fake_counts.clients--;
}

/* The status to refuse with, if this call is to be refused. */
static uint32_t refusal(uint32_t status)
{
	if (!status || !fake_rules.fail_times)
		return status;
	if (--fake_rules.fail_times == 0)
		fake_rules.fail_disable = fake_rules.fail_enable = fake_rules.fail_query = 0;
	return status;
}

static uint32_t refuse_after(struct nv2080_fifo_disable_channels *lists, uint32_t status)
{
	for (uint32_t i = 0; i < lists->numChannels && i < fake_rules.fail_after; i++) {
		struct object *channel = find(lists->hClientList[i], lists->hChannelList[i]);

		if (channel)
			channel->off = lists->bDisable;
	}
	return status;
}

/* One possible rule for a bad pair: those before it have taken effect, those after it have not. */
static uint32_t switch_channels(const struct nvos54_control *control,
                                struct nv2080_fifo_disable_channels *lists, const struct object *subdevice)
{
	uint32_t refused;

	if (lists->numChannels > fake_counts.largest)
		fake_counts.largest = lists->numChannels;
	refused = refusal(lists->bDisable ? fake_rules.fail_disable : fake_rules.fail_enable);
	if (refused)
		return refuse_after(lists, refused);
	for (uint32_t i = 0; i < lists->numChannels; i++) {
		struct object *channel = find(lists->hClientList[i], lists->hChannelList[i]);

		if (!channel)
			return NV_ERR_OBJECT_NOT_FOUND;
		if (fake_rules.deny_foreign && lists->hClientList[i] != control->hClient)
			return fake_rules.deny_foreign;
		if (fake_rules.deny_client && lists->hClientList[i] == fake_rules.deny_client)
			return NV_ERR_INVALID_STATE;
		if (channel->gpu != subdevice->gpu)
			return NV_ERR_INVALID_CHANNEL;
		channel->off = lists->bDisable;
	}
	return NV_OK;
}

static uint32_t control(int fd, struct nvos54_control *call)
{
	void *params = (void *)(uintptr_t)call->params;
	struct object *client = find(call->hClient, call->hClient), *object;

	if (!client || client->file != file_of(fd))
		return NV_ERR_INVALID_CLIENT;
	object = find(call->hClient, call->hObject);
	if (!object)
		return NV_ERR_INVALID_OBJECT_HANDLE;
	switch (call->cmd) {
	case NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2: {
		struct nv0000_gpu_id_info *info = params;

		info->deviceInstance = (info->gpuId >> 8) - 1;
		return call->paramsSize == sizeof *info ? NV_OK : NV_ERR_INVALID_ARGUMENT;
	}
	case NV2080_CTRL_CMD_GPU_GET_GID_INFO: {
		struct nv2080_gpu_gid_info *gid = params;

		memset(gid->data, 0x40 + (int)object->gpu, 16);
		return call->paramsSize == sizeof *gid ? NV_OK : NV_ERR_INVALID_ARGUMENT;
	}
	case NV2080_CTRL_CMD_FIFO_QUERY_CHANNEL_UNIQUE_ID: {
		struct nv2080_fifo_channel_unique_id *query = params;
		struct object *channel = find(query->hClients[0], query->hChannels[0]);
		uint32_t refused = refusal(fake_rules.fail_query);

		fake_counts.queries++;
		if (refused)
			return refused;
		if (call->paramsSize != sizeof *query)
			return NV_ERR_INVALID_ARGUMENT;
		query->channelUniqueIDs[0] = channel ? channel->cid : 0;
		return channel ? NV_OK : NV_ERR_OBJECT_NOT_FOUND;
	}
	case NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS:
		if (call->paramsSize != sizeof(struct nv2080_fifo_disable_channels) ||
		    object->class != NV20_SUBDEVICE_0)
			return NV_ERR_INVALID_ARGUMENT;
		return switch_channels(call, params, object);
	default:
		return NV_ERR_NOT_SUPPORTED;
	}
}

static bool passes(void)
{
	uint32_t left = load_relaxed(&fake_rules.passes);

	while (left && !__atomic_compare_exchange_n(&fake_rules.passes, &left, left - 1, false,
	                                            __ATOMIC_RELAXED, __ATOMIC_RELAXED))
		;
	return left;
}

static void hang_while(const uint32_t *rule)
{
	__atomic_add_fetch(&fake_counts.hanging, 1, __ATOMIC_RELAXED);
	while (load_relaxed(rule) && !(rule == &fake_rules.hang_enable && passes()))
		sleep_ns(100000);
	__atomic_sub_fetch(&fake_counts.hanging, 1, __ATOMIC_RELAXED);
}

/* Outside the lock: what a switch costs, and hangs. */
static void before_switch(const struct nvos54_control *call)
{
	const struct nv2080_fifo_disable_channels *lists = (const void *)(uintptr_t)call->params;
	const uint32_t *hang = &fake_rules.hang;

	if (call->cmd == NV2080_CTRL_CMD_FIFO_QUERY_CHANNEL_UNIQUE_ID)
		hang_while(&fake_rules.hang_query);
	if (call->cmd != NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS)
		return;
	__atomic_add_fetch(lists->bDisable ? &fake_counts.disables : &fake_counts.enables, 1,
	                   __ATOMIC_RELAXED);
	if (lists->bDisable && load_relaxed(&fake_rules.forget_at) &&
	    !__atomic_sub_fetch(&fake_rules.forget_at, 1, __ATOMIC_RELAXED))
		fake_forget_openers();
	if (load_relaxed(&fake_rules.work_us))
		sleep_ns(1000ull * load_relaxed(&fake_rules.work_us));
	if (!lists->bDisable)
		hang = &fake_rules.hang_enable;
	else if (load_relaxed(&watched) && load_relaxed(load_relaxed(&watched)) % 2)
		__atomic_add_fetch(&fake_counts.gate_words, 1, __ATOMIC_RELAXED);
	hang_while(hang);
}

static void list_cards(struct nv_ioctl_card_info *cards)
{
	for (uint32_t i = 0; i < fake_rules.gpus; i++) {
		cards[i].valid = 1;
		cards[i].bus = (uint8_t)(i + 1);
		cards[i].gpu_id = (i + 1) << 8;
		cards[i].minor_number = i;
	}
}

static int fake_ioctl(int fd, unsigned long request, void *argument)
{
	uint32_t interrupts = load_relaxed(&fake_rules.interrupts);
	char link[64], name[11];

	if (interrupts) {
		store_relaxed(&fake_rules.interrupts, interrupts - 1);
		errno = EINTR;
		return -1;
	}
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	if (readlink(link, name, sizeof name) < 11 || strncmp(name, "/memfd:/dev", 11) != 0) {
		errno = ENOTTY;
		return -1;
	}
	if (NV_IOC_NR(request) == NV_ESC_RM_CONTROL)
		before_switch(argument);
	pthread_mutex_lock(&lock);
	switch (NV_IOC_NR(request)) {
	case NV_ESC_CHECK_VERSION_STR:
		memcpy(((struct nv_ioctl_rm_api_version *)argument)->versionString, fake_rules.version, 64);
		break;
	case NV_ESC_CARD_INFO:
		list_cards(argument);
		break;
	case NV_ESC_RM_ALLOC:
		((struct nvos21_alloc *)argument)->status = alloc(fd, argument);
		break;
	case NV_ESC_RM_CONTROL:
		((struct nvos54_control *)argument)->status = control(fd, argument);
		break;
	case NV_ESC_RM_FREE:
		remove_client(((struct nvos00_free *)argument)->hRoot);
		break;
	}
	pthread_mutex_unlock(&lock);
	return 0;
}

static void between(int point)
{
	if (hook)
		hook(point);
}

static const struct valve_os fake_os = {fake_open, fake_ioctl, between};

uint32_t fake_client(int *fd, uint32_t *h_subdevice, uint32_t gpu)
{
	uint32_t h_client;

	*fd = memfd_create("/dev/nvidiactl", MFD_CLOEXEC);
	pthread_mutex_lock(&lock);
	h_client = next_client++;
	*h_subdevice = next_handle++;
	put(h_client, h_client, NV01_ROOT_CLIENT, 0)->file = file_of(*fd);
	find(h_client, h_client)->is_workload = 1;
	put(h_client, *h_subdevice, NV20_SUBDEVICE_0, gpu);
	fake_counts.clients++;
	pthread_mutex_unlock(&lock);
	return h_client;
}

uint32_t fake_channel(uint32_t h_client, uint32_t h_channel, uint32_t gpu)
{
	struct object *channel;
	uint32_t cid;

	pthread_mutex_lock(&lock);
	channel = put(h_client, h_channel, HOPPER_CHANNEL_GPFIFO_A, gpu);
	cid = channel->cid = next_cid++;
	pthread_mutex_unlock(&lock);
	return cid;
}

void fake_free_channel(uint32_t h_client, uint32_t h_channel)
{
	pthread_mutex_lock(&lock);
	*find(h_client, h_channel) = (struct object){0};
	pthread_mutex_unlock(&lock);
}

int fake_is_on(uint32_t h_client, uint32_t h_channel)
{
	struct object *channel;
	int on;

	pthread_mutex_lock(&lock);
	channel = find(h_client, h_channel);
	on = channel ? !channel->off : -1;
	pthread_mutex_unlock(&lock);
	return on;
}

void fake_switch(uint32_t h_client, uint32_t h_channel, int on)
{
	pthread_mutex_lock(&lock);
	find(h_client, h_channel)->off = !on;
	pthread_mutex_unlock(&lock);
}

uint32_t fake_off_count(void)
{
	uint32_t count = 0;

	pthread_mutex_lock(&lock);
	for (uint32_t i = 0; i < object_count; i++)
		count += objects[i].handle && objects[i].off;
	pthread_mutex_unlock(&lock);
	return count;
}

void fake_refuse_enables(uint32_t times)
{
	pthread_mutex_lock(&lock);
	fake_rules.fail_enable = times ? NV_ERR_TIMEOUT : 0;
	fake_rules.fail_times = times;
	pthread_mutex_unlock(&lock);
}

void fake_forget_openers(void)
{
	pthread_mutex_lock(&lock);
	for (uint32_t i = 0; i < object_count; i++) {
		const struct object *client = &objects[i];

		if (client->handle && client->class == NV01_ROOT_CLIENT && !client->is_workload)
			remove_client(client->h_client);
	}
	pthread_mutex_unlock(&lock);
}

void fake_watch_word(const uint32_t *word)
{
	store_relaxed(&watched, word);
}

void fake_set_between(void (*between_hook)(int point))
{
	hook = between_hook;
}

const void *fake_machine(void)
{
	return &fake_os;
}
