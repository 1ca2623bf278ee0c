/*
 * pages.c - the shared pages: valved's memfds come and go under fixed addresses.
 *
 * Launches read a page of their own, so that a hold is ended by the valved that ordered it, or by the word of a
 * successor, and never by a change of pages:
 *
 *   launches  read         the link is lost            a valved welcomes us             it lets us go
 *   TOLD      its page     OURS if they wait, or TOLD  KEPT if they wait, or else TOLD  TOLD
 *   OURS      one of ours  OURS                        KEPT if they wait, or else TOLD  -
 *   KEPT      one of ours  OURS                        KEPT                             TOLD
 *
 * mremap replaces a mapping in one step, so a launching thread sees the old words or the new ones, never a hole.
 * Counts made between the copy and the step are lost. They belong to launches of a process that has proven nothing to
 * this valved, and valve_speak_for_the_past makes sure that it does not read as one that never launched.
 */
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

_Alignas(VALVE_PAGE) unsigned char valve_pages[VALVE_PAGES_BYTES];

#define LAUNCH_AT  ((void *)valve_pages)
#define CONTROL_AT ((void *)VALVE_CONTROL_PAGE)
#define REGION_AT  ((void *)(valve_pages + VALVE_CONTROL_BYTES))

static enum { LAUNCHES_TOLD, LAUNCHES_OURS, LAUNCHES_KEPT } launches; /* the session's thread alone */

/* Beside a STOP the word alone says that launches are held, too. */
bool valve_launches_wait(void)
{
	uint32_t order = load_relaxed(&VALVE_LAUNCH->order);

	return order == VALVE_ORDER_HOLD ||
	       (order == VALVE_ORDER_STOP && load_relaxed(&VALVE_LAUNCH->gate_epoch) % 2);
}

bool valve_launches_kept(void)
{
	return launches == LAUNCHES_KEPT;
}

const volatile struct valve_kv_free *valve_kv_free_of(const uint8_t *gpu_uuid)
{
	const struct valve_kv_free *entry = (const void *)(VALVE_CONTROL_PAGE + VALVE_KV_FREE_OFFSET);
	static const uint8_t none[16];

	for (uint32_t i = 0; i < VALVE_KV_FREE_GPUS && memcmp(entry[i].gpu_uuid, none, sizeof(none)); i++)
		if (!memcmp(entry[i].gpu_uuid, gpu_uuid, sizeof(none)))
			return &entry[i];
	return NULL;
}

uint64_t valve_kept_bytes(const uint8_t *gpu_uuid)
{
	const volatile struct valve_kv_free *entry = valve_kv_free_of(gpu_uuid);

	return entry ? load_relaxed(&entry->keep_bytes) : 0;
}

/* A file that can shrink under us would kill the process by SIGBUS: no seal, no mapping. */
static bool is_safe_to_map(int fd, long bytes)
{
	long seals = syscall(SYS_fcntl, fd, F_GET_SEALS);

	return seals >= 0 && (seals & F_SEAL_SHRINK) && lseek(fd, 0, SEEK_END) >= bytes;
}

static bool is_sane(const struct valve_control *control, uint32_t role)
{
	return control->magic == VALVE_CONTROL_MAGIC && control->abi == VALVE_REGION_ABI &&
	       control->bytes >= sizeof(*control) && control->role == role;
}

/* What this process already counted moves into the new region. `magic` last: valved believes nothing before it. */
static void fill_region(struct valve_region *fresh, uint32_t role)
{
	const struct valve_region *old = VALVE_REGION;

	fresh->abi = VALVE_REGION_ABI;
	fresh->bytes = VALVE_REGION_BYTES;
	fresh->features = VALVE_FEATURE_GAPS | VALVE_FEATURE_SELF_GATE | VALVE_FEATURE_HOLD |
	                  VALVE_FEATURE_MEMORY | VALVE_FEATURE_GRANT |
	                  (valve_shim.must_fence ? 0 : VALVE_FEATURE_PLAIN_COUNT);
	fresh->slot_count = old->slot_count; /* of those given out meanwhile: valve_speak_for_the_past */
	fresh->slot_offset = VALVE_SLOT_OFFSET;
	fresh->gap_offset = VALVE_GAP_OFFSET;
	fresh->gap_count = VALVE_GAPS;
	fresh->pid = (uint32_t)syscall(SYS_getpid);
	fresh->busy = role == VALVE_ROLE_ONLINE; /* born busy: nothing is proven yet */
	fresh->launch_ns = now_ns();
	fresh->capture_depth = old->capture_depth;
	fresh->self_stops = old->self_stops;
	/* With its age: without it valved would not count open requests as open until the watcher's next beat. */
	fresh->requests_started = old->requests_started;
	fresh->requests_ended = old->requests_ended;
	fresh->open_requests = old->open_requests;
	fresh->hint_ns = old->hint_ns;
	memcpy((unsigned char *)fresh + VALVE_SLOT_OFFSET, (const unsigned char *)old + VALVE_SLOT_OFFSET,
	       VALVE_SLOTS * sizeof(struct valve_slot));
	store_release(&fresh->magic, VALVE_REGION_MAGIC);
}

