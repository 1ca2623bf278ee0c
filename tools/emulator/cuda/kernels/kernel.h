/* kernel.h - modules, functions, and the kernels the emulator can really run. */
#ifndef EMU_CUDA_KERNEL_H
#define EMU_CUDA_KERNEL_H

#include "core.h"
#include "native.h"

#define MAGIC_MODULE   0x4d4f4455u
#define MAGIC_FUNCTION 0x46554e43u
enum { MAX_ARGS = 16, FUNCTION_ATTRIBUTES = 16 };

struct launch {
	struct work work;
	struct function *function;
	size_t arg_bytes;
	_Alignas(16) uint8_t args[];
};

/* Runs inside a turn. Arguments lie one after the other, each aligned to its size. */
typedef CUresult kernel_fn(struct channel *channel, const void *args);
struct builtin {
	const char *name;
	kernel_fn *run;
	unsigned args; /* all are 64 bits wide */
};
const struct builtin *builtin_find(const char *name);

struct function {
	uint32_t magic;
	struct module *module;
	const struct builtin *builtin;
	const struct emu_native *native; /* neither: an unknown kernel, a timed no-op */
	int attributes[FUNCTION_ATTRIBUTES];
	struct function *next;
	char name[];
};

struct module {
	uint32_t magic;
	bool has_builtins;
	char *image; /* a copy: the caller may free its own */
	size_t bytes;
	void *library; /* of native kernels */
	struct function *functions;
};

struct module *module_from(const void *handle);
struct function *function_from(const void *handle);

#endif
