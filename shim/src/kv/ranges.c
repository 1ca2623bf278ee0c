/*
 * ranges.c - the book of KV ranges: which there are, and how to get hold of one. Entries never move, so a pointer stays
 * good while its range is held or claimed.
 */
#include "memory.h"

#include <string.h>
#include <sys/mman.h>

static struct book {
	struct valve_lock lock;
	uint32_t last_id;
	uint32_t used;         /* entries that were ever used */
	uint64_t first, limit; /* all addresses of all ranges lie between: most questions end here */
	struct valve_range range[VALVE_RANGES];
} book;

static size_t slot_bytes(uint32_t slots)
{
	return (size_t)slots * (sizeof(uint64_t) + 2);
}

/* Outside the application's heap; pages come as slots are used. */
static bool make_slots(struct valve_range *range)
{
	void *at = mmap(NULL, slot_bytes(range->slots), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
	                -1, 0);

	if (at == MAP_FAILED)
		return false;
	range->handle = at;
	range->slot = (uint8_t *)(range->handle + range->slots);
	range->pinned = range->slot + range->slots;
	return true;
}

static struct valve_range *free_entry(void)
{
	for (uint32_t i = 0; i < VALVE_RANGES; i++)
		if (book.range[i].state == RANGE_FREE) {
			if (i >= book.used)
				store_release(&book.used, i + 1);
			return &book.range[i];
		}
	return NULL;
}

/* Born without an address: orders find it once valved knows its id. NULL: no room. */
struct valve_range *valve_range_new(struct valve_place *place, uint64_t bytes, uint32_t flags)
{
	uint64_t slots = bytes / place->handle_bytes + (bytes % place->handle_bytes != 0);
	struct valve_range fresh = {.state = RANGE_BORN,
	                            .place = place,
	                            .handle_bytes = place->handle_bytes,
	                            .bytes = bytes,
	                            .flags = flags,
	                            .slots = (uint32_t)slots};
	struct valve_range *entry;

	if (slots > UINT32_MAX / 2 || !make_slots(&fresh))
		return NULL;
	valve_lock(&book.lock);
	entry = free_entry();
	if (entry) {
		fresh.id = ++book.last_id;
		/* Not the lock: a thread may still be waiting there for the range that was here before. */
		memcpy((char *)entry + sizeof(entry->lock), (const char *)&fresh + sizeof(fresh.lock),
		       sizeof(fresh) - sizeof(fresh.lock));
	}
	valve_unlock(&book.lock);
	if (!entry)
		munmap(fresh.handle, slot_bytes(fresh.slots));
	return entry;
}

struct valve_range *valve_range_at(uint32_t index)
{
	return index < load_acquire(&book.used) ? &book.range[index] : NULL;
}

static bool is_there(const struct valve_range *range)
{
	return range->state == RANGE_BORN || range->state == RANGE_LIVE;
}

static bool contains(const struct valve_range *range, uint64_t address)
{
	return range->state == RANGE_LIVE && address - range->base < range->bytes;
}

/* The lock may take long, so the range is looked at again: it may be another by then. */
static struct valve_range *hold(struct valve_range *range, uint32_t id)
{
	bool same;

	valve_lock(&range->lock);
	valve_lock(&book.lock);
	same = range->id == id && is_there(range);
	valve_unlock(&book.lock);
	if (same)
		return range;
	valve_unlock(&range->lock);
	return NULL;
}

struct valve_range *valve_range_hold(uint32_t id)
{
	struct valve_range *found = NULL;

	valve_lock(&book.lock);
	for (uint32_t i = 0; i < book.used && !found; i++)
		if (book.range[i].id == id && is_there(&book.range[i]))
			found = &book.range[i];
	valve_unlock(&book.lock);
	return found ? hold(found, id) : NULL;
}

/* Precondition: the book is locked. */
static struct valve_range *find(uint64_t address)
{
	for (uint32_t i = 0; i < book.used; i++)
		if (contains(&book.range[i], address))
			return &book.range[i];
	return NULL;
}

static bool is_far(uint64_t address)
{
	return address < load_relaxed(&book.first) || address >= load_relaxed(&book.limit);
}

struct valve_range *valve_range_containing(uint64_t address)
{
	struct valve_range *found;
	uint32_t id = 0;

	if (is_far(address))
		return NULL;
	valve_lock(&book.lock);
	found = find(address);
	if (found)
		id = found->id;
	valve_unlock(&book.lock);
	return found ? hold(found, id) : NULL;
}

bool valve_range_look(uint64_t address, struct valve_range_view *out)
{
	const struct valve_range *found;

	if (is_far(address))
		return false;
	valve_lock(&book.lock);
	found = find(address);
	if (found)
		*out = (struct valve_range_view){.base = found->base,
		                                 .bytes = found->bytes,
		                                 .id = found->id,
		                                 .device = found->place->device,
		                                 .context = found->place->context};
	valve_unlock(&book.lock);
	return found != NULL;
}

