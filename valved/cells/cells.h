/*
 * What a reclaim asks of an engine's cells, in C because a service waits for it: numpy costs 5 to 10 us a call in cold
 * caches. Pure, but for the caller's arrays.
 */
#include <stdint.h>

/* The cells of an engine in one process on one GPU, by range and slot. */
struct valve_cells {
	int64_t count;
	int64_t columns; /* of the engine */
	const int64_t *column;
	const int64_t *place; /* in rows */
	const int64_t *of;    /* which range */
	const int64_t *slot;
	const int64_t *numbers; /* of each range, as its client counts */
	const int64_t *rows;    /* what stands at each place: a handle, or less than zero */
	uint8_t *is_wanted;     /* scratch by column: zeros, before and after */
	/* Results, [count] each; a run is three words, as in valve_kv_run. */
	int64_t *out_of;
	int64_t *out_slot;
	int64_t *out_runs;
};

/*
 * The cells in these columns where from `lowest` to `highest` stands: out_of and out_slot. Returns how many there are;
 * -1 for a column that is none.
 */
int64_t valve_cells_slots(const struct valve_cells *cells, const int64_t *columns, int64_t wanted,
                          int64_t lowest, int64_t highest);

/* Slots in the order in which they are ordered. */
struct valve_slots {
	int64_t count;
	const int64_t *of; /* which range */
	const int64_t *slot;
	const int64_t *names;   /* of what is to be mapped; NULL for none */
	const int64_t *numbers; /* of each range, as its client counts */
	int64_t flags;
	int64_t *out_runs; /* results, [count], as in valve_cells */
};

/* Their runs: neighbours, by neighbouring names where names count. How many; -1 for one of no range. */
int64_t valve_slots_runs(const struct valve_slots *slots, int64_t ranges);

/*
 * Where slots lie, in order of their addresses, with one span for neighbours of a range: address and bytes, in `out`,
 * [2 * count]. `bases`: of each range; `size`: of a slot. Returns how many spans; -1 for a slot of no range.
 */
int64_t valve_slots_spans(const int64_t *of, const int64_t *slot, int64_t count, const uint64_t *bases,
                          int64_t ranges, uint64_t size, uint64_t *out);

/*
 * The cells in these columns that have a handle, and their runs of neighbours. `cuts` are parts of their number, rising;
 * from `cut_from` cells on no run goes across one, and a stage ends there. `slot_ends` and `run_ends`, [cuts + 1] each:
 * where each stage ends. Returns how many stages there are: 0 for no cells, -1 for a
 * column that is none.
 */
int64_t valve_cells_runs(const struct valve_cells *cells, const int64_t *columns, int64_t wanted,
                         const double *cuts, int64_t cut_count, int64_t cut_from, int64_t *slot_ends,
                         int64_t *run_ends);

/* Blocks in columns. */
struct valve_blocks {
	int64_t blocks;
	int64_t columns; /* of the engine */
	const int64_t *column;
	const int64_t *ptr; /* columns of block b: column[ptr[b]] to column[ptr[b + 1]] */
	uint8_t *is_wanted; /* scratch by column: zeros, before and after */
};

/*
 * Every block with a byte in these columns has no memory from now on, by the engine's table: entries first, the epoch
 * last. Returns how many had some, -1 for a column that is none.
 */
int64_t valve_table_lose(void *table, const struct valve_blocks *blocks, const int64_t *columns,
                         int64_t wanted, int64_t now_ns);

/*
 * How many of these columns, from the first on, are taken until none brings a handle to a GPU that lacks some; -1 for a
 * column that is none. `handles`: of each column, GPU by GPU. `left`: what each GPU lacks, and lacks then.
 */
int64_t valve_columns_reach(const int64_t *handles, int64_t all, int64_t gpus, const int64_t *columns,
                            int64_t count, int64_t *left);

/*
 * How many of these columns, from the first on, cost no more than `most` together; -1 for a column that is none. `sum`:
 * what those cost.
 */
int64_t valve_columns_fit(const int64_t *costs, int64_t all, const int64_t *columns, int64_t count,
                          int64_t most, int64_t *sum);

/* What the file has at these places, end to end in `out`: 0, or -1 and errno. What is not there reads as zero. */
int64_t valve_read_spans(int fd, const int64_t *at, const int64_t *bytes, int64_t count, uint8_t *out);