static int move_to(void *page, size_t bytes, void *place)
{
	return mremap(page, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place) == MAP_FAILED ? -errno : 0;
}

/*
 * Launches read the control page from here on: the same memory, mapped twice. `second` was made elsewhere: on older kernels
 * mremap unmaps the place first, and then finds that the process may have no more memory, or lock no more.
 */
static int read_control(void *second)
{
	int err = move_to(second, VALVE_CONTROL_BYTES, LAUNCH_AT);

	if (err)
		munmap(second, VALVE_CONTROL_BYTES);
	else
		launches = LAUNCHES_TOLD;
	return err;
}

static void *map_again(void *control)
{
	return mremap(control, 0, VALVE_CONTROL_BYTES, MREMAP_MAYMOVE, NULL);
}

/* Without memory for it they wait on: the session asks again. */
void valve_launches_follow(void)
{
	void *second = launches == LAUNCHES_KEPT ? map_again(CONTROL_AT) : MAP_FAILED;

	if (second != MAP_FAILED)
		read_control(second);
}

/* All three are there before the first one moves: a process that could take only some would run under the lease of a valved that
 * does not know it. */
int valve_map_pages(int control_fd, int region_fd, uint32_t role)
{
	void *control, *region, *second;
	int err = -EPROTO;

	if (!is_safe_to_map(control_fd, VALVE_CONTROL_BYTES) ||
	    !is_safe_to_map(region_fd, VALVE_REGION_BYTES))
		return -EPROTO;
	control = mmap(NULL, VALVE_CONTROL_BYTES, PROT_READ, MAP_SHARED, control_fd, 0);
	if (control == MAP_FAILED)
		return -errno;
	region = mmap(NULL, VALVE_REGION_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, region_fd, 0);
	if (region == MAP_FAILED) {
		err = -errno;
		goto out_control;
	}
	if (!is_sane(control, role))
		goto out_region;
	second = map_again(control);
	if (second == MAP_FAILED) {
		err = -errno;
		goto out_region;
	}
	fill_region(region, role);
	err = move_to(region, VALVE_REGION_BYTES, REGION_AT);
	if (err)
		goto out_second;
	err = move_to(control, VALVE_CONTROL_BYTES, CONTROL_AT);
	if (err) {
		munmap(second, VALVE_CONTROL_BYTES);
		goto out_control;
	}
	if (role == VALVE_ROLE_OFFLINE && valve_launches_wait()) {
		if (launches == LAUNCHES_TOLD)
			valve_launches_hold(); /* ordered by the old valved since; only this one may end it */
		launches = LAUNCHES_KEPT;
		munmap(second, VALVE_CONTROL_BYTES);
		return 0;
	}
	/* The gate word comes last: from here on launches may ring, and everything they write is in place. */
	return read_control(second);

out_second:
	munmap(second, VALVE_CONTROL_BYTES);
out_region:
	munmap(region, VALVE_REGION_BYTES);
out_control:
	munmap(control, VALVE_CONTROL_BYTES);
	return err;
}

static bool map_ours(uint32_t gate, uint32_t order, void *place)
{
	struct valve_control *page =
	        mmap(NULL, VALVE_CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (page == MAP_FAILED)
		return false; /* the dead daemon's page stays: its gate word costs some nanoseconds, nothing else */
	memcpy(page, CONTROL_AT,
	       VALVE_GRANT_OFFSET); /* also what must stay free, until the next valved says */
	page->gate_epoch = gate;
	page->order = order;
	page->watch = 0;
	if (!move_to(page, VALVE_CONTROL_BYTES, place))
		return true;
	munmap(page, VALVE_CONTROL_BYTES);
	return false;
}

/* What launches read says that they wait: from here on it is ours, and no valved that has lost us ends it. */
void valve_launches_hold(void)
{
	if (map_ours(1, VALVE_ORDER_HOLD, LAUNCH_AT))
		launches = LAUNCHES_OURS;
}

void valve_map_private(uint32_t gate, uint32_t order)
{
	map_ours(gate, order, CONTROL_AT);
	if (map_ours(gate, order, LAUNCH_AT))
		launches = LAUNCHES_OURS;
}

void valve_map_fresh(void)
{
	void *pages = mmap(valve_pages, sizeof(valve_pages), PROT_READ | PROT_WRITE,
	                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);

	launches = LAUNCHES_TOLD;
	if (pages == MAP_FAILED)
		store_relaxed(&valve_shim.state, VALVE_STATE_OFF);
}
