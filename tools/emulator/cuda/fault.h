/* fault.h - a kernel that touches a hole in device memory: caught on the executor, fatal to its context only. */
#ifndef EMU_CUDA_FAULT_H
#define EMU_CUDA_FAULT_H

#include "core.h"

void fault_install(void);
void fault_thread_begin(void); /* gives the executor a signal stack */
void fault_thread_end(void);
CUresult fault_guard(struct work *work, struct channel *channel); /* runs the work; 700 when it faulted */

#endif
