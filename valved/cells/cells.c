/* What a reclaim asks of an engine's cells, in few calls: its runs and its table. */
#include "cells.h"

#include "kv.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>

static bool are_columns(const int64_t *columns, int64_t count, int64_t all)
{
	for (int64_t i = 0; i < count; i++) {
		if (columns[i] < 0 || columns[i] >= all)
			return false;
	}
	return true;
}

static void mark(uint8_t *flags, const int64_t *columns, int64_t count, uint8_t value)
{
	for (int64_t i = 0; i < count; i++)
		flags[columns[i]] = value;
}

/* Chooses the cells; returns how many. */
static int64_t chosen(const struct valve_cells *cells)
{
	int64_t count = 0;

	for (int64_t i = 0; i < cells->count; i++) {
		if (!cells->is_wanted[cells->column[i]] || cells->rows[cells->place[i]] < 0)
			continue;
		cells->out_of[count] = cells->of[i];
		cells->out_slot[count++] = cells->slot[i];
	}
	return count;
}

/* Appends the runs of the cells [first, last); returns how many runs there are then. */
static int64_t add_runs(const struct valve_cells *cells, int64_t first, int64_t last, int64_t runs)
{
	for (int64_t i = first; i < last; i++) {
		int64_t of = cells->out_of[i];
		int64_t slot = cells->out_slot[i];

		if (i > first && of == cells->out_of[i - 1] && slot == cells->out_slot[i - 1] + 1) {
			cells->out_runs[3 * runs - 1]++;
			continue;
		}
		cells->out_runs[3 * runs] = 0;
		cells->out_runs[3 * runs + 1] = cells->numbers[of] + slot * ((int64_t)1 << 32);
		cells->out_runs[3 * runs + 2] = 1;
		runs++;
	}
	return runs;
}

int64_t valve_cells_runs(const struct valve_cells *cells, const int64_t *columns, int64_t wanted,
                         const double *cuts, int64_t cut_count, int64_t cut_from, int64_t *slot_ends,
                         int64_t *run_ends)
{
	int64_t stages = 0;
	int64_t first = 0;
	int64_t runs = 0;
	int64_t count;

	if (!are_columns(columns, wanted, cells->columns))
		return -1;
	mark(cells->is_wanted, columns, wanted, 1);
	count = chosen(cells);
	mark(cells->is_wanted, columns, wanted, 0);
	if (count < cut_from)
		cut_count = 0;
	for (int64_t cut = 0; cut <= cut_count && first < count; cut++) {
		int64_t last = cut < cut_count ? (int64_t)rint((double)count * cuts[cut]) : count;

		runs = add_runs(cells, first, last, runs);
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

	if (!are_columns(columns, wanted, blocks->columns))
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
	if (!are_columns(columns, count, all))
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
	if (!are_columns(columns, count, all))
		return -1;
	for (int64_t i = 0; i < count; i++) {
		if (*sum + costs[columns[i]] > most)
			return i;
		*sum += costs[columns[i]];
	}
	return count;
}
