/*
 * dup.c - RM_DUP_OBJECT and RM_SHARE (K/rmapi/sharing.c). Memory, VA spaces and TSGs can be
 * duplicated, channels cannot. By default only clients of the same process may; an owner can widen
 * that to one client, one user or all.
 */
#include "server.h"

static bool policy_allows(const struct share *s, const struct object *o, const struct client *to)
{
	switch (s->type) {
	case RS_SHARE_ALL:
		return true;
	case RS_SHARE_OS_TOKEN:
		return o->client->uid == to->uid;
	case RS_SHARE_CLIENT:
		return s->target == to->handle;
	case RS_SHARE_PID:
		return o->client->pid == to->pid;
	default:
		return false;
	}
}

bool may_dup(const struct object *o, const struct client *to)
{
	if (o->client->pid == to->pid)
		return true;
	for (size_t i = 0; i < sizeof o->shares / sizeof o->shares[0]; i++)
		if (policy_allows(&o->shares[i], o, to))
			return true;
	return false;
}

static bool can_copy(const struct object *o)
{
	return o->memory || o->cls == FERMI_VASPACE_A || o->cls == KEPLER_CHANNEL_GROUP_A;
}

static uint32_t dup_to(struct client *to, const struct object *source, struct nvos55_dup *a)
{
	struct object *parent = find_object(a->hClient, a->hParent), *o;
	uint32_t status;

	REFUSE_IF(!parent || (parent->cls != NV01_DEVICE_0 && parent->cls != NV20_SUBDEVICE_0),
	          NV_ERR_INVALID_OBJECT_PARENT);
	REFUSE_IF(source->gpu != parent->gpu, NV_ERR_INVALID_DEVICE);
	status = object_new(to, &a->hObject, source->cls, parent, &o);
	if (status)
		return status;
	o->memory = source->memory;
	o->tsg = source->tsg;
	if (o->memory)
		o->memory->refs++;
	if (o->tsg)
		o->tsg->refs++;
	return NV_OK;
}

uint32_t rm_dup(struct call *c, struct nvos55_dup *a)
{
	SCOPED struct scope scope = api_enter(API_WRITE);

	gpus_enter(&scope, all_gpus());
	LOCKED(&S.state);
	struct client *to = find_client(a->hClient);
	struct object *source = find_object(a->hClientSrc, a->hObjectSrc);
	REFUSE_IF(!to || !file_may_use(c->file, to), NV_ERR_INVALID_CLIENT);
	REFUSE_IF(!source, NV_ERR_OBJECT_NOT_FOUND);
	REFUSE_IF(!can_copy(source), NV_ERR_INVALID_ARGUMENT);
	REFUSE_IF(!may_dup(source, to), NV_ERR_INSUFFICIENT_PERMISSIONS);
	return dup_to(to, source, a);
}

static uint32_t add_share(struct object *o, const struct rs_share_policy *p)
{
	REFUSE_IF(p->type > RS_SHARE_PID || !(p->accessMask & RS_ACCESS_DUP_OBJECT), NV_ERR_INVALID_ARGUMENT);
	for (size_t i = 0; i < sizeof o->shares / sizeof o->shares[0]; i++) {
		struct share *s = &o->shares[i];

		if (p->action & RS_SHARE_ACTION_REVOKE) {
			if (s->type == p->type && s->target == p->target)
				*s = (struct share){0};
		} else if (s->type == RS_SHARE_NONE) {
			*s = (struct share){p->type, p->target};
			return NV_OK;
		}
	}
	return p->action & RS_SHARE_ACTION_REVOKE ? NV_OK : NV_ERR_NO_MEMORY;
}

uint32_t rm_share(struct call *c, struct nvos57_share *a)
{
	SCOPED struct scope scope = api_enter(API_WRITE);

	LOCKED(&S.state);
	struct client *owner = find_client(a->hClient);
	REFUSE_IF(!owner || !file_may_use(c->file, owner), NV_ERR_INVALID_CLIENT);
	struct object *o = find_object(a->hClient, a->hObject);
	return o ? add_share(o, &a->policy) : NV_ERR_OBJECT_NOT_FOUND;
}
