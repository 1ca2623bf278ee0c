/*
 * uvm_range.c - external ranges: reserved addresses into which RM memory is mapped piece by piece.
 * Mapping over a mapped piece replaces it and cuts what it only touches; unmapping leaves a hole
 * that faults; sparse reads zeros. A cut must fall on a page boundary of what it cuts: 2 MiB in large
 * pieces of the card's memory. Whatever changes here has changed the pages of the process that
 * owns the uvm file when the call returns. Called with the va_space lock held, so one file's
 * changes come one after another.
 */
#include "server.h"
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SPARSE_ALIGN = 64 * 1024, PAGE = 4096, LARGE_PAGE = 2 << 20 };

static bool is_inside(const struct range *r, uint64_t base, uint64_t length)
{
	return length && base >= r->base && length <= r->length && base - r->base <= r->length - length;
}

static struct range *find_range(const struct vaspace *v, uint64_t base, uint64_t length)
{
	struct range *r;

	TAILQ_FOREACH(r, &v->ranges, link)
		if (is_inside(r, base, length))
			return r;
	return NULL;
}

static void drop_mapping(struct range *r, struct mapping *m)
{
	TAILQ_REMOVE(&r->mappings, m, link);
	if (m->memory)
		memory_put(m->memory);
	free(m);
}

static void insert_mapping(struct range *r, struct mapping *m)
{
	struct mapping *at;

	TAILQ_FOREACH(at, &r->mappings, link)
		if (at->base > m->base)
			break;
	if (at)
		TAILQ_INSERT_BEFORE(at, m, link);
	else
		TAILQ_INSERT_TAIL(&r->mappings, m, link);
}

static struct mapping *new_mapping(uint64_t base, uint64_t length, uint64_t offset, struct memory *memory)
{
	struct mapping *m = calloc(1, sizeof *m);

	if (!m)
		abort(); /* a tool for tests: half a page table would be worse than none */
	*m = (struct mapping){.base = base, .length = length, .offset = offset, .memory = memory};
	if (memory)
		memory->refs++;
	return m;
}

static uint64_t page_size(const struct mapping *m)
{
	if (!m->memory)
		return SPARSE_ALIGN;
	return m->memory->gpu && m->memory->size >= LARGE_PAGE ? LARGE_PAGE : PAGE;
}

static bool cuts_a_page(const struct mapping *m, uint64_t at)
{
	return at > m->base && at < m->base + m->length && at % page_size(m);
}

/* Whether taking [base, base + length) out would cut through a page; *n: how many mappings it meets. */
static bool is_cuttable(const struct range *r, uint64_t base, uint64_t length, uint64_t *n)
{
	const struct mapping *m;

	*n = 0;
	TAILQ_FOREACH(m, &r->mappings, link) {
		if (m->base + m->length <= base || m->base >= base + length)
			continue;
		if (cuts_a_page(m, base) || cuts_a_page(m, base + length))
			return false;
		*n += 1;
	}
	return true;
}

/* Takes [base, base + length) out of whatever is mapped there; pieces at both ends stay. */
static void cut(struct range *r, uint64_t base, uint64_t length)
{
	uint64_t end = base + length;
	struct mapping *m, *next;

	for (m = TAILQ_FIRST(&r->mappings); m; m = next) {
		uint64_t m_end = m->base + m->length;

		next = TAILQ_NEXT(m, link);
		if (m_end <= base || m->base >= end)
			continue;
		if (m_end > end)
			insert_mapping(r,
			               new_mapping(end, m_end - end, m->offset + (end - m->base), m->memory));
		if (m->base < base)
			m->length = base - m->base;
		else
			drop_mapping(r, m);
	}
}

enum { OWNER_WAIT_MS = 20, OWNER_WAITS = 250 };

/* Whether the change with that number is done. A process that stands still (SIGSTOP, freezer) cannot look at its pages,
 * so the driver's call returns at once: the change is made before anything else when it goes on. */
