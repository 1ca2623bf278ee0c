/* keep.h - capture.c asks whether an allocation may go to the driver. */
#ifndef VALVE_KEEP_H
#define VALVE_KEEP_H

#include "report.h"

VALVE_HIDDEN bool valve_keep_refuses(int fd, const struct rm_call *call);

#endif
