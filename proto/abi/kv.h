/*
 * kv.h - KV memory: what a node and an engine agree on, beside the KV_ messages of link.h.
 *
 * Three parties, joined by the service they belong to:
 *   shim     in every process that holds KV memory (a rank): owns the address ranges and carries out orders on them
 *   hook     in the process that schedules (it may be the same): withholds what has no memory, recomputes what was lost
 *   valved   owns the pool of handles and decides who has which
 *
 * Two shared files per attached engine, both made by valved and handed over with KV_TABLE:
 *   table   written by valved alone, sealed so that the hook can only read it
 *   book    written by the hook alone; valved believes nothing in it that could harm another process
 * The memory of both is the hook's: it makes the pages of the table (KV_MAKE) and those of the book that it writes. valved
 * maps no page of a book but the first.
 *
 * The order that matters. A reclaim goes: channels off; table entries written; table epoch raised; memory quarantined on
 * every rank; channels on. So the table says that a block is lost before any step that could have read garbage can
 * end, and a hook that reads the table after a step's output has come in, and before it believes that output, never
 * believes garbage. No lock, no message, no wait. Told first and then done, so that a valved that dies in between, or a
 * quarantine that waits for the next engine step, leaves an engine that recomputes for nothing, never one that believes
 * garbage. Giving back goes the other way round: memory mapped and zero on every rank, then entries, then epoch.
 *
 * Rule for valved
 *   - Nothing is taken in a table before its book says a mode: the hook writes one when it reads that table, and until
 *     then it may believe output by the table that it had before.
 *
 * Rules for a hook
 *   - A block whose entry changed since it was last read has lost its content, whatever the backed bit says: it may
 *     have been taken and given back in between. It is zero or garbage, never another tenant's.
 *   - A block without the backed bit must not be handed out to a request. It may still be read (stale reads find a
 *     quarantine page), but what is written there is lost.
 *   - A hook writes epoch_seen once it has done both for every change up to that epoch.
 *   - An offered block (book, offered[]) is withheld by the hook and stays so until its entry changes and is backed.
 *     It is offered when no step in flight can read or write it any more: valved has it unmapped beside the next steps.
 */
#ifndef VALVE_ABI_KV_H
#define VALVE_ABI_KV_H

#include <stddef.h>
#include <stdint.h>

#define VALVE_KV_ABI         1u
#define VALVE_KV_TABLE_MAGIC 0x31425456564b4c56ull /* "VLKVVTB1" */
#define VALVE_KV_BOOK_MAGIC  0x314b4256564b4c56ull /* "VLKVVBK1" */

#define VALVE_KV_MAX_BLOCKS (1u << 22)
#define VALVE_KV_MAX_ROWS   65536u
#define VALVE_KV_MAX_ROW    (1u << 20)   /* blocks of one request */
#define VALVE_KV_MAX_BOOK   (256u << 20) /* bytes */

/* What the hook can do about a lost block. valved reclaims from COARSE and FULL only. */
enum valve_kv_mode {
	VALVE_KV_MODE_NONE = 0,   /* attached for reports only: never reclaimed from */
	VALVE_KV_MODE_COARSE = 1, /* any loss sends every running request back to waiting */
	VALVE_KV_MODE_FULL = 2,   /* only those that lost something */
};

/* One block in the table: generation << 1 | backed. The generation rises at every change of backing. */
#define VALVE_KV_BACKED 1u

/* Writer of every word: valved. entries[blocks] of uint32_t follow at entry_offset. */
struct valve_kv_table {
	uint64_t magic;
	uint32_t abi;
	uint32_t bytes; /* of the file */
	uint32_t blocks;
	uint32_t block_tokens;
	uint32_t columns;      /* blocks are taken and given by the column */
	uint32_t entry_offset; /* entries[blocks] */
	uint32_t
	        column_offset; /* column_of[blocks]: the column of each block, the lowest where a block straddles */
	uint8_t pad0[20];

	/* 64 */
	_Alignas(64)
	        uint64_t epoch; /* raised, with release order, after the entries of one change were written */
	uint64_t changed_ns;    /* CLOCK_MONOTONIC of that change */
	uint32_t backed_blocks;
	uint32_t
	        target_blocks; /* valved asks the engine to offer whole columns until no more than this are in use */
	uint32_t detached; /* 1: valved has let go of this engine for good: every block stays as it is */
	uint32_t
	        step_tokens; /* the engine is asked to schedule no more tokens in one step; 0: as many as it likes */
	uint8_t pad1[32];
};

/*
 * Writer of every word: the hook. Followed by offered[blocks] of uint8_t at offered_offset, heads[rows] of
 * valve_kv_row at head_offset and cells[rows][row_blocks] of uint32_t at cell_offset: the requests that hold blocks, for
 * the choice of victims. valved may read a row while it is written: a torn row costs a worse choice, never
 * correctness.
 */
struct valve_kv_book {
	uint64_t magic;
	uint32_t abi;
	uint32_t bytes;
	uint32_t rows;
	uint32_t row_blocks;
	uint32_t offered_offset;
	uint32_t head_offset;
	uint32_t cell_offset;
	uint8_t pad0[28];

	/* 64 */
	_Alignas(64) uint64_t epoch_seen; /* changes up to this table epoch are dealt with */
	uint32_t mode;                    /* valve_kv_mode */
	uint32_t used_blocks;             /* held by requests, or cached and worth keeping */
	uint32_t
	        wanted_blocks; /* what the engine would use now if it had it: used and what waiting requests need */
	uint32_t steps;        /* engine steps, wraps */
	uint8_t pad1[40];