static bool owner_answers(const struct vaspace *v, uint32_t seq)
{
	struct pollfd answer = {.fd = v->pages, .events = POLLIN};
	uint32_t answered = seq - 1;

	for (int waits = 0; waits < OWNER_WAITS && answered != seq;) {
		if (poll(&answer, 1, OWNER_WAIT_MS) == 0) {
			waits++;
			if (process_stands(v->owner))
				return false;
		} else if (recv(v->pages, &answered, sizeof answered, 0) <= 0)
			return true; /* gone: no process sees these pages */
	}
	return answered == seq;
}

/* The owner is another process: its page thread changes the mapping and answers the number. */
static void send_page_op(struct vaspace *v, struct emu_page_op *op, int memfd)
{
	op->seq = ++v->page_seq;
	if (v->pages < 0 || send_with_fd(v->pages, op, sizeof *op, memfd))
		return;
	if (!owner_answers(v, op->seq))
		kernel_log("process %d stands still: its pages change when it goes on", v->owner);
}

static void change_pages(struct call *c, enum emu_page_kind kind, uint64_t base, uint64_t length,
                         uint64_t offset, struct memory *memory)
{
	struct emu_page_op op = {kind, 0, base, length, offset};
	int memfd;

	state_lock();
	memfd = memory ? memory_fd(memory) : -1;
	state_unlock();
	if (c->pid == c->file->uvm->owner) {
		c->page = op;
		c->memfd = memfd;
		return;
	}
	send_page_op(c->file->uvm, &op, memfd);
	if (memfd >= 0)
		close(memfd);
}

uint32_t range_create(struct call *c)
{
	struct uvm_range *p = (struct uvm_range *)c->arg;
	struct vaspace *v = c->file->uvm;
	struct range *r;

	REFUSE_IF(!p->length || p->base % PAGE || p->length % PAGE || p->base + p->length < p->base,
	          NV_ERR_INVALID_ADDRESS);
	TAILQ_FOREACH(r, &v->ranges, link)
		REFUSE_IF(p->base < r->base + r->length && r->base < p->base + p->length,
		          NV_ERR_UVM_ADDRESS_IN_USE);
	r = calloc(1, sizeof *r);
	REFUSE_IF(!r, NV_ERR_NO_MEMORY);
	r->base = p->base;
	r->length = p->length;
	TAILQ_INIT(&r->mappings);
	TAILQ_INSERT_TAIL(&v->ranges, r, link);
	return NV_OK;
}

static void range_drop(struct vaspace *v, struct range *r)
{
	state_lock();
	while (!TAILQ_EMPTY(&r->mappings))
		drop_mapping(r, TAILQ_FIRST(&r->mappings));
	state_unlock();
	TAILQ_REMOVE(&v->ranges, r, link);
	free(r);
}

uint32_t range_free(struct call *c)
{
	struct uvm_range *p = (struct uvm_range *)c->arg;
	struct range *r = find_range(c->file->uvm, p->base, p->length ? p->length : 1);

	REFUSE_IF(!r || r->base != p->base || (p->length && p->length != r->length), NV_ERR_INVALID_ADDRESS);
	change_pages(c, EMU_PAGE_HOLE, r->base, r->length, 0, NULL);
	range_drop(c->file->uvm, r);
	return NV_OK;
}

static uint64_t locked_ns(void)
{
	uint64_t all = (uint64_t)knob(K_map_us), locked = (uint64_t)knob(K_map_locked_us);

	return locked < all ? locked : all;
}

/* UVM duplicates the memory into its own client: API lock to write, every GPU lock; page tables
 * come after that. */
static struct memory *hold_memory(struct call *c, const struct uvm_map_external_tail *t, uint32_t *status)
{
	SCOPED struct scope scope = api_enter(API_WRITE);
	struct memory *m = NULL;
	struct object *o;

