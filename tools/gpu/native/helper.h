/* helper.h - what the helper's parts lend each other. */
#ifndef VALVE_GPU_HELPER_H
#define VALVE_GPU_HELPER_H

#include "gpu.h"

/* costs.c: the host's time for the calls that a probe of idleness may make, and for a launch and a graph launch */
int call_costs(unsigned n, CUstream stream, CUdeviceptr word, char *answer, size_t room);

#endif
