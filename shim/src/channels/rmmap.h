/* rmmap.h - between rm.c (the map) and the decoders, rmcall.c and rmcontrol.c. */
#ifndef VALVE_RMMAP_H
#define VALVE_RMMAP_H

#include "rm.h"

struct rm_object *rm_insert(struct rm_map *map, enum rm_kind kind, uint32_t h_client, uint32_t parent,
                            uint32_t handle);
/* Marks an object and all that goes with it; returns the number of this FREE. */
uint32_t rm_doom(struct rm_map *map, uint32_t h_client, uint32_t handle);
void rm_spare(struct rm_map *map, uint32_t free_number); /* that FREE failed */

/* Copies what a foreign pointer points to, if it can be read. */
bool rm_fetch(struct rm_map *map, void *to, uint64_t from, size_t bytes);
bool rm_fetch_argument(struct rm_map *map, const struct rm_call *call, void *to, size_t bytes);

void rm_after_dup(struct rm_map *map, const struct rm_call *call);
void rm_after_control(struct rm_map *map, const struct rm_call *call);

#endif
