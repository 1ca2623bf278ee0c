/* rm.c - see rm.h */
#include "rm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { CARDS = 32, MINORS = 32 };

static int plain_ioctl(int fd, unsigned long request, void *arg)
{
	return ioctl(fd, request, arg);
}
int (*rm_ioctl)(int fd, unsigned long request, void *arg) = plain_ioctl;

static struct rm_result call(int fd, uint32_t request, void *arg)
{
	struct rm_result r = {0};
	uint64_t start = now_ns();
	int code;

	/* The driver's power lock is taken interruptibly before anything is done: EINTR means not done. */
	while ((code = rm_ioctl(fd, request, arg)) && errno == EINTR) {
	}
	r.ns = now_ns() - start;
	r.err = code ? errno : 0;
	return r;
}

struct rm_result rm_alloc(int fd, uint32_t root, uint32_t parent, uint32_t cls, void *params, uint32_t bytes,
                          uint32_t *handle)
{
	struct nvos21_alloc a = {root, parent, 0, cls, (uint64_t)(uintptr_t)params, bytes, 0};
	struct rm_result r = call(fd, NV_IOWR(NV_ESC_RM_ALLOC, sizeof(a)), &a);

	r.status = a.status;
	*handle = a.hObjectNew;
	return r;
}

struct rm_result rm_control(int fd, uint32_t client, uint32_t object, uint32_t cmd, void *params,
                            uint32_t bytes)
{
	struct nvos54_control c = {client, object, cmd, 0, (uint64_t)(uintptr_t)params, bytes, 0};
	struct rm_result r = call(fd, NV_IOWR(NV_ESC_RM_CONTROL, sizeof(c)), &c);

	r.status = c.status;
	return r;
}

struct rm_result rm_free(int fd, uint32_t root, uint32_t object)
{
	struct nvos00_free f = {root, root, object, 0};
	struct rm_result r = call(fd, NV_IOWR(NV_ESC_RM_FREE, sizeof(f)), &f);

	r.status = f.status;
	return r;
}

bool rm_good(struct rm_result r)
{
	return r.err == 0 && r.status == NV_OK;
}

/* A container may show any one node. */
static struct rm_result open_node(struct rm_client *c, bool with_node)
{
	uint64_t start = now_ns();
	char path[32];

	for (uint32_t minor = 0; minor < MINORS; minor++) {
		snprintf(path, sizeof(path), "/dev/nvidia%u", minor);
		c->minor = minor;
		if (with_node)
			c->node = open(path, O_RDWR | O_CLOEXEC);
		if (with_node ? c->node >= 0 : access(path, F_OK) == 0)
			return (struct rm_result){.ns = now_ns() - start};
	}
	return (struct rm_result){.err = ENODEV, .ns = now_ns() - start};
}

/* By the node's minor; where a sandbox numbers its nodes anew, the only card there is. */
static struct rm_result find_card(struct rm_client *c)
{
	struct nv_ioctl_card_info card[CARDS];
	const struct nv_ioctl_card_info *ours = NULL, *any = NULL;
	unsigned cards = 0;

	memset(card, 0, sizeof(card));
	struct rm_result r = call(c->ctl, NV_IOWR(NV_ESC_CARD_INFO, sizeof(card)), card);
	for (int i = 0; rm_good(r) && i < CARDS; i++) {
		if (!card[i].valid)
			continue;
		any = &card[i];
		cards++;
		if (card[i].minor_number == c->minor)
			ours = &card[i];
	}
	if (!ours && cards == 1)
		ours = any;
	if (ours)
		c->gpu_id = ours->gpu_id;
	else if (rm_good(r))
		r.err = ENODEV;
	return r;
}

static struct rm_result open_ctl(struct rm_client *c)
{
	uint64_t start = now_ns();

	c->ctl = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	return (struct rm_result){.err = c->ctl < 0 ? errno : 0, .ns = now_ns() - start};
}

static struct rm_result find_instance(struct rm_client *c)
{
	struct nv0000_gpu_id_info id = {.gpuId = c->gpu_id};
	struct rm_result r =
	        rm_control(c->ctl, c->client, c->client, NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2, &id, sizeof(id));

