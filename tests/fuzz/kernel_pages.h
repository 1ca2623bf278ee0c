/* kernel_pages.h - memory of the model of the kernel, between kernel.c and kernel_pages.c. */
#ifndef VALVE_FUZZ_KERNEL_PAGES_H
#define VALVE_FUZZ_KERNEL_PAGES_H

#include "kernel.h"

struct kernel_memory {
	uint32_t refs; /* its file, and mappings */
	uint32_t bytes;
	_Alignas(64) unsigned char at[VALVE_REGION_BYTES];
};

struct kernel_memory *kernel_memory_new(uint32_t bytes);
void kernel_memory_drop(struct kernel_memory *memory);
struct kernel_memory *kernel_memory_of(int number); /* of a file in the table */
void kernel_pages_fail(bool fail);                  /* there is none for a new mapping */
void kernel_pages_end(void);                        /* the table gives up its own, and none is left */

#endif
