/*
 * turn.h - a channel's turn on the GPU: the time in which its executor may run kernels because the server's grant
 * word says so. All but the last three are called by
 * executor threads only.
 */
#ifndef EMU_CUDA_TURN_H
#define EMU_CUDA_TURN_H

#include "core.h"

bool turn_begin(struct channel *channel);              /* waits for the grant; false: the channel goes away */
void turn_end(struct channel *channel);                /* gives the GPU up; harmless outside a turn */
bool turn_check(struct channel *channel);              /* between two steps: parks while revoked */
bool turn_run(struct channel *channel, uint64_t real); /* a timed kernel: so many granted nanoseconds */
uint64_t turn_clock(const struct channel *channel); /* granted nanoseconds that this channel has executed */
bool turn_run_until(struct channel *channel, uint64_t clock);
bool turn_pause(struct channel *channel, uint64_t real); /* off the GPU for a while, then back */
void turn_publish_locked(struct channel *channel, bool ready);

/* For threads that execute beside the executor (step.c). Joining waits for the grant and raises active; a thread that
 * joined must look at the grant once more. false: the channel is gone, or the word is no longer what it was (then
 * nudge). */
bool turn_join(struct emu_channel *slot, uint32_t cid, const uint64_t *word, uint64_t parked);
void turn_nudge(struct emu_channel *slot);
void turn_leave(struct emu_channel *slot, struct emu_gpu *gpu);

#endif
