/*
 * memory.h - the books of addresses: one arena for all GPUs (addresses are unique across devices, as UVA promises), what
 * each range is, and which RM memory object backs it. memory_lock guards the books and is a leaf: nothing is called
 * under it that takes another lock, sleeps or issues an ioctl.
 */
#ifndef EMU_CUDA_MEMORY_H
#define EMU_CUDA_MEMORY_H

#include "core.h"

/* Works under address and thread sanitizers, and ends below where the kernel may begin to place libraries. */
#define ARENA_BASE  0x7ea000000000ull
#define ARENA_BYTES (256ull << 30)
#define LARGE_PAGE  (2ull << 20)

enum range_kind {
	RANGE_DEVICE,     /* cuMemAlloc */
	RANGE_SLAB,       /* 2 MiB cut into small allocations */
	RANGE_HOST,       /* cuMemHostAlloc */
	RANGE_REGISTERED, /* cuMemHostRegister */
	RANGE_RESERVED,   /* cuMemAddressReserve */
	RANGE_MAPPING,    /* cuMemMap */
};

struct range {
	uint64_t base, bytes;
	enum range_kind kind;
	struct context *ctx;
	struct device *dev;
	struct range *slab;        /* of a small allocation */
	struct vmm_handle *handle; /* of a mapping */
	struct pool *pool;
	uint32_t h_memory;
	unsigned flags, used; /* used: bytes handed out of a slab */
	uint64_t id;
	int access[MAX_DEVICES]; /* of a mapping: CU_ACCESS_* per device */
	uint8_t *blocks;         /* of a slab: one bit per 512 bytes */
};

/* A list of ranges that do not overlap, by address. */
struct book {
	struct range **at;
	unsigned count, room;
};

struct memory {
	pthread_mutex_t lock;
	struct book areas;    /* parts of the arena in use: large allocations, slabs, reservations */
	struct book ranges;   /* what pointers point at: allocations, host memory */
	struct book mappings; /* inside reservations */
	uint64_t next_area, next_id;
	bool has_arena;
};
extern struct memory memory;

/* cells.c: zeroed memory for a range or a handle, and whole pages; both end the process when there is none */
void *cell_new(void);
void cell_free(void *cell);
void *pages_new(size_t bytes);
void pages_free(void *at, size_t bytes);

/* book.c */
struct range *book_find(const struct book *book, uint64_t address);
unsigned book_index(const struct book *book,
                    uint64_t address); /* of the first range that ends above address */
bool book_overlaps(const struct book *book, uint64_t base, uint64_t bytes);
void book_add(struct book *book, struct range *range);
void book_remove(struct book *book, struct range *range);

/* arena.c */
struct range *area_take(enum range_kind kind, uint64_t bytes, uint64_t alignment,
                        uint64_t wanted); /* NULL: no room */
void area_give(struct range *area);

/* alloc.c */
CUresult device_alloc(struct context *ctx, size_t bytes, struct pool *pool, struct range **out);
CUresult device_free(struct range *range);
struct range *range_at(uint64_t address, bool only_base);
void memory_forget_context(struct context *ctx);
uint32_t memory_object_new(struct device *dev, uint32_t cls, uint64_t bytes, uint32_t *h_memory);

/* host.c */
bool host_is_pinned(const void *address);

/* device.c */
CUresult devices_open(void);

#endif