	/* 128: progress and receipts; all only rise */
	_Alignas(64) uint64_t lost_blocks; /* blocks with content that was lost */
	uint64_t hit_requests;             /* requests sent back to waiting by a loss, each time counted */
	uint64_t lost_tokens;              /* tokens whose KV has to be computed again */
	uint64_t dropped_tokens;           /* sampled by a step that read lost blocks, and not delivered */
	uint64_t failures;                 /* exceptions inside the hook: the engine went on without it */
	uint32_t running, waiting;         /* requests now */
	uint8_t pad2[16];
};

struct valve_kv_row {
	uint64_t request; /* the engine's own name, hashed; 0: the row is free */
	uint32_t blocks;  /* cells in use */
	uint32_t tokens;  /* with KV in those blocks; 0: as many as the blocks hold */
};

/* ---- bodies of the KV_ messages (link.h lists who sends them) ---- */

#define VALVE_KV_ENTRIES 64u /* per packet */
#define VALVE_KV_RUNS    80u /* per packet */
#define VALVE_KV_TENSORS 16u /* per packet */
#define VALVE_KV_REPEATS 3u

/*
 * What the shim exports for engines, found by dlsym(RTLD_DEFAULT, ...). Without valved they do nothing.
 *   void valve_kv_begin(uint32_t flags);  from here to valve_kv_end(), cuMemAlloc of this thread makes ranges with these
 *   void valve_kv_end(void);              flags; what is smaller than one handle stays ordinary memory
 *   void valve_kv_step(void);             between two engine steps: carries out orders that wait for one
 *   uint32_t valve_kv_ranges(void);       how many ranges there are: 0, and nothing of this process is valved's memory
 */

/* Flags of a range. */
#define VALVE_KV_HEEDED \
	2u /* told again to a new valved: an earlier one has answered KV_STEP for this range with 0 */
#define VALVE_KV_ELASTIC \
	1u /* the engine heeds the table: a range may be backed in part from the start. It has no
                             * hole even then: slots without a handle show the zero page when the engine gets it */

enum valve_kv_op {
	VALVE_KV_BACK =
	        1, /* map the entries' handles at their slots, with access; zero them first where told */
	VALVE_KV_QUARANTINE = 2, /* map the process's own zero page there instead; the handles are given up */
	VALVE_KV_UNBACK =
	        3, /* leave nothing there (only where no kernel may touch it: an online engine's offer) */
	VALVE_KV_TRY =
	        4, /* no slots: is scratch memory (KV_SCRATCH) zero now, and its own once mapped again? */
};

/* How an order is carried out (order.how). */
enum valve_kv_how {
	VALVE_KV_AT_ONCE = 0, /* by the helper thread, now: channels are off, or the slots are idle */
	VALVE_KV_AT_STEP = 1, /* by valve_kv_step(), between two engine steps, with the context drained */
	VALVE_KV_OUTSIDE =
	        2, /* by valved, with UVM_MAP_EXTERNAL_SPARSE: the shim only corrects its books. What libcuda
	                       * thinks is mapped there no longer matters. TRY: it was done that way; else
	                       * the shim puts its zero page there first, as AT_ONCE would */
};

/* Flags of an entry. */
#define VALVE_KV_CREATE 1u /* make the handle here; its fd comes back with KV_DONE */
#define VALVE_KV_ZERO   2u /* its bytes were another's */

struct valve_kv_entry {
	uint64_t handle; /* valved's name of it */
	uint32_t slot;   /* handle_bytes * slot from the base of the range */
	uint32_t flags;
};

/* Neighbouring slots of one range in a KV_RUNS. The handles of a run have names that follow each other. */
struct valve_kv_run {
	uint64_t handle; /* BACK: valved's name of the first one's */
	uint32_t range;
	uint32_t slot;
	uint32_t count; /* of slots: at least one */
	uint32_t flags; /* of every entry */
};

/* One KV tensor. Block b stands at base + sum(i_k * repeat[k].stride) + b * block_stride, i_k < repeat[k].count. */
struct valve_kv_tensor {
	uint64_t base;
	uint64_t block_stride;
	uint64_t block_bytes;
	struct {
		uint64_t count; /* 0: this repeat is not used */
		uint64_t stride;
	} repeat[VALVE_KV_REPEATS];
};

#define VALVE_KV_AT(type, field, at) _Static_assert(offsetof(struct type, field) == (at), #type "." #field)
_Static_assert(sizeof(struct valve_kv_table) == 128, "table head");
_Static_assert(sizeof(struct valve_kv_book) == 192, "book head");
_Static_assert(sizeof(struct valve_kv_row) == 16, "row");
_Static_assert(sizeof(struct valve_kv_entry) == 16, "entry");
_Static_assert(sizeof(struct valve_kv_run) == 24, "run");
_Static_assert(sizeof(struct valve_kv_tensor) == 72, "tensor");
VALVE_KV_AT(valve_kv_table, epoch, 64);
VALVE_KV_AT(valve_kv_table, backed_blocks, 80);
VALVE_KV_AT(valve_kv_table, target_blocks, 84);
VALVE_KV_AT(valve_kv_table, detached, 88);
VALVE_KV_AT(valve_kv_table, step_tokens, 92);
VALVE_KV_AT(valve_kv_book, epoch_seen, 64);
VALVE_KV_AT(valve_kv_book, mode, 72);
VALVE_KV_AT(valve_kv_book, used_blocks, 76);
VALVE_KV_AT(valve_kv_book, wanted_blocks, 80);
VALVE_KV_AT(valve_kv_book, lost_blocks, 128);
VALVE_KV_AT(valve_kv_book, running, 168);
#undef VALVE_KV_AT

#endif