	gpus_enter(&scope, all_gpus());
	state_lock();
	o = find_object(t->hClient, t->hMemory);
	if (!o || !o->memory)
		*status = NV_ERR_INVALID_OBJECT_HANDLE;
	else if (!c->other || !file_may_use(c->other, o->client))
		*status = NV_ERR_INVALID_CLIENT;
	else {
		m = o->memory;
		m->refs++;
	}
	state_unlock();
	if (m)
		scope_sleep(&scope, locked_ns());
	return m;
}

/* Page tables and TLB, after the locks were given back. */
static uint64_t map_rest_ns(uint64_t length)
{
	return (uint64_t)knob(K_map_us) - locked_ns() + (uint64_t)knob(K_map_mib_us) * (length >> 20);
}

uint32_t range_map(struct call *c)
{
	struct uvm_map_external_head *p = (struct uvm_map_external_head *)c->arg;
	struct uvm_map_external_tail t;
	struct range *r = find_range(c->file->uvm, p->base, p->length);
	uint32_t status = NV_OK;
	struct memory *m;
	uint64_t met;

	memcpy(&t, c->arg + uvm_map_tail_at(load(&S.board->driver[0])), sizeof t);
	if (!r || p->base % PAGE || p->length % PAGE || p->offset % PAGE ||
	    !is_cuttable(r, p->base, p->length, &met))
		return NV_ERR_INVALID_ADDRESS;
	m = hold_memory(c, &t, &status);
	if (!m)
		return status;
	if (p->offset > m->size || p->length > m->size - p->offset)
		status = NV_ERR_INVALID_ARGUMENT;
	else {
		model_sleep_ns(map_rest_ns(p->length));
		state_lock();
		cut(r, p->base, p->length);
		insert_mapping(r, new_mapping(p->base, p->length, p->offset, m));
		state_unlock();
		change_pages(c, EMU_PAGE_MAP, p->base, p->length, p->offset, m);
	}
	state_lock();
	memory_put(m);
	state_unlock();
	return status;
}

/* Any part of any mappings, and nothing at all is fine too. */
uint32_t range_unmap(struct call *c)
{
	struct uvm_unmap_external *p = (struct uvm_unmap_external *)c->arg;
	struct range *r = find_range(c->file->uvm, p->base, p->length);
	uint64_t met;

	REFUSE_IF(!r || p->base % PAGE || p->length % PAGE || !is_cuttable(r, p->base, p->length, &met),
	          NV_ERR_INVALID_ADDRESS);
	REFUSE_IF(!uvm_knows_gpu(c->file->uvm, p->gpuUuid, false), NV_ERR_INVALID_DEVICE);
	model_sleep_ns(met * (uint64_t)knob(K_unmap_us) +
	               (met ? (uint64_t)knob(K_unmap_mib_us) * (p->length >> 20) : 0));
	state_lock();
	cut(r, p->base, p->length);
	state_unlock();
	change_pages(c, EMU_PAGE_HOLE, p->base, p->length, 0, NULL);
	return NV_OK;
}

uint32_t range_sparse(struct call *c)
{
	struct uvm_map_external_sparse *p = (struct uvm_map_external_sparse *)c->arg;
	struct range *r = find_range(c->file->uvm, p->base, p->length);
	uint64_t met;

	if (!r || p->base % SPARSE_ALIGN || p->length % SPARSE_ALIGN ||
	    !is_cuttable(r, p->base, p->length, &met))
		return NV_ERR_INVALID_ADDRESS;
	REFUSE_IF(!uvm_knows_gpu(c->file->uvm, p->gpuUuid, true), NV_ERR_INVALID_DEVICE);
	model_sleep_ns((uint64_t)knob(K_sparse_us) + (uint64_t)knob(K_sparse_mib_us) * (p->length >> 20));
	state_lock();
	cut(r, p->base, p->length);
	insert_mapping(r, new_mapping(p->base, p->length, 0, NULL));
	state_unlock();
	change_pages(c, EMU_PAGE_SPARSE, p->base, p->length, 0, NULL);
	return NV_OK;
}

void ranges_drop(struct vaspace *v)
{
	while (!TAILQ_EMPTY(&v->ranges))
		range_drop(v, TAILQ_FIRST(&v->ranges));
}
