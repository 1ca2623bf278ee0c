/*
 * alloc.c - RM_ALLOC: which class may stand below which, what its parameters ask for, and what the
 * firmware is told (K/rmapi/alloc_free.c). The caller's paramsSize is ignored; parameters go back
 * on success only. Everything here holds the API lock to write; classes that the firmware knows
 * about also hold every GPU lock for one round trip.
 */
#include "server.h"
#include <string.h>

/* Where an allocation stands: filled by the checks, used by the makers. */
struct making {
	struct call *call;
	struct client *client;
	struct object *parent;
	uint32_t handle, cls;
	char *params; /* NULL: the caller gave none */
	struct object *out;
};

static uint32_t new_below(struct making *m)
{
	return object_new(m->client, &m->handle, m->cls, m->parent, &m->out);
}

static struct object *sibling(const struct making *m, uint32_t handle)
{
	return handle ? find_object(m->client->handle, handle) : NULL;
}

/* The caller must hold a fd of that GPU's node, wherever it came from (K/gpu/device.c). */
static uint32_t make_device(struct making *m)
{
	struct nv0080_alloc p = {0};
	uint32_t status;

	REFUSE_IF(m->parent->cls != NV01_ROOT_CLIENT, NV_ERR_INVALID_OBJECT_PARENT);
	if (m->params)
		memcpy(&p, m->params, sizeof p);
	REFUSE_IF(p.deviceId >= S.gpus, NV_ERR_INVALID_CLASS);
	REFUSE_IF(!(m->call->head.nodes & (1ull << S.gpu[p.deviceId].board->minor)),
	          NV_ERR_INSUFFICIENT_PERMISSIONS);
	REFUSE_IF(load(&S.gpu[p.deviceId].board->lost), NV_ERR_GPU_IS_LOST);
	status = new_below(m);
	if (status == NV_OK)
		m->out->gpu = &S.gpu[p.deviceId];
	return status;
}

static uint32_t make_subdevice(struct making *m)
{
	struct object *o;

	REFUSE_IF(m->parent->cls != NV01_DEVICE_0, NV_ERR_INVALID_OBJECT_PARENT);
	TAILQ_FOREACH(o, &m->client->objects, in_client)
		if (o->cls == NV20_SUBDEVICE_0 && o->parent == m->parent)
			return NV_ERR_INVALID_STATE; /* one per instance and device */
	return new_below(m);
}

static uint32_t make_tsg(struct making *m)
{
	struct nv_channel_group_alloc p;
	uint32_t status;

	REFUSE_IF(m->parent->cls != NV01_DEVICE_0, NV_ERR_INVALID_OBJECT_PARENT);
	REFUSE_IF(!m->params, NV_ERR_INVALID_ARGUMENT);
	memcpy(&p, m->params, sizeof p);
	status = new_below(m);
	if (status)
		return status;
	object_depends(m->out, sibling(m, p.hVASpace));
	m->out->tsg = tsg_new(m->parent->gpu, p.engineType);
	return m->out->tsg ? NV_OK : NV_ERR_NO_MEMORY;
}

static uint32_t make_context_share(struct making *m)
{
	struct nv_ctxshare_alloc p = {0};
	uint32_t status;

	REFUSE_IF(m->parent->cls != KEPLER_CHANNEL_GROUP_A, NV_ERR_INVALID_OBJECT_PARENT);
	if (m->params)
		memcpy(&p, m->params, sizeof p);
	status = new_below(m);
	if (status == NV_OK)
		object_depends(m->out, sibling(m, p.hVASpace));
	return status;
}

/* A channel below a device gets a hidden TSG of its own. The engine of a channel in a TSG is the
 * TSG's. */
