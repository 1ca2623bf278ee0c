/* What a reclaim asks of an engine's cells, in few calls: its slots and their runs, and its table. */
#include "cells.h"

#include "kv.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

static bool are_below(const int64_t *values, int64_t count, int64_t most)
{
	for (int64_t i = 0; i < count; i++) {
		if (values[i] < 0 || values[i] >= most)
			return false;
	}
	return true;
}

static void mark(uint8_t *flags, const int64_t *columns, int64_t count, uint8_t value)
{
	for (int64_t i = 0; i < count; i++)
		flags[columns[i]] = value;
}

int64_t valve_cells_slots(const struct valve_cells *cells, const int64_t *columns, int64_t wanted,
                          int64_t lowest, int64_t highest)
{
	int64_t count = 0;

	if (!are_below(columns, wanted, cells->columns))
		return -1;
	mark(cells->is_wanted, columns, wanted, 1);
	for (int64_t i = 0; i < cells->count; i++) {
		int64_t row = cells->rows[cells->place[i]];

		if (!cells->is_wanted[cells->column[i]] || row < lowest || row > highest)
			continue;
		cells->out_of[count] = cells->of[i];
		cells->out_slot[count++] = cells->slot[i];
	}
	mark(cells->is_wanted, columns, wanted, 0);
	return count;
}

/* Appends the runs of the slots [first, last); returns how many runs there are then. */
static int64_t add_runs(const struct valve_slots *slots, int64_t first, int64_t last, int64_t runs)
{
	int64_t *out = slots->out_runs;

	for (int64_t i = first; i < last; i++) {
		int64_t of = slots->of[i];
		int64_t slot = slots->slot[i];
		int64_t name = slots->names ? slots->names[i] : 0;

		if (i > first && of == slots->of[i - 1] && slot == slots->slot[i - 1] + 1 &&
		    (!slots->names || name == slots->names[i - 1] + 1)) {
			out[3 * runs - 1]++;
			continue;
		}
		out[3 * runs] = name;
		out[3 * runs + 1] = slots->numbers[of] + slot * ((int64_t)1 << 32);
		out[3 * runs + 2] = 1 + slots->flags * ((int64_t)1 << 32);
		runs++;
	}
	return runs;
}

int64_t valve_slots_runs(const struct valve_slots *slots, int64_t ranges)
{
	return are_below(slots->of, slots->count, ranges) ? add_runs(slots, 0, slots->count, 0) : -1;
}

static int by_place(const void *left, const void *right)
{
	const uint64_t *one = left;
	const uint64_t *other = right;

	if (one[0] != other[0])
		return one[0] < other[0] ? -1 : 1;
	return (one[1] > other[1]) - (one[1] < other[1]);
}

int64_t valve_slots_spans(const int64_t *of, const int64_t *slot, int64_t count, const uint64_t *bases,
                          int64_t ranges, uint64_t size, uint64_t *out)
{
	int64_t spans = 0;
	uint64_t last[2] = {0, 0};

	if (!are_below(of, count, ranges))
		return -1;
	for (int64_t i = 0; i < count; i++) {
		out[2 * i] = (uint64_t)of[i];
		out[2 * i + 1] = (uint64_t)slot[i];
	}
	qsort(out, (size_t)count, 2 * sizeof(*out), by_place);
	/* In place: a span lies no further behind than its first slot. */
	for (int64_t i = 0; i < count; i++) {
		uint64_t here[2] = {out[2 * i], out[2 * i + 1]};

		if (i && here[0] == last[0] && here[1] == last[1] + 1) {
			out[2 * spans - 1] += size;
		} else {
			out[2 * spans] = bases[here[0]] + here[1] * size;
			out[2 * spans + 1] = size;
			spans++;
		}
		last[0] = here[0];
		last[1] = here[1];
	}
	return spans;
}

int64_t valve_cells_runs(const struct valve_cells *cells, const int64_t *columns, int64_t wanted,
                         const double *cuts, int64_t cut_count, int64_t cut_from, int64_t *slot_ends,
                         int64_t *run_ends)
{
	struct valve_slots taken = {
	        .of = cells->out_of,
	        .slot = cells->out_slot,
	        .numbers = cells->numbers,
	        .out_runs = cells->out_runs,
	};
	int64_t count = valve_cells_slots(cells, columns, wanted, 0, INT64_MAX);
	int64_t stages = 0;
	int64_t first = 0;
	int64_t runs = 0;

	if (count < 0)
		return count;
	if (count < cut_from)
		cut_count = 0;
	for (int64_t cut = 0; cut <= cut_count && first < count; cut++) {
		int64_t last = cut < cut_count ? (int64_t)rint((double)count * cuts[cut]) : count;

		runs = add_runs(&taken, first, last, runs);
		slot_ends[stages] = first = last;
		run_ends[stages++] = runs;
	}
	return stages;
}

int64_t valve_table_lose(void *table, const struct valve_blocks *blocks, const int64_t *columns,
                         int64_t wanted, int64_t now_ns)
{
	struct valve_kv_table *head = table;
	uint32_t *entries = (uint32_t *)((char *)table + sizeof(*head));
	uint32_t lost = 0;

	if (!are_below(columns, wanted, blocks->columns))
		return -1;
	mark(blocks->is_wanted, columns, wanted, 1);
	for (int64_t block = 0; block < blocks->blocks; block++) {
		bool is_lost = false;
		int64_t i = blocks->ptr[block];

		for (; i < blocks->ptr[block + 1] && !is_lost; i++)
			is_lost = blocks->is_wanted[blocks->column[i]];
		if (is_lost) {
			lost += entries[block] & VALVE_KV_BACKED;
			entries[block] = ((entries[block] >> 1) + 1) << 1;
		}
	}
	mark(blocks->is_wanted, columns, wanted, 0);
	head->backed_blocks -= lost;
	head->changed_ns = (uint64_t)now_ns;
	__atomic_store_n(&head->epoch, head->epoch + 1, __ATOMIC_RELEASE);
	return lost;
}

int64_t valve_columns_reach(const int64_t *handles, int64_t all, int64_t gpus, const int64_t *columns,
                            int64_t count, int64_t *left)
{
	if (!are_below(columns, count, all))
		return -1;
	for (int64_t i = 0; i < count; i++) {
		bool brings = false;

		for (int64_t gpu = 0; gpu < gpus; gpu++)
			brings |= left[gpu] > 0 && handles[gpu * all + columns[i]] > 0;
		if (!brings)
			return i;
		for (int64_t gpu = 0; gpu < gpus; gpu++)
			left[gpu] -= handles[gpu * all + columns[i]];
	}
	return count;
}

int64_t valve_columns_fit(const int64_t *costs, int64_t all, const int64_t *columns, int64_t count,
                          int64_t most, int64_t *sum)
{
	*sum = 0;
	if (!are_below(columns, count, all))
		return -1;
	for (int64_t i = 0; i < count; i++) {
		if (*sum + costs[columns[i]] > most)
			return i;
		*sum += costs[columns[i]];
	}
	return count;
}

int64_t valve_read_spans(int fd, const int64_t *at, const int64_t *bytes, int64_t count, uint8_t *out)
{
	for (int64_t i = 0; i < count; i++) {
		for (int64_t done = 0; done < bytes[i];) {
			ssize_t got = pread(fd, out, (size_t)(bytes[i] - done), (off_t)(at[i] + done));

			if (got <= 0)
				return -1;
			done += got;
			out += got;
		}
	}
	return 0;
}
