/* ownfd.h - our three descriptors in the application's table, each used only while the number still is our file. */
#ifndef VALVE_OWNFD_H
#define VALVE_OWNFD_H

#include <stdbool.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

enum valve_own { VALVE_OWN_LINK, VALVE_OWN_DOORBELL, VALVE_OWN_ORDER, VALVE_OWNS };

/* Which file a number is. Zero: who made it was in a sandbox that does not say, as each thread may have one of its own. */
struct valve_file {
	uint64_t dev, ino;
};

enum valve_sameness { VALVE_OTHER_FILE, VALVE_SAME_FILE, VALVE_UNKNOWN_FILE };

struct valve_own_fd {
	uint32_t number;          /* and 1; 0: none */
	uint32_t mark, next_mark; /* 0: none. While another file takes the number both are ours */
	uint64_t dev, ino;
};

int valve_file_of(
        int fd, struct valve_file *file); /* 0, -EBADF, or -errno where a sandbox does not say. errno stays */
enum valve_sameness valve_file_is(int fd, uint64_t dev, uint64_t ino); /* now */
bool valve_own_table(void);          /* this thread has the session's table of files, or nobody can tell */
bool valve_own_can_tell(int fd);     /* whether a number is ours: else there can be no link */
int valve_own(enum valve_own which); /* its number now, or -1: there is none, or it was closed */
/* The same, or for a thread whose table is one of its own a number for now, which the caller closes */
int valve_own_borrow(enum valve_own which, bool *is_borrowed);
void valve_own_take(enum valve_own which, int fd); /* under link_lock. Takes it over */
void valve_own_close(enum valve_own which);        /* under link_lock */
bool valve_own_has(int fd);                        /* the number is one of ours, and still our file */
int valve_own_from(int first);                     /* the lowest of our numbers from here on; -1: none */
int valve_own_high(int fd);                        /* out of the way: its number from here on */
void valve_own_make_way(int fd);                   /* the application wants this very number */
void valve_own_hang_up(void);                      /* ends the link: the session makes a new one */

#pragma GCC visibility pop
#endif
