/* kvcache.c - see kvcache.h */
#include "kvcache.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- opening ---- */

static void *zeroed(size_t count, size_t size)
{
	void *at = calloc(count, size);

	if (!at) {
		perror("kv cache");
		exit(1);
	}
	return at;
}

/* The kernel lies beside the program. */
static CUfunction load_kernel(void)
{
	char image[4096] = "// valve-emu\n// native ";
	size_t head = strlen(image);
	ssize_t length = readlink("/proc/self/exe", image + head, sizeof(image) - head - 32);
	CUmodule module;
	CUfunction kernel;
	char *slash;

	if (length <= 0)
		exit(1);
	image[head + (size_t)length] = 0;
	slash = strrchr(image, '/');
	strcpy(slash + 1, "valve-demo-kv.so\n");
	CHECK(cu.cuModuleLoadData(&module, image));
	CHECK(cu.cuModuleGetFunction(&kernel, module, "kv_step"));
	return kernel;
}

/* As an engine with a two-line patch does it; without the shim the brackets do nothing. */
static void allocate(struct kvcache *cache)
{
	void (*begin)(uint32_t) = NULL;
	void (*end)(void) = NULL;
	uint64_t bytes = cache->blocks * cache->block_bytes;

	*(void **)&begin = dlsym(RTLD_DEFAULT, "valve_kv_begin");
	*(void **)&end = dlsym(RTLD_DEFAULT, "valve_kv_end");
	if (begin)
		begin(VALVE_KV_ELASTIC);
	for (uint32_t i = 0; i < cache->planes; i++) {
		CUdeviceptr base;

		CHECK(cu.cuMemAlloc(&base, bytes));
		cache->work->plane[i] = base;
		cache->tensor[i] = (struct valve_kv_tensor){
		        .base = base, .block_stride = cache->block_bytes, .block_bytes = cache->block_bytes};
	}
	if (end)
		end();
}

void kvcache_open(struct kvcache *cache, const char *engine, uint32_t rows, uint32_t row_blocks)
{
	size_t bytes = (sizeof(*cache->work) + KV_PAGE - 1) / KV_PAGE * KV_PAGE;

	cache->state = zeroed(cache->blocks, 1);
	cache->offered = zeroed(cache->blocks, 1);
	cache->lost = zeroed(cache->blocks, 1);
	cache->entry = zeroed(cache->blocks, sizeof(*cache->entry));
	cache->order = zeroed(cache->blocks, sizeof(*cache->order));
	for (uint32_t i = 0; i < cache->blocks; i++)
		cache->order[i] = i;
	cache->work = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (cache->work == MAP_FAILED)
		exit(1);
	CHECK(cu.cuMemHostRegister(cache->work, bytes, 0));
	cache->work->planes = cache->planes;
	cache->work->block_bytes = cache->block_bytes;
	allocate(cache);
	cache->kernel = load_kernel();
	cache->state[0] = KV_USED; /* the null block, for padding */
	cache->free = cache->blocks - 1;
	cache->shape = (struct kvhook_shape){.engine = engine,
	                                     .blocks = cache->blocks,
	                                     .block_tokens = cache->block_tokens,
	                                     .rows = rows,
	                                     .row_blocks = row_blocks,
	                                     .tensors = cache->planes,
	                                     .pinned = 1,
	                                     .tensor = cache->tensor};
	kvhook_open(&cache->hook, &cache->shape);
	kvcache_sync(cache);
}

/* ---- blocks ---- */

bool kvcache_take(struct kvcache *cache, uint32_t count, uint32_t *out)
{
	if (count > cache->free)
		return false;
	for (uint32_t i = 0, taken = 0; taken < count; i++) {
		uint32_t block = cache->order[i];

		if (cache->state[block] != KV_FREE)
			continue;
		cache->state[block] = KV_USED;
		out[taken++] = block;
	}
	cache->free -= count;
	return true;
}

void kvcache_give(struct kvcache *cache, const uint32_t *blocks, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		cache->state[blocks[i]] = KV_FREE;
	cache->free += count;
}

static void set_withheld(struct kvcache *cache, uint32_t block, bool withhold)
{
	if (withhold && cache->state[block] == KV_FREE) {
		cache->state[block] = KV_WITHHELD;
		cache->free--;
		cache->withheld++;
	} else if (!withhold && cache->state[block] == KV_WITHHELD) {
		cache->state[block] = KV_FREE;
		cache->free++;
		cache->withheld--;
	}
}

/* A request fills one column before it takes another: blocks by column, each column's in their own order. */
static void sort_by_column(struct kvcache *cache)
{
	const uint32_t *column = kvhook_columns(&cache->hook);
	uint32_t columns = cache->hook.table->columns, at = 0;

	for (uint32_t c = 0; c < columns; c++)
		for (uint32_t block = 0; block < cache->blocks && at < cache->blocks; block++)
			if (column[block] == c)
				cache->order[at++] = block;
}

/* ---- valved's changes ---- */

