/*
 * rm.h - the few driver calls of the lab, raw. Usable with a client of one's own (path A), with a workload's passed
 * descriptor and its client (path B), and inside the workload (path C).
 */
#ifndef VALVE_GPU_RM_H
#define VALVE_GPU_RM_H

#include "lab.h"
#include "nvrm.h"

struct rm_result {
	int err;         /* errno of the ioctl */
	uint32_t status; /* the driver's own word */
	uint64_t ns;
};
struct rm_client {
	int ctl, node;
	uint32_t minor, gpu_id, instance, client, device, subdevice;
};
enum { RM_STEPS = 7 };
struct rm_step {
	const char *name;
	struct rm_result result;
};

extern int (*rm_ioctl)(int fd, unsigned long request, void *arg); /* the tracer points it past its own hook */

struct rm_result rm_alloc(int fd, uint32_t root, uint32_t parent, uint32_t cls, void *params, uint32_t bytes,
                          uint32_t *handle);
struct rm_result rm_control(int fd, uint32_t client, uint32_t object, uint32_t cmd, void *params,
                            uint32_t bytes);
struct rm_result rm_free(int fd, uint32_t root, uint32_t object);
bool rm_good(struct rm_result r);

/* Without with_node /dev/nvidiaN stays closed, and the device must be refused (K/gpu/device.c:140). */
int rm_open(struct rm_client *c, bool with_node, struct rm_step step[RM_STEPS]);
void rm_close(struct rm_client *c);

enum rm_select { SELECT_GR, SELECT_ALL, SELECT_ONE }; /* ONE: the first compute channel only */
typedef struct nv2080_fifo_disable_channels rm_list;
uint32_t rm_pairs(const struct table *table, enum rm_select select, uint32_t only_client, rm_list *out);
struct rm_result rm_switch(int fd, uint32_t client, uint32_t subdevice, rm_list *list, bool off);

#endif
