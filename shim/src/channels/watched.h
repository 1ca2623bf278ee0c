/* watched.h - which descriptors are the driver's: its control file and the uvm file, whatever their numbers. */
#ifndef VALVE_WATCHED_H
#define VALVE_WATCHED_H

#include <stdbool.h>

#pragma GCC visibility push(hidden)

enum valve_watched { WATCHED_NOT, WATCHED_CTL, WATCHED_UVM };

bool valve_watch(int fd, enum valve_watched kind); /* just opened; false: it could not be remembered */
enum valve_watched valve_watched(int fd);          /* what it is now */
int valve_watched_from(int first);                 /* the lowest watched number from here on; -1: none */
void valve_unwatch(int fd);
bool valve_watches(void); /* a driver was ever opened */
void valve_watched_reset(void);

#pragma GCC visibility pop
#endif
