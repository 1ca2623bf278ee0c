/*
 * step.h - native steps for programs that cannot be cut into small pieces: the model step of a CPU engine runs as one
 * kernel. Between begin and end the calling thread and its OpenMP threads are the kernel: a gate stops them where they
 * stand, by a signal, and they go on when it opens.
 *
 *     valve_emu_step_begin(cuLaunchKernel)     through whatever stands in front of libcuda: a step is a launch
 *     valve_emu_step_end()
 *
 * While a step is parked, a thread that the opening of the gate waits for may not allocate, use stdio, load libraries,
 * take the interpreter's lock, fork, or wait for a lock whose holder does one of these.
 */
#ifndef EMU_CUDA_STEP_H
#define EMU_CUDA_STEP_H

#include "core.h"

typedef CUresult launch_fn(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                           unsigned bz, unsigned shared, CUstream stream, void **params, void **extra);

/* Waits for its turn on the current context's default stream. Nested pairs count as one. launch may be NULL. */
__attribute__((visibility("default"))) CUresult valve_emu_step_begin(launch_fn *launch);
__attribute__((visibility("default"))) CUresult valve_emu_step_end(void);

launch_fn cuLaunchKernel; /* launch.c */

#endif
