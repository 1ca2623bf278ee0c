/* Chooses the columns that cost an offline job least, one after another: the inner loop of eviction.py. */
#include "greedy.h"

#include <math.h>

/* Chains that taking this column would hit for the first time: the first tie rule. */
static int64_t newly_hit(const struct valve_cost_index *index, const double *lost, int64_t column)
{
	int64_t count = 0;

	for (int64_t i = index->column_ptr[column]; i < index->column_ptr[column + 1]; i++)
		count += lost[index->entry_chain[index->column_entries[i]]] == 0.0;
	return count;
}

/* The least cost of all, bringing stale groups (-1) up to date. */
static double least_cost(const struct valve_cost_index *index, const double *costs, double *least)
{
	double low = INFINITY;

	for (int64_t first = 0, group = 0; first < index->columns; first += VALVE_GREEDY_GROUP, group++) {
		int64_t stop = first + VALVE_GREEDY_GROUP;

		if (least[group] < 0.0) {
			least[group] = INFINITY;
			for (int64_t i = first; i < stop && i < index->columns; i++)
				least[group] = costs[i] < least[group] ? costs[i] : least[group];
		}
		low = least[group] < low ? least[group] : low;
	}
	return low;
}

/* Ties: fewer chains newly hit (none where nothing is left to lose), more free blocks, lower address. */
static int64_t cheapest(const struct valve_cost_index *index, const double *costs, const double *lost,
                        double *least)
{
	double low = least_cost(index, costs, least);
	int64_t best = -1;
	int64_t best_hit = 0;

	if (isinf(low))
		return -1;
	for (int64_t i = 0; i < index->columns; i++) {
		int64_t hit;

		if (i % VALVE_GREEDY_GROUP == 0 && least[i / VALVE_GREEDY_GROUP] > low) {
			i += VALVE_GREEDY_GROUP - 1;
			continue;
		}
		if (costs[i] > low)
			continue;
		hit = low > 0.0 ? newly_hit(index, lost, i) : 0;
		if (best < 0 || hit < best_hit ||
		    (hit == best_hit && index->free_blocks[i] > index->free_blocks[best])) {
			best = i;
			best_hit = hit;
		}
	}
	return best;
}

/* Charge the chains hit, and lower the marginal cost of every column that shares them. */
static void lose(const struct valve_cost_index *index, int64_t column, double *costs, double *lost,
                 int64_t *live_end, double *least)
{
	for (int64_t i = index->column_ptr[column]; i < index->column_ptr[column + 1]; i++) {
		int64_t entry = index->column_entries[i];
		int64_t chain = index->entry_chain[entry];
		double before = lost[chain];
		double after = index->entry_loss[entry];

		if (entry >= live_end[chain])
			continue; /* an earlier pick already cost the chain more */
		for (int64_t j = index->chain_ptr[chain]; j < live_end[chain]; j++) {
			int64_t other = index->entry_column[j];
			double loss = index->entry_loss[j];

			costs[other] -= (loss < after ? loss : after) - before;
			least[other / VALVE_GREEDY_GROUP] = -1.0;
		}
		lost[chain] = after;
		live_end[chain] = entry;
	}
}

int64_t valve_greedy_select(const struct valve_cost_index *index, double *costs, double *lost,
                            int64_t *live_end, double *least, int64_t needed, int64_t *picks,
                            double *marginal)
{
	int64_t taken = 0;
	int64_t freed = 0;

	while (freed < needed) {
		int64_t column = cheapest(index, costs, lost, least);

		if (column < 0)
			break;
		picks[taken] = column;
		marginal[taken++] = costs[column];
		freed += index->handles[column];
		if (costs[column] > 0.0)
			lose(index, column, costs, lost, live_end, least);
		costs[column] = INFINITY;
		least[column / VALVE_GREEDY_GROUP] = -1.0;
	}
	return taken;
}