/* A first table, or that of a valved that came back: what had memory and has none now is lost. */
static void adopt(struct kvcache *cache, const uint32_t *entries)
{
	bool had = cache->session > 0;

	cache->session = cache->hook.sessions;
	cache->asked = 0;
	sort_by_column(cache);
	for (uint32_t i = 0; i < cache->blocks; i++) {
		bool was_withheld = had && cache->state[i] == KV_WITHHELD && !cache->offered[i];

		cache->lost[i] = !was_withheld && !(entries[i] & VALVE_KV_BACKED);
		cache->offered[i] = 0;
	}
}

static void act(struct kvcache *cache)
{
	for (uint32_t i = 0; i < cache->blocks; i++) {
		if (!cache->lost[i])
			continue;
		cache->hook.book->lost_blocks += cache->state[i] == KV_USED;
		if (cache->offered[i]) /* settled: taken, or given back */
			kvhook_offered(&cache->hook)[i] = cache->offered[i] = 0;
	}
	cache->on_lost(cache->owner);
	for (uint32_t i = 0; i < cache->blocks; i++)
		set_withheld(cache, i, cache->offered[i] || !(cache->entry[i] & VALVE_KV_BACKED));
}

void kvcache_sync(struct kvcache *cache)
{
	struct kvhook *hook = &cache->hook;
	const uint32_t *entries;
	uint64_t epoch;

	kvhook_poll(hook);
	if (!hook->table || (cache->session == hook->sessions && !kvhook_has_news(hook)))
		return;
	epoch = kvhook_epoch(hook);
	entries = kvhook_entries(hook);
	if (cache->session != hook->sessions) {
		adopt(cache, entries);
		memcpy(cache->entry, entries, cache->blocks * sizeof(*entries));
	} else {
		for (uint32_t i = 0; i < cache->blocks; i++) {
			uint32_t now = __atomic_load_n(&entries[i], __ATOMIC_RELAXED);

			cache->lost[i] = now != cache->entry[i];
			cache->entry[i] = now;
		}
	}
	act(cache);
	cache->asked = 0;
	kvhook_seen(hook, epoch);
}

/* ---- what valved reads ---- */

/* The blocks of a column, if all are free or withheld already and not all are. */
static bool can_offer(const struct kvcache *cache, const uint32_t *first, uint32_t count)
{
	uint32_t is_free = 0;

	for (uint32_t i = 0; i < count; i++) {
		if (cache->state[first[i]] == KV_USED)
			return false;
		is_free += cache->state[first[i]] == KV_FREE;
	}
	return is_free > 0;
}

/* Whole free columns, the last first, until what is left fits the target. */
static void offer(struct kvcache *cache)
{
	const uint32_t *column = kvhook_columns(&cache->hook);
	uint32_t target = cache->hook.table->target_blocks, given = 0;

	for (uint32_t end = cache->blocks, first; end > 0; end = first) {
		for (first = end - 1;
		     first > 0 && column[cache->order[first - 1]] == column[cache->order[end - 1]];)
			first--;
		if (cache->blocks - cache->withheld <= target)
			break;
		if (!can_offer(cache, &cache->order[first], end - first))
			continue;
		for (uint32_t i = first; i < end; i++) {
			uint32_t block = cache->order[i];

			if (cache->state[block] != KV_FREE)
				continue;
			set_withheld(cache, block, true);
			cache->offered[block] = kvhook_offered(&cache->hook)[block] = 1;
			given++;
		}
	}
	if (given)
		kvhook_need(&cache->hook);
}

void kvcache_publish(struct kvcache *cache, uint32_t used, uint32_t wanted)
{
	struct valve_kv_book *book = cache->hook.book;
	uint32_t backed = cache->blocks - cache->withheld;

	if (!book)
		return;
	wanted = wanted < cache->blocks ? wanted : cache->blocks;
	book->mode = VALVE_KV_MODE_FULL;
	book->used_blocks = used;
	book->wanted_blocks = wanted;
	book->steps++;
	if (cache->hook.table->detached)
		return;
	if (backed > cache->hook.table->target_blocks) {
		offer(cache);
	} else if (wanted > backed && wanted > cache->asked) {
		cache->asked = wanted;
		kvhook_need(&cache->hook);
	}
}

/* ---- the kernel ---- */

struct kv_op *kvcache_note(struct kvcache *cache, uint32_t block, bool writes, uint64_t tag)
{
	struct kv_work *work = cache->work;

	if (work->count == KV_MAX_OPS) {
		fprintf(stderr, "more than %d blocks in a step; make the batch smaller\n", KV_MAX_OPS);
		exit(1);
	}
	work->op[work->count] = (struct kv_op){.block = block, .writes = writes, .tag = tag};
	return &work->op[work->count++];
}

void kvcache_launch(struct kvcache *cache, CUstream stream)
{
	uint64_t args[] = {(uintptr_t)cache->work};

	if (cache->work->count)
		cuda_launch(cache->kernel, stream, args, 1);
}
