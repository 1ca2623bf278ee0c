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

/* ends.c. All but valve_ends_are_told under capture_lock, or in a forked child */
VALVE_HIDDEN void valve_ends_tell(uint32_t free_number);
VALVE_HIDDEN bool valve_ends_are_told(void); /* false: there is no room for all of it now */
VALVE_HIDDEN void valve_ends_forget(void);

/* capture.c: calls of our own. The RM status; where the kernel did not make the call, one that is no success. */
struct rm_name {
	uint32_t h_client, handle;
};
VALVE_HIDDEN uint32_t valve_rm_control(int fd, struct rm_name object, uint32_t command, void *params,
                                       uint32_t bytes);
VALVE_HIDDEN uint32_t valve_rm_free(int fd, struct rm_name object, uint32_t h_parent);

#endif
