/* table.c - entries.h as a list. In a file of its own, because here every entry point is just an address. */
#include "table.h"

#define EMU_CALL(base, symbol, version) CUresult symbol(void);
#define EMU_TWIN(base, symbol, version, suffix, twin_version) \
	EMU_CALL(base, symbol, version)                       \
	EMU_CALL(base, symbol##suffix, twin_version)
#include "entries.h"
#undef EMU_CALL
#undef EMU_TWIN

const struct entry entries[] = {
#define EMU_CALL(base, symbol, version) {#base, symbol, version, 0},
#define EMU_TWIN(base, symbol, version, suffix, twin_version) \
	{#base, symbol, version, 0}, {#base, symbol##suffix, twin_version, 1},
#include "entries.h"
};
const unsigned entry_count = sizeof(entries) / sizeof(entries[0]);
