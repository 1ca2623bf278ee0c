/*
 * kvorders.c - random orders, sound and wild, on a driver that fails at random (kvdriver.h): afterwards the shim's books are
 * what is so, nothing is held, `done` is exact. Usage: kvorders ROUNDS SEED
 */
#include "kvdriver.h"

#include <dirent.h>

#include "contexts.h"

struct valve_shim valve_shim;
struct valve_contexts valve_contexts;
_Thread_local struct valve_tls valve_tls;

static int open_fds(void)
{
	DIR *folder = opendir("/proc/self/fd");
	int count = 0;

	while (readdir(folder))
		count++;
	closedir(folder);
	return count;
}

static void make_order(struct valve_kv_order *order, uint32_t slots)
{
	bool sorted = draw() % 2;
	uint32_t slot = (uint32_t)(draw() % slots);

	*order = (struct valve_kv_order){.count = (uint32_t)(draw() % (VALVE_KV_ENTRIES + 1)),
	                                 .op = (uint16_t)(VALVE_KV_BACK + draw() % 3)};
	if (order->op == VALVE_KV_QUARANTINE && draw() % 2)
		order->how = VALVE_KV_OUTSIDE;
	for (uint32_t i = 0; i < order->count; i++) {
		struct valve_kv_entry *entry = &order->entry[i];

		slot = sorted ? slot + 1 : (uint32_t)(draw() % slots);
		*entry = (struct valve_kv_entry){.handle = 1000 + draw(),
		                                 .slot = slot % (slots + (draw() % 200 == 0))};
		if (order->op != VALVE_KV_BACK)
			continue;
		entry->flags = (uint32_t)(draw() % 4);
		if (!(entry->flags & VALVE_KV_CREATE)) {
			int fd = eventfd(0, EFD_CLOEXEC);

			CHECK(fd >= 0);
			shared_handle[fd] = 0;
			if (draw() % 50) { /* else no handle at all */
				gpu.next_handle++;
				shared_handle[fd] = gpu.next_handle;
			}
			order->fds.at[order->fds.count++] = fd;
		}
	}
}

/* How an entry that was done left its slot, unless a later one of the same order came to it, too. */
static void check_done(const struct valve_range *range, const struct valve_kv_order *order,
                       const struct valve_outcome *out)
{
	uint32_t created = 0;

	CHECK(out->done <= order->count);
	CHECK(out->status || out->done == order->count);
	for (uint32_t i = 0; i < out->done; i++) {
		uint8_t slot = range->slot[order->entry[i].slot];

		created += order->op == VALVE_KV_BACK && (order->entry[i].flags & VALVE_KV_CREATE);
		if (order->op == VALVE_KV_BACK)
			CHECK(slot == SLOT_BACKED || slot == SLOT_CLEARING);
		else if (order->how == VALVE_KV_OUTSIDE)
			CHECK(slot == SLOT_SPARSE || slot == SLOT_HOLE);
		else if (order->op ==
		         VALVE_KV_QUARANTINE) /* given up in any case; perhaps with no page to show */
			CHECK(slot == SLOT_ZERO || (out->status && (slot == SLOT_HOLE || slot == SLOT_BARE)));
		else
			CHECK(slot == SLOT_HOLE);
	}
	CHECK(out->made.count == created);
	for (uint32_t i = 0; i < created; i++)
		CHECK(fcntl(out->made.at[i], F_GETFD) & FD_CLOEXEC);
}

/* What the application starts while a descriptor is out must not keep the memory. */
static void check_export(const struct valve_range *range)
{
	for (uint32_t i = 0; i < range->slots; i++) {
		int fd = range->slot[i] == SLOT_BACKED ? valve_vmm_export(range, i) : -1;

		if (fd < 0)
			continue;
		CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
		close(fd);
		return;
	}
}

int main(int argc, char **argv)
{
	long rounds = argc > 1 ? atol(argv[1]) : 1000;
	struct valve_place *place;
	struct valve_range *range;
	static struct valve_kv_order order;
	uint64_t done = 0;
	CUdeviceptr base;
	int before;

	place = valve_place_here(H);
	CHECK(place);
	range = valve_range_new(place, 100 * H, VALVE_KV_ELASTIC);
	CHECK(range && !reserve(&base, 100 * H, 0, 0, 0));
	range->base = base;
	CHECK(!valve_vmm_fill(range));
	gpu.random = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
	before = open_fds();
	for (long i = 0; i < rounds; i++) {
		struct valve_outcome out = {0};

		make_order(&order, range->slots);
		gpu.flaky = (uint32_t)(draw() % 3 ? draw() % 40 : 0);
		valve_vmm_carry_out(range, &order, &out);
		gpu.flaky = 0;
		compare(range);
		no_references(place->zero);
		/* Quarantine and unback may leave holes where the driver failed them; done is exact all the same. */
		check_done(range, &order, &out);
		if (out.zeroing)
			valve_vmm_cleared(range, &order, out.done, draw() % 4);
		compare(range);
		check_export(range);
		valve_fds_close(&order.fds);
		valve_fds_close(&out.made);
		CHECK(open_fds() == before);
		done += out.done;
		if (gpu.next_handle > HANDLES - 1000) { /* start afresh */
			valve_vmm_empty(range);
			CHECK(!valve_vmm_fill(range));
			gpu.next_handle = place->zero;
		}
	}
	valve_vmm_empty(range);
	no_references(place->zero);
	printf("%ld orders\n", rounds);
	fprintf(stderr, "%llu entries done, %llu calls failed\n", (unsigned long long)done,
	        (unsigned long long)gpu.failures);
	return 0;
}