	c->instance = id.deviceInstance;
	return r;
}

static struct rm_result open_device(struct rm_client *c)
{
	/* hClientShare is our own client: 0 would attach to the global address space. */
	struct nv0080_alloc device = {.deviceId = c->instance, .hClientShare = c->client};

	return rm_alloc(c->ctl, c->client, c->client, NV01_DEVICE_0, &device, sizeof(device), &c->device);
}

static struct rm_result open_subdevice(struct rm_client *c)
{
	struct nv2080_alloc subdevice = {0};

	return rm_alloc(c->ctl, c->client, c->device, NV20_SUBDEVICE_0, &subdevice, sizeof(subdevice),
	                &c->subdevice);
}

int rm_open(struct rm_client *c, bool with_node, struct rm_step step[RM_STEPS])
{
	static const char *const names[RM_STEPS] = {"open ctl",       "open node", "card info",
	                                            "alloc root",     "id info",   "alloc device",
	                                            "alloc subdevice"};

	*c = (struct rm_client){.ctl = -1, .node = -1};
	for (int i = 0; i < RM_STEPS; i++)
		step[i] = (struct rm_step){names[i], {.err = -1}};
	for (int i = 0; i < RM_STEPS; i++) {
		struct rm_result *r = &step[i].result;
		if (i == 0)
			*r = open_ctl(c);
		else if (i == 1)
			*r = open_node(c, with_node);
		else if (i == 2)
			*r = find_card(c);
		else if (i == 3)
			*r = rm_alloc(c->ctl, 0, 0, NV01_ROOT_CLIENT, NULL, 0, &c->client);
		else if (i == 4)
			*r = find_instance(c);
		else if (i == 5)
			*r = open_device(c);
		else
			*r = open_subdevice(c);
		if (!rm_good(*r))
			return -1;
	}
	return 0;
}

void rm_close(struct rm_client *c)
{
	if (c->ctl >= 0 && c->client)
		rm_free(c->ctl, c->client, c->client);
	if (c->node >= 0)
		close(c->node);
	if (c->ctl >= 0)
		close(c->ctl);
	c->ctl = c->node = -1;
}

/* The compute TSG: its engine is GR0 to GR7. Where no engine was seen, a compute object on one of its channels decides. */
static bool in_compute_tsg(const struct table *table, uint32_t count, const struct table_channel *c)
{
	if (c->engine)
		return NV_ENGINE_IS_GR(c->engine);
	for (uint32_t i = 0; i < count; i++) {
		const struct table_channel *other = &table->channel[i];
		if (other->live == LIVE && other->client == c->client && other->compute &&
		    (other == c || (c->tsg && other->tsg == c->tsg)))
			return true;
	}
	return false;
}

/* All channels of a TSG go together: the hardware preempts a TSG as one unit. */
uint32_t rm_pairs(const struct table *table, enum rm_select select, uint32_t only_client, rm_list *out)
{
	uint32_t count = atomic_load(&table->channels);

	memset(out, 0, sizeof(*out));
	for (uint32_t i = 0;
	     i < count && i < TABLE_CHANNELS && out->numChannels < NV2080_DISABLE_CHANNELS_MAX; i++) {
		const struct table_channel *c = &table->channel[i];
		if (atomic_load(&c->live) != LIVE || (only_client && c->client != only_client))
			continue;
		if (select != SELECT_ALL && !in_compute_tsg(table, count, c))
			continue;
		out->hClientList[out->numChannels] = c->client;
		out->hChannelList[out->numChannels++] = c->channel;
		if (select == SELECT_ONE)
			break;
	}
	return out->numChannels;
}

struct rm_result rm_switch(int fd, uint32_t client, uint32_t subdevice, rm_list *list, bool off)
{
	list->bDisable = off;
	list->bRewindGpPut = 0;         /* would drop queued work */
	list->pRunlistPreemptEvent = 0; /* null is the synchronous form */
	return rm_control(fd, client, subdevice, NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS, list, sizeof(*list));
}
