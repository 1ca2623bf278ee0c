/*
 * fake_rm.h - a driver in one table of functions, for struct valve_os: channels of any number of clients, enable
 * state, refusals and delays on demand. It checks what the real one checks (sizes, owners of files, handles).
 */
#ifndef VALVE_TESTS_FAKE_RM_H
#define VALVE_TESTS_FAKE_RM_H

#include "gate.h"

#include <stdint.h>

struct fake_rules {
	char version[64];
	uint32_t gpus;
	uint32_t fail_clients; /* status of every device of a new RM client */
	uint32_t deny_foreign; /* status for lists that name other clients' channels; 0: allowed */
	uint32_t deny_client;  /* lists that name its channels are refused as a whole */
	uint32_t fail_disable; /* status of every disable */
	uint32_t fail_enable;  /* status of every enable */
	uint32_t fail_query;   /* status of every question for a channel's number */
	uint32_t fail_times;   /* the three above end after so many refusals; 0: they do not */
	uint32_t fail_after;   /* pairs of a refused list that take effect all the same */
	uint32_t interrupts;   /* that many ioctls come back with EINTR first */
	uint32_t hang;         /* disables wait while this is 1 */
	uint32_t hang_enable;  /* so do enables, but for so many: */
	uint32_t passes;
	uint32_t hang_query; /* and questions */
	uint32_t work_us;    /* time that a switch takes */
	uint32_t
	        forget_at; /* the so many-th disable from now finds valved's RM clients forgotten; 0: none does */
};

struct fake_counts {
	uint64_t disables, enables, queries, open_files, clients;
	uint64_t largest;    /* channels in one call */
	uint64_t gate_words; /* disables that found the watched gate word open */
	uint64_t hanging;    /* switches that wait now */
};

extern struct fake_rules fake_rules;
extern struct fake_counts fake_counts;
/* The table itself: a struct valve_os *. */
const void *fake_machine(void);

void fake_reset(void);
/* A workload's RM client and a channel of it, as a shim would report them. */
uint32_t fake_client(int *fd, uint32_t *h_subdevice, uint32_t gpu);
uint32_t fake_channel(uint32_t h_client, uint32_t h_channel, uint32_t gpu);
void fake_free_channel(uint32_t h_client, uint32_t h_channel);
/* 1 on, 0 off, -1 not there */
int fake_is_on(uint32_t h_client, uint32_t h_channel);
uint32_t fake_off_count(void);
void fake_refuse_enables(uint32_t times); /* the rules of the same names, while others run */
void fake_switch(uint32_t h_client, uint32_t h_channel, int on); /* by its application */
/* Forget every RM client but those of fake_client: what a reset of the card does to who was there. */
void fake_forget_openers(void);
/* Every disable looks at this word and counts if it is odd (open). */
void fake_watch_word(const uint32_t *word);
void fake_set_between(void (*between)(int point));

#endif
