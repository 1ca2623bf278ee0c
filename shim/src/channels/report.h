/* report.h - capture.c hands over what went by; report.c keeps the map and tells valved. */
#ifndef VALVE_REPORT_H
#define VALVE_REPORT_H

#include "rm.h"
#include "shim.h"

extern struct rm_map valve_rm VALVE_HIDDEN; /* under capture_lock */

VALVE_HIDDEN void valve_report_before(uint32_t request, const void *argument, struct rm_call *call);
VALVE_HIDDEN void valve_report_after(int fd, const struct rm_call *call, bool ok);
VALVE_HIDDEN void valve_report_uvm(uint32_t request, const void *argument);
VALVE_HIDDEN void valve_report_closing(int fd);

#endif
