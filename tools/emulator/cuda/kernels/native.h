/*
 * native.h - kernels from a shared object of one's own. A module image of the form
 *
 *     // valve-emu
 *     // native /path/to/kernels.so
 *
 * offers, beside the built-in kernels, every NAME for which the object exports `const struct emu_native emu_native_NAME`.
 * The emulator calls step(args, 0), step(args, 1), ... while the channel is granted, until one returns 0. A step is what
 * cannot be interrupted, so keep it below 50 us. Do not call CUDA from it.
 */
#ifndef VALVE_EMU_NATIVE_H
#define VALVE_EMU_NATIVE_H

#include <stdint.h>

#define EMU_NATIVE_ABI 1u

struct emu_native {
	uint32_t abi, arg_count;
	uint8_t arg_bytes[16]; /* size of each kernel parameter: 1, 2, 4 or 8 */
	int (*step)(const void *args, uint64_t number);
};

#endif
