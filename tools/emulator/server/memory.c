/*
 * memory.c - physical memory. A piece lives until the last object, dup, export and UVM mapping of
 * it is gone, which is what lets a process without any CUDA context own GPU memory by holding an
 * exported fd (K/mem_mgr/video_mem.c).
 */
#include "server.h"
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct memory *memory_new(struct gpu *gpu, uint64_t size)
{
	struct memory *m;

	if (gpu && size > gpu->board->total_bytes - gpu->board->used_bytes)
		return NULL;
	m = calloc(1, sizeof *m);
	if (!m)
		return NULL;
	*m = (struct memory){1, gpu, size, -1, ++S.next_memory};
	if (gpu)
		gpu->board->used_bytes += size;
	return m;
}

void memory_put(struct memory *m)
{
	if (--m->refs)
		return;
	if (m->gpu)
		m->gpu->board->used_bytes -= m->size;
	if (m->memfd >= 0)
		close(m->memfd);
	free(m);
}

int memory_fd(struct memory *m)
{
	if (m->memfd < 0) {
		m->memfd = memfd_create("valve-emu-memory", MFD_CLOEXEC);
		if (m->memfd >= 0 && ftruncate(m->memfd, (off_t)m->size)) {
			close(m->memfd);
			m->memfd = -1;
		}
	}
	return m->memfd < 0 ? -1 : fcntl(m->memfd, F_DUPFD_CLOEXEC, 0);
}

/* The target of an export is a fresh control file: no clients, nothing exported yet
 * (U/rmobjexportimport.c). */
static bool is_empty_target(const struct file *f)
{
	struct client *c;

	if (!f || f->kind != EMU_CTL || f->has_export)
		return false;
	TAILQ_FOREACH(c, &S.clients, link)
		if (c->file == f)
			return false;
	return true;
}

uint32_t export_object(struct control *k)
{
	struct nv0000_export_object_to_fd *p = k->params;
	struct file *target = k->call->other;
	struct object *o;
	uint32_t status = NV_OK;

	if (p->type != 1 || !target)
		return NV_ERR_INVALID_ARGUMENT;
	state_lock();
	o = find_object(k->client->handle, p->hObject);
	if (!o || !o->memory)
		status = NV_ERR_INVALID_OBJECT_HANDLE;
	else if (!is_empty_target(target))
		status = NV_ERR_INVALID_ARGUMENT;
	else {
		o->memory->refs++;
		target->exported = o->memory;
		target->has_export = true;
	}
	state_unlock();
	return status;
}

/* Possession of the fd is the authority: no process or user is compared. */
uint32_t import_object(struct control *k)
{
	struct nv0000_import_object_from_fd *p = k->params;
	struct object *parent, *o;
	struct memory *m;
	uint32_t status;

	state_lock();
	m = k->call->other ? k->call->other->exported : NULL;
	parent = find_object(k->client->handle, p->hParent);
	if (!m)
		status = NV_ERR_OBJECT_NOT_FOUND;
	else if (!parent || (parent->cls != NV01_DEVICE_0 && parent->cls != NV20_SUBDEVICE_0))
		status = NV_ERR_INVALID_OBJECT_PARENT;
	else if (m->gpu && m->gpu != parent->gpu)
		status = NV_ERR_INVALID_DEVICE;
	else
		status = object_new(k->client, &p->hObject,
		                    m->gpu ? NV01_MEMORY_LOCAL_USER : NV01_MEMORY_SYSTEM, parent, &o);
	if (status == NV_OK) {
		o->memory = m;
		m->refs++;
	}
	state_unlock();
	return status;
}

uint32_t export_info(struct control *k)
{
	struct nv0000_export_object_info *p = k->params;
	struct memory *m;

	state_lock();
	m = k->call->other ? k->call->other->exported : NULL;
	if (m) {
		p->deviceInstance = m->gpu ? m->gpu->board->device_instance : 0;
		p->maxObjects = 1;
		memset(p->metadata, 0, sizeof p->metadata);
	}
	state_unlock();
	return m ? NV_OK : NV_ERR_OBJECT_NOT_FOUND;
}