bool valve_range_turn(struct valve_range *range, enum valve_range_state from, enum valve_range_state to)
{
	bool turns;

	valve_lock(&book.lock);
	turns = range->state == from;
	if (turns)
		store_release(&range->state, (uint32_t)to);
	if (turns && to == RANGE_LIVE) {
		if (!book.limit || range->base < book.first)
			store_relaxed(&book.first, range->base);
		if (range->base + range->bytes > book.limit)
			store_relaxed(&book.limit, range->base + range->bytes);
	}
	valve_unlock(&book.lock);
	return turns;
}

struct valve_range *valve_range_claim(uint64_t base)
{
	struct valve_range *found;

	if (is_far(base))
		return NULL;
	valve_lock(&book.lock);
	found = find(base);
	if (found && found->base == base)
		store_release(&found->state, (uint32_t)RANGE_GOING);
	else
		found = NULL;
	valve_unlock(&book.lock);
	return found;
}

/* Precondition: no thread holds it, and none can: it is GOING or UNTOLD. */
void valve_range_drop(struct valve_range *range)
{
	if (range->handle)
		munmap(range->handle, slot_bytes(range->slots));
	range->handle = NULL;
	valve_range_turn(range, (enum valve_range_state)range->state, RANGE_FREE);
}

/* valved's link number `generation` has heard of it. */
void valve_range_told(struct valve_range *range, uint32_t generation)
{
	valve_lock(&book.lock);
	store_relaxed(&range->generation, generation); /* announce.c reads it without the lock */
	valve_unlock(&book.lock);
}

/* The id of a range that the application has and that link has not heard of; 0: there is none. */
uint32_t valve_range_untold(uint32_t generation)
{
	uint32_t id = 0;

	valve_lock(&book.lock);
	for (uint32_t i = 0; i < book.used && !id; i++)
		if (book.range[i].state == RANGE_LIVE && book.range[i].generation != generation)
			id = book.range[i].id;
	valve_unlock(&book.lock);
	return id;
}

/* The id of the newest range that may have holes; 0: there is none. */
uint32_t valve_range_newest_elastic(void)
{
	uint32_t id = 0;

	valve_lock(&book.lock);
	for (uint32_t i = 0; i < book.used; i++)
		if (book.range[i].state == RANGE_LIVE && (book.range[i].flags & VALVE_KV_ELASTIC) &&
		    book.range[i].id > id)
			id = book.range[i].id;
	valve_unlock(&book.lock);
	return id;
}

uint32_t valve_range_backed(const struct valve_range *range)
{
	uint32_t count = 0;

	for (uint32_t i = 0; i < range->slots; i++)
		count += range->slot[i] == SLOT_BACKED;
	return count;
}

/* No hole in any range that an application may compute over. */
bool valve_ranges_are_whole(void)
{
	bool whole = true;

	valve_lock(&book.lock);
	for (uint32_t i = 0; i < book.used && whole; i++)
		whole = !is_there(&book.range[i]) ||
		        valve_range_backed(&book.range[i]) == book.range[i].slots;
	valve_unlock(&book.lock);
	return whole;
}

uint64_t valve_ranges_bytes(int device)
{
	uint64_t bytes = 0;

	valve_lock(&book.lock);
	for (uint32_t i = 0; i < book.used; i++)
		if (is_there(&book.range[i]) && book.range[i].place->device == device)
			bytes += (uint64_t)book.range[i].slots * book.range[i].handle_bytes;
	valve_unlock(&book.lock);
	return bytes;
}

/* Of those, what has no memory yet; a slot that changes meanwhile counts either way. */
uint64_t valve_ranges_bare_bytes(int device)
{
	uint64_t bytes = 0;

	valve_lock(&book.lock);
	for (uint32_t i = 0; i < book.used; i++)
		if (is_there(&book.range[i]) && book.range[i].place->device == device)
			bytes += (uint64_t)(book.range[i].slots - valve_range_backed(&book.range[i])) *
			         book.range[i].handle_bytes;
	valve_unlock(&book.lock);
	return bytes;
}

VALVE_EXPORT uint32_t valve_kv_ranges(void);

uint32_t valve_kv_ranges(void)
{
	uint32_t count = 0;

	valve_lock(&book.lock);
	for (uint32_t i = 0; i < book.used; i++)
		count += is_there(&book.range[i]);
	valve_unlock(&book.lock);
	return count;
}

/* A forked child: the slots' pages stay, an unused copy; the mappings were the parent's. */
void valve_ranges_reset(void)
{
	valve_lock_reset(&book.lock);
	if (!book.used)
		return;
	memset(book.range, 0, book.used * sizeof(book.range[0]));
	memset(&book, 0, offsetof(struct book, range)); /* the last member; untouched pages stay so */
}
