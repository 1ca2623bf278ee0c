/* stream.h - what contexts, events and captures need from streams beyond core.h. */
#ifndef EMU_CUDA_STREAM_H
#define EMU_CUDA_STREAM_H

#include "core.h"

struct event *event_from(CUevent handle);
void event_forget_capture_locked(struct event *event);

#endif
