/*
 * The loop of selective eviction (eviction.py), in C because a reclaim waits for it: about 1 us per column
 * taken and 1 ns per entry touched. Pure: reads the index, writes the caller's arrays, allocates nothing.
 */
#include <stdint.h>

struct valve_cost_index {
	int64_t columns;
	const int64_t *chain_ptr;
	const int64_t *entry_column;
	const double *entry_loss; /* by chain, falling */
	const int64_t *entry_chain;
	const int64_t *column_ptr;
	const int64_t *column_entries;
	const int64_t *free_blocks;
	const int64_t *handles;
};

/* Columns are scanned in groups, and only groups whose costs changed are scanned again. */
#define VALVE_GREEDY_GROUP 128

/*
 * Take cheapest columns until `needed` handles are free or no finite cost is left; returns how many were taken.
 * Scratch of the caller: costs [columns] starts as the columns' costs, infinite where barred; lost [chains] as
 * zeros; live_end [chains] as the end of each chain; least, one per group, as -1. Results: picks and marginal,
 * [columns] each.
 */
int64_t valve_greedy_select(const struct valve_cost_index *index, double *costs, double *lost,
                            int64_t *live_end, double *least, int64_t needed, int64_t *picks,
                            double *marginal);
