/* rmmap.h - between rm.c (the map) and rmcall.c (the decoder). */
#ifndef VALVE_RMMAP_H
#define VALVE_RMMAP_H

#include "rm.h"

struct rm_object *rm_insert(struct rm_map *map, enum rm_kind kind, uint32_t h_client, uint32_t parent,
                            uint32_t handle);
/* Marks an object and all that goes with it; returns the number of this FREE. */
uint32_t rm_doom(struct rm_map *map, uint32_t h_client, uint32_t handle);
void rm_spare(struct rm_map *map, uint32_t free_number); /* that FREE failed */

#endif
