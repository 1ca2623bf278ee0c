/* table.h - the entry points as a list. */
#ifndef EMU_CUDA_TABLE_H
#define EMU_CUDA_TABLE_H

#include "core.h"

struct entry {
	const char *base;
	CUresult (*function)(void);
	int version, per_thread;
};
extern const struct entry entries[];
extern const unsigned entry_count;

#endif