static uint32_t make_channel(struct making *m)
{
	struct nv_channel_alloc p = {0};
	struct channel *ch;
	struct tsg *hidden = NULL, *t;
	uint32_t status, size = nv_class_params(m->cls, load(&S.board->driver[0]));

	REFUSE_IF(m->parent->cls != KEPLER_CHANNEL_GROUP_A && m->parent->cls != NV01_DEVICE_0,
	          NV_ERR_INVALID_OBJECT_PARENT);
	REFUSE_IF(!m->params, NV_ERR_INVALID_ARGUMENT);
	memcpy(&p, m->params, size);
	status = new_below(m);
	if (status)
		return status;
	t = m->parent->tsg;
	if (!t)
		t = hidden = tsg_new(m->parent->gpu, p.engineType);
	object_depends(m->out, sibling(m, p.hVASpace));
	object_depends(m->out, sibling(m, p.hContextShare));
	ch = t ? channel_new(t, m->out, p.engineType ? p.engineType : t->engine, m->client->pid) : NULL;
	if (hidden)
		tsg_put(hidden); /* the channel holds it now */
	REFUSE_IF(!ch, NV_ERR_NO_MEMORY);
	m->out->channel = ch;
	p.cid = ch->cid;
	memcpy(m->params, &p, size);
	return NV_OK;
}

static uint32_t make_memory(struct making *m)
{
	struct nv_memory_alloc p = {0};
	uint32_t status, size = nv_class_params(m->cls, load(&S.board->driver[0]));
	bool on_card = m->cls == NV01_MEMORY_LOCAL_USER;

	REFUSE_IF(m->parent->cls != NV01_DEVICE_0 && m->parent->cls != NV20_SUBDEVICE_0,
	          NV_ERR_INVALID_OBJECT_PARENT);
	REFUSE_IF(!m->params, NV_ERR_INVALID_ARGUMENT);
	memcpy(&p, m->params, size);
	REFUSE_IF(!p.size, NV_ERR_INVALID_ARGUMENT);
	status = new_below(m);
	if (status)
		return status;
	m->out->memory = memory_new(on_card ? m->parent->gpu : NULL, p.size);
	REFUSE_IF(!m->out->memory, NV_ERR_NO_MEMORY);
	p.limit = p.size - 1;
	memcpy(m->params, &p, size);
	return NV_OK;
}

/* Objects that have no life of their own here: engines on a channel, VA spaces, usermode doorbells,
 * events. */
static uint32_t make_plain(struct making *m)
{
	bool on_engine = NV_CLASS_IS_COMPUTE(m->cls) || NV_CLASS_IS_COPY(m->cls);

	REFUSE_IF(on_engine && !m->parent->channel, NV_ERR_INVALID_OBJECT_PARENT);
	return new_below(m);
}

static const struct kind {
	uint32_t cls;
	uint32_t (*make)(struct making *);
	bool firmware; /* costs a round trip under every GPU lock */
} kinds[] = {
        {NV01_DEVICE_0, make_device, true},
        {NV20_SUBDEVICE_0, make_subdevice, true},
        {KEPLER_CHANNEL_GROUP_A, make_tsg, true},
        {FERMI_CONTEXT_SHARE_A, make_context_share, true},
        {NV01_MEMORY_SYSTEM, make_memory, false},
        {NV01_MEMORY_LOCAL_USER, make_memory, false},
        {FERMI_VASPACE_A, make_plain, false},
        {0x05, make_plain, false},   /* NV01_EVENT */
        {0x79, make_plain, false},   /* NV01_EVENT_OS_EVENT */
        {0x83DE, make_plain, false}, /* debugger */
        {0xC361, make_plain, false}, /* usermode doorbell pages, Volta to Hopper */
        {0xC461, make_plain, false},
        {0xC561, make_plain, false},
        {0xC661, make_plain, false},
};
static const struct kind channel_kind = {0, make_channel, true};
static const struct kind engine_kind = {0, make_plain, true};

static const struct kind *kind_of(uint32_t cls)
{
	for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
		if (cls == kinds[i].cls)
			return &kinds[i];
	if (NV_CLASS_IS_GPFIFO(cls))
		return &channel_kind;
	if (NV_CLASS_IS_COMPUTE(cls) || NV_CLASS_IS_COPY(cls))
		return &engine_kind;
	tally_unknown(TALLY_CLASS, cls);
	return NULL;
}

