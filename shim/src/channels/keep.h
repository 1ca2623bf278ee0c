/* keep.h - capture.c asks whether an allocation may go to the driver. */
#ifndef VALVE_KEEP_H
#define VALVE_KEEP_H

#include "report.h"

VALVE_HIDDEN bool valve_keep_refuses(int fd, const struct rm_call *call, struct rm_wish *wish);
VALVE_HIDDEN void valve_keep_check(int fd, const struct rm_wish *wish); /* the driver gave it */

#endif