static uint32_t alloc_client(struct call *c, struct nvos64_alloc *a)
{
	struct client *client;
	uint32_t status;

	state_lock();
	status = client_new(c, a->hObjectNew, &client);
	if (status == NV_OK)
		a->hObjectNew = client->handle;
	state_unlock();
	a->hClass = NV01_ROOT_CLIENT;
	return status;
}

static uint32_t make(struct call *c, struct nvos64_alloc *a, const struct kind *kind)
{
	struct making m = {.call = c, .handle = a->hObjectNew, .cls = a->hClass};
	uint32_t status = NV_ERR_INVALID_CLIENT;

	m.params = c->head.params_size ? c->params : NULL;
	state_lock();
	m.client = find_client(a->hRoot);
	if (m.client && file_may_use(c->file, m.client)) {
		m.parent = find_object(a->hRoot, a->hObjectParent);
		status = m.parent ? kind->make(&m) : NV_ERR_INVALID_OBJECT_PARENT;
	}
	if (status && m.out)
		object_free(m.out);
	state_unlock();
	if (status == NV_OK) {
		a->hObjectNew = m.handle;
		c->params_out = c->head.params_size;
	}
	return status;
}

static uint64_t memory_cost_ns(const struct call *c)
{
	const struct nv_memory_alloc *p = (const struct nv_memory_alloc *)(const void *)c->params;
	uint64_t size = c->head.params_size > offsetof(struct nv_memory_alloc, size) ? p->size : 0;

	return (uint64_t)knob(K_alloc_us) + (uint64_t)knob(K_alloc_mib_us) * (size >> 20);
}

uint32_t rm_alloc(struct call *c, struct nvos64_alloc *a)
{
	bool is_root =
	        a->hClass == NV01_ROOT || a->hClass == NV01_ROOT_NON_PRIV || a->hClass == NV01_ROOT_CLIENT;
	const struct kind *kind = is_root ? NULL : kind_of(a->hClass);
	struct fault_hit fault;

	if (a->flags & NVOS64_FLAGS_FINN_SERIALIZED) {
		tally_unknown(TALLY_CLASS, a->hClass);
		return NV_ERR_NOT_SUPPORTED;
	}
	REFUSE_IF(!is_root && !kind, NV_ERR_INVALID_CLASS);
	fault = fault_at("alloc", c, NULL);
	if (fault.has_status)
		return fault.status;
	SCOPED struct scope scope = api_enter(API_WRITE);
	if (is_root)
		return alloc_client(c, a);
	if (kind->firmware) {
		gpus_enter(&scope, all_gpus());
		scope_sleep(&scope, (uint64_t)knob(K_rpc_us));
	}
	if (kind->make == make_memory)
		scope_sleep(&scope, memory_cost_ns(c));
	return make(c, a, kind);
}

static uint32_t free_object(struct call *c, const struct nvos00_free *a, bool *was_memory)
{
	LOCKED(&S.state);
	struct client *client = find_client(a->hRoot);
	REFUSE_IF(!client || !file_may_use(c->file, client), NV_ERR_INVALID_CLIENT);
	struct object *o = find_object(a->hRoot, a->hObjectOld);
	REFUSE_IF(!o, NV_ERR_OBJECT_NOT_FOUND);
	*was_memory = o->memory != NULL;
	object_free(o);
	return NV_OK;
}

uint32_t rm_free(struct call *c, struct nvos00_free *a)
{
	struct fault_hit fault = fault_at("free", c, NULL);
	bool was_memory = false;

	REFUSE_IF(fault.has_status, fault.status);
	SCOPED struct scope scope = api_enter(API_WRITE);
	uint32_t status = free_object(c, a, &was_memory);
	if (was_memory)
		scope_sleep(&scope, (uint64_t)knob(K_free_us));
	return status;
}
